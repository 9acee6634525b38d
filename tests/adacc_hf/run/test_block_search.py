"""Blocks: how they are found, and which models are refused."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.errors import NestedHooksError, NoBlocksError
from adacc_hf.run.block_search import find_blocks
from adacc_hf.run.blocks import Installation

CONFIG = AdaccConfig(min_compress_bytes=0)


class Layer(nn.Linear):
    """A block of a model without Transformers."""


class PlainModel(nn.Module):
    """A model without Transformers, with a list of three blocks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(3))


@pytest.fixture
def plain_model():
    return PlainModel()


def test_blocks_are_the_checkpointing_layers(tiny_gpt2):
    assert [name for name, _ in find_blocks(tiny_gpt2(layers=3))] == [f"transformer.h.{i}" for i in range(3)]


def test_only_the_outermost_of_nested_blocks_counts(toy_model):
    model = toy_model(lambda block, hidden: hidden)
    model.layers[0].inside = copy.deepcopy(model.layers[1])
    assert [name for name, _ in find_blocks(model)] == ["layers.0", "layers.1"]
    model.layers_after = copy.deepcopy(model.layers[1])  # a name with the same prefix is not nested
    assert [name for name, _ in find_blocks(model)] == ["layers.0", "layers.1", "layers_after"]


def test_no_blocks_is_an_error_with_a_way_out(plain_model):
    message = r"PlainModel has no repeated blocks.*ModuleLists: Layer \(3 times\)\).*block_classes=\('Layer',\)\)$"
    with pytest.raises(NoBlocksError, match=message):
        find_blocks(plain_model)
    with pytest.raises(NoBlocksError, match=r"'Leyer'.*block_classes=\('Layer',\)\)$"):
        find_blocks(plain_model, ("Leyer",))
    with pytest.raises(NoBlocksError, match=r"block_classes=\('Lair',\) names no module of "):
        profile_model(plain_model, {"x": torch.ones(1, 8)}, AdaccConfig(block_classes=("Lair",)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.21 with Transformers 5.23
@pytest.mark.parametrize(("name", "words"), [("PrefixTuningConfig", "prefix tuning"), ("CartridgeConfig", "cartridge")])
def test_adapters_that_are_caches_are_refused(tiny_gpt2, name, words):
    peft = pytest.importorskip("peft")
    config = getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match=f"^{words} passes its prefix to the blocks"):
        Installation(peft.get_peft_model(tiny_gpt2(), config))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:`is_gradient_checkpointing`")
def test_an_alora_is_refused(tiny_gpt2):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], alora_invocation_tokens=[1, 2])
    with pytest.raises(ValueError, match=r"^alora_invocation_tokens .* gradient_checkpointing=True without adacc_hf"):
        Installation(peft.get_peft_model(tiny_gpt2(), config))


@pytest.mark.parametrize("path", ["transformer.h.1", "transformer.h.0.mlp"])
def test_checkpoint_wrappers_are_refused(tiny_gpt2, token_batch, path):
    """Checkpoint wrappers around a block (FSDP's activation_checkpointing) or inside one are refused."""
    model = tiny_gpt2()
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, checkpoint_wrapper(model.get_submodule(path)))
    with pytest.raises(NestedHooksError, match=rf"{path} is wrapped .*activation_checkpointing"):
        profile_model(model, token_batch(), CONFIG)
    assert not any("forward" in module.__dict__ for module in model.modules())
