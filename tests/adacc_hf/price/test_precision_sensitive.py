"""Values of a block that must not be compressed with loss."""

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.price.precision_sensitive import is_summary
from adacc_hf.solve.simple_policies import random_policy

CONFIG = AdaccConfig(min_compress_bytes=0)


def test_what_sums_up_whole_rows_is_never_compressed(tiny_gpt2, token_batch):
    model = tiny_gpt2(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    kind = profile_model(model, token_batch(), AdaccConfig(min_compress_bytes=0, codecs=("int8", "token_int4"))).kinds[
        0
    ]
    attention = [value for value in kind.activations if "flash_attention" in value.name]
    summaries = [value for value in kind.activations if value.shape[-1] == 1] + [min(attention, key=lambda v: v.nbytes)]
    assert len(attention) == 2  # the context, and the logarithms
    assert len(summaries) == 5  # mean and norm of two layers, and the logarithms
    assert not any(value.codecs for value in summaries)
    assert max(attention, key=lambda v: v.nbytes).codecs


@pytest.mark.parametrize(
    ("size", "source", "summary"),
    [
        pytest.param((4, 12, 1024), (4, 12, 1024, 64), True, id="logarithms of fused attention"),
        pytest.param((4, 12, 1056), (4, 12, 1024, 64), True, id="padded"),
        pytest.param((4, 1024, 1), (4, 1024, 768), True, id="mean of a norm"),
        pytest.param((), (4, 1024), True, id="loss"),
        pytest.param((4096, 128), (4096, 4544), False, id="keys of one head"),
        pytest.param((256, 4096), (4096, 4096), False, id="few tokens through many weights"),
        pytest.param((64, 2048), (4096, 2048), False, id="an expert's tokens"),
        pytest.param((4, 12, 1024, 64), (4, 12, 1024, 64), False, id="attention"),
        pytest.param((4, 1024, 768), (50257, 768), False, id="embedding"),
    ],
)
def test_what_sums_up_rows_has_a_dimension_less(size, source, summary):
    assert is_summary(size, source) is summary


def test_narrow_products_may_be_compressed(toy_model, toy_batch):
    """Inputs of narrow products may be compressed, such as keys of one head or adapters, with any number of columns."""

    def setup(block):
        block.wide, block.narrow, block.back = nn.Linear(8, 64), nn.Linear(64, 2, bias=False), nn.Linear(2, 8)

    model = toy_model(lambda block, hidden: hidden + block.back(block.narrow(block.wide(hidden))), setup=setup)
    activations = profile_model(model, toy_batch(), CONFIG).kinds[0].activations
    assert [bool(value.codecs) for value in activations if value.name == "narrow:mm"] == [True]


@pytest.mark.parametrize(
    ("function", "precise_operator"),
    [(lambda x: x.log_softmax(-1), "log_softmax"), (torch.cos, "up:addmm")],
    ids=["log_softmax", "cos"],
)
def test_what_backward_takes_an_exponential_or_an_angle_of_is_never_compressed(
    toy_model, toy_batch, function, precise_operator
):
    model = toy_model(lambda block, hidden: hidden + function(block.up(hidden)) * block.down(hidden).sigmoid())
    activations = profile_model(model, toy_batch(), CONFIG).kinds[0].activations
    assert [value.codecs for value in activations if precise_operator in value.name] == [()]
    assert any("sigmoid" in value.name and value.codecs for value in activations)


@pytest.mark.parametrize(
    "function",
    [
        torch.log,
        torch.sqrt,
        lambda x: x.mean() / x,
        lambda x: x**0.5,
        lambda x: x**-1.0,
        lambda x: torch.addcdiv(x, x.mean(), x),
        lambda x: (x * x).clamp(max=1e3).log(),
    ],
    ids=["log", "sqrt", "div", "root", "inverse", "addcdiv", "made of it"],
)
def test_no_gradient_is_divided_by_what_a_codec_made_zero(toy_model, toy_batch, function):
    """No gradient is divided by an element that INT4 rounded to 0 next to large ones."""
    model = toy_model(lambda block, hidden: hidden + function((3 * block.up(hidden)).exp()) * block.down(hidden))
    profile = profile_model(model, toy_batch(), AdaccConfig(min_compress_bytes=0, codecs=("token_int4",)))
    assert any(value.codecs for value in profile.kinds[0].activations)
    with apply_policy(model, random_policy(profile, 0, ("compress",)), CONFIG):
        model(**toy_batch()).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_what_attention_adds_to_its_scores_is_never_compressed(tiny_llama, token_batch):
    model, batch = tiny_llama(), token_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, -3:] = 0
    profile = profile_model(model, batch, CONFIG)
    biases = [value for value in profile.kinds[0].activations if value.name == "self_attn:where"]
    assert [value.codecs for value in biases] == [()]
    with apply_policy(model, random_policy(profile, 0, ("compress",)), CONFIG):
        model(**batch).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
