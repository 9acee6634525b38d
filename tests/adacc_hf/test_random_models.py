"""Rule R1 on random models: each of them, under a random lossless policy, trains bit for bit as without a policy.

The examples are the same at every run. `pytest --hypothesis-seed=N` draws others.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.price import codec_selection, cost_model
from adacc_hf.price.codec_gradient_error import GradientErrors
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.timing import Timing
from adacc_hf.solve.simple_policies import random_policy
from adacc_hf.torch_glue.meters import MemoryMeter, MemoryPoint

CONFIG = AdaccConfig(min_compress_bytes=0)
VOCABULARY, MAX_TOKENS = 23, 16
NUM_STEPS = 3
"""Steps of each example: the first is recorded, the second validated and used to learn the order of backward, the third
is steady."""

AUTOCAST = {"autocast-bf16": torch.bfloat16, "autocast-fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model, its batch and its policy."""

    depth: int
    heads: int
    head_size: int
    batch: int
    tokens: int
    padding: int
    """Number of tokens by which the first sentence is shorter."""
    dropout: float
    attention: str
    precision: str
    seed: int

    @property
    def width(self) -> int:
        return self.heads * self.head_size


EXAMPLES = st.builds(
    Example,
    depth=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 4]),
    head_size=st.sampled_from([2, 4, 8]),
    batch=st.integers(1, 3),
    tokens=st.integers(2, MAX_TOKENS),
    padding=st.integers(0, 1),
    dropout=st.sampled_from([0.0, 0.1, 0.5]),
    attention=st.sampled_from(["sdpa", "eager"]),
    precision=st.sampled_from(["fp32", "pure-bf16", "autocast-bf16", "autocast-fp16"]),
    seed=st.integers(0, 2**32 - 1),
)


def gpt2(example):
    dropout = {"resid_pdrop": example.dropout, "embd_pdrop": example.dropout, "attn_pdrop": example.dropout}
    sizes = {"n_embd": example.width, "n_layer": example.depth, "n_head": example.heads, "n_positions": MAX_TOKENS}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes, **dropout, **ends)


def llama(example):
    sizes = {"hidden_size": example.width, "intermediate_size": 3 * example.width, "num_hidden_layers": example.depth}
    heads = {"num_attention_heads": example.heads, "num_key_value_heads": 1 + example.seed % 2 * (example.heads - 1)}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=VOCABULARY, attention_dropout=example.dropout, use_cache=False, **sizes, **heads, **ends
    )
    return LlamaForCausalLM, config


def t5(example):
    sizes = {"d_model": example.width, "d_kv": example.head_size, "d_ff": 3 * example.width}
    counts = {"num_layers": min(example.depth, 2), "num_decoder_layers": 1, "num_heads": example.heads}
    settings = {"dropout_rate": example.dropout, "decoder_start_token_id": 0, "use_cache": False}
    return T5ForConditionalGeneration, T5Config(vocab_size=VOCABULARY, **sizes, **counts, **settings)


def bert(example):
    sizes = {"hidden_size": example.width, "intermediate_size": 3 * example.width, "num_hidden_layers": example.depth}
    dropout = {"hidden_dropout_prob": example.dropout, "attention_probs_dropout_prob": example.dropout}
    places = {"num_attention_heads": example.heads, "max_position_embeddings": MAX_TOKENS}
    return BertForMaskedLM, BertConfig(vocab_size=VOCABULARY, **sizes, **dropout, **places)


FAMILIES = {"gpt2": gpt2, "llama": llama, "t5": t5, "bert": bert}


def build(family, example):
    """Return the example's model in train mode, with the same weights at each call."""
    torch.manual_seed(example.seed)
    model_class, config = FAMILIES[family](example)
    config._attn_implementation = example.attention
    model = model_class(config).train()
    return model.to(torch.bfloat16) if example.precision == "pure-bf16" else model


def batch_of(example):
    generator = torch.Generator().manual_seed(example.seed)
    ids = torch.randint(1, VOCABULARY, (example.batch, example.tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, example.tokens - example.padding :] = 0
    batch = {"input_ids": ids, "labels": ids}
    return batch | ({"attention_mask": mask} if example.padding else {})


def autocast(example):
    dtype = AUTOCAST.get(example.precision)
    return torch.autocast("cpu", dtype=dtype) if dtype else nullcontext()


def train(model, batch, example):
    """Return the loss, every gradient and the generator's state, for each step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=example.precision == "autocast-fp16")
    steps = []
    for step in range(NUM_STEPS):
        torch.manual_seed(step)
        with autocast(example):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        steps.append({"the loss": loss.detach(), "the generator's state": torch.get_rng_state(), **gradients})
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return steps


class NoMeter(MemoryMeter):
    """A meter that counts no bytes. Counting takes much of the time of profiling a small model."""

    def __enter__(self):
        self.labels = []
        self.is_open = True
        return self

    def _mark(self, label, dying_bytes):
        self.labels.append(label)

    def __exit__(self, *exception):
        self.is_open = False
        self.points = [MemoryPoint(label, 0, 0) for label in self.labels]


class WithoutPrices(Measurement):
    """A measurement without prices in bytes, time or accuracy, which random policies do not read."""

    def meter(self, device):
        return NoMeter()

    def gradient_errors(self, tape, bases, prices, config):
        return GradientErrors()


@pytest.fixture(scope="module")
def free():
    """Return times of 0 for every operator and codec."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cost_model, codec_selection):
            patch.setattr(module, "time_of", lambda run, device: Timing(0.0, 0.0))
        yield


def different(ours, plain):
    """Return the (step, name) of every tensor that differs in a bit. NaN equals itself."""
    assert [step.keys() for step in ours] == [step.keys() for step in plain]
    return [
        (number, name)
        for number, (left, right) in enumerate(zip(ours, plain, strict=True))
        for name in left
        if left[name].dtype is not right[name].dtype or not torch.equal(as_bits(left[name]), as_bits(right[name]))
    ]


def as_bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# 24 examples for each of the four families. They take a minute, or three on a busy machine.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=16, suppress_health_check=list(HealthCheck))
@given(example=EXAMPLES)
def test_random_models_train_exactly(one_thread, free, family, example):
    batch = batch_of(example)
    plain = train(build(family, example), batch, example)
    model = build(family, example)
    with autocast(example):
        profile = profile_model(model, batch, CONFIG, measurement=WithoutPrices())
    policy = random_policy(profile, example.seed, ("retain", "recompute", "compress"), lossless=True)
    with apply_policy(model, policy, CONFIG) as handle:
        assert not different(train(model, batch, example), plain)
        assert not handle.uncalled()
