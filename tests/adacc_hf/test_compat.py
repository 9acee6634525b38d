"""What is taken from Transformers and torch that a release may change."""

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache, StaticCache

from adacc_hf import compat


def test_the_names_that_transformers_reads_are_there(tiny_gpt2):
    """A renamed flag would make every policy do nothing."""
    block = tiny_gpt2().transformer.h[0]
    assert getattr(block, compat.FLAG) is False
    assert callable(getattr(compat.PreTrainedModel, compat.SETTER))
    called = []

    def function(fn, *args):
        called.append(fn)
        return fn(*args)

    block.__dict__[compat.FLAG], block.__dict__[compat.FUNCTION] = True, function
    block(torch.zeros(1, 2, 32))
    assert len(called) == 1
    assert compat.keyword_arguments(called[0]) == {}


def test_keyword_arguments_are_those_of_a_partial():
    assert compat.keyword_arguments(partial(print, end="x")) == {"end": "x"}
    assert compat.keyword_arguments(print) == {}


def test_the_block_of_a_call_is_found_as_every_release_hands_it_over():
    block = nn.Linear(2, 2)
    handed = [partial(block.__call__, x=1), partial(nn.Linear.forward, block, x=1), block.__call__, block.forward]
    assert [compat.block_of(fn) for fn in handed] == [block] * 4
    assert [compat.block_of(fn) for fn in (torch.sin, partial(torch.sin, out=None), [].append)] == [None] * 3


def test_caches_of_all_kinds_go_and_all_else_stays(tiny_gpt2):
    static = StaticCache(config=tiny_gpt2().config, max_cache_len=4)
    fn = partial(max, past=DynamicCache(), key="kept")
    new, args = compat.without_caches(fn, (1, static, "kept"))
    assert args == (1, None, "kept")
    assert new.keywords == {"past": None, "key": "kept"}
    assert new.func is max
    assert fn.keywords["past"] is not None
    assert compat.without_caches(max, (1,)) == (max, (1,))


def test_outer_hooks_are_seen():
    assert compat.outer_hooks() is None
    with torch.autograd.graph.save_on_cpu():
        assert compat.outer_hooks() is not None
    assert compat.outer_hooks() is None


def test_checkpoint_wrappers_are_known():
    assert compat.is_checkpoint_wrapper(checkpoint_wrapper(nn.Linear(1, 1)))
    assert not compat.is_checkpoint_wrapper(nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1))))


def test_attention_implementations_are_found(tiny_gpt2):
    assert compat.attention_of(tiny_gpt2("eager").transformer.h[0]) == ["eager"]
    assert compat.attention_of(tiny_gpt2("sdpa").transformer.h[0]) == ["sdpa"]
    assert compat.attention_of(nn.Linear(1, 1)) == []


def test_class_names_are_those_before_fsdp2(tiny_gpt2):
    block = tiny_gpt2().transformer.h[0]
    assert compat.class_name(block) == "GPT2Block"
    block.__class__ = type("FSDPGPT2Block", (FSDPModule, type(block)), {})
    assert compat.class_name(block) == "GPT2Block"
