"""The codecs of each activation: the candidates, their options and their errors, and at another size."""

import pytest
import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.size_model import joined
from adacc_hf.kernels import outlier_int4
from adacc_hf.price.codec_selection import resize_profile
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import least_policy


@pytest.mark.parametrize(
    ("config", "codecs"),
    [
        pytest.param({"actions": ("retain", "recompute")}, {"bitmask"}, id="no-compress"),
        pytest.param({"codecs": ("int8",)}, {"int8"}, id="int8"),
        pytest.param({"codecs": ("int8", "token_int4", "bitmask")}, {"int8", "token_int4", "bitmask"}, id="three"),
        pytest.param({"min_compress_bytes": 2**30}, set(), id="all-too-small"),
    ],
)
def test_settings_narrow_the_candidates(tiny_gpt2, token_batch, config, codecs):
    profile = profile_model(tiny_gpt2(), token_batch(), AdaccConfig(**{"min_compress_bytes": 0, **config}))
    priced = {option.codec for kind in profile.kinds for value in kind.values for option in value.codecs}
    assert priced == codecs


def test_small_activations_are_never_compressed(tiny_gpt2, token_batch):
    floor = 4096
    profile = profile_model(tiny_gpt2(), token_batch(), AdaccConfig(min_compress_bytes=floor))
    sizes = {bool(v.codecs): [] for v in profile.kinds[0].activations}
    for value in profile.kinds[0].activations:
        sizes[bool(value.codecs)].append(value.nbytes)
    assert min(sizes[True]) >= floor
    assert min(sizes[False]) < floor


def test_outlier_channels_of_a_block_input_are_kept(toy_model, toy_batch, monkeypatch):
    """Outlier channels of a block input are kept, even if autograd does not save it: replay may start there."""
    model = toy_model(lambda block, hidden: hidden + block.down((2 * hidden).tanh()), num_blocks=2)
    with torch.no_grad():
        model.layers[0].down.weight[3].fill_(100.0)
    monkeypatch.setattr(outlier_int4, "ZSCORE_THRESHOLD", 2.0)
    config = AdaccConfig(min_compress_bytes=0, codecs=("outlier_int4",))
    (kind,) = profile_model(model, toy_batch(64), config).kinds
    start = kind.activations[0]
    assert not start.saved
    assert dict(start.codecs[0].options)["num_outliers"] == 1


def test_a_codec_that_says_what_it_suits_is_chosen_for_it(tiny_gpt2, token_batch, half_precision):
    """A codec that declares a suitable role is chosen for it, though no code of the package names the codec. INT4 and
    INT8, with errors of 1e-1 and 1e-2, exceed the bound. The tested codec, with 11 bits of mantissa and an error below
    2^-11, does not."""
    config = AdaccConfig(actions=("retain", "compress"), min_compress_bytes=0, max_error=1e-3)
    profile = profile_model(tiny_gpt2(), token_batch(), config)
    offered = {v.role: {option.codec for option in v.codecs} for v in profile.kinds[0].activations if v.codecs}
    assert {role for role, codecs in offered.items() if half_precision in codecs} == {"linear"}
    assert offered["linear"] == {half_precision, "outlier_int4", "int8"}
    policy = least_policy(profile, config)
    codecs_of_roles = {
        (profile.kinds[0].values[value].role, choice.codec)
        for value, choice in policy.plans[0].choices
        if choice.codec is not None
    }
    assert codecs_of_roles == {("linear", half_precision), ("mask", "bitmask")}


def _codecs_of_inputs(model, batch, **overrides):
    """Return the codecs that are offered for the block input, with their errors."""
    config = AdaccConfig(**{"min_compress_bytes": 0, **overrides})
    start = profile_model(model, batch, config).kinds[0].activations[0]
    assert start.role == "input"
    return {option.codec: option.error for option in start.codecs}


def _with_large_channel(model, scale):
    """Return the model, changed so that one channel of the residual stream is far larger than the others."""
    with torch.no_grad():
        model.inlet.weight[3] *= scale
    return model


@pytest.mark.parametrize(("scale", "codec"), [(1.0, "int8"), (1e4, "fp8")])
@pytest.mark.parametrize("max_error", [None, 0.1])
def test_a_block_input_takes_the_more_exact_codec_of_eight_bits(toy_model, toy_batch, scale, codec, max_error):
    """A block input has one option of eight bits, the more exact one."""
    model = _with_large_channel(toy_model(lambda block, hidden: hidden + block.down(block.up(hidden).tanh())), scale)
    offered = _codecs_of_inputs(model, toy_batch(64), max_error=max_error)
    assert set(offered) == {codec}
    both = _codecs_of_inputs(model, toy_batch(64), codecs=("int8", "fp8"))
    assert offered[codec] == min(both.values()) < max(both.values())


def test_settings_that_name_fp8_have_it_for_any_activation(tiny_gpt2, token_batch):
    profile = profile_model(tiny_gpt2(), token_batch(), AdaccConfig(min_compress_bytes=0, codecs=("fp8",)))
    roles = {value.role for value in profile.kinds[0].values for option in value.codecs if option.codec == "fp8"}
    assert roles >= {"input", "linear", "qkv", "activation"}


def test_a_block_input_that_is_not_finite_keeps_the_codec_that_would_be_replaced(toy_model, toy_batch):
    """For a block input that is not finite, the default codec stays, because all errors are NaN."""
    model = toy_model(lambda block, hidden: hidden + block.down(block.up(hidden).tanh()))
    with torch.no_grad():
        model.inlet.bias[3] = float("inf")
    assert set(_codecs_of_inputs(model, toy_batch(64))) == {"int8"}


def test_profiles_of_a_few_sizes_predict_another(tiny_gpt2, token_batch, without_onednn):
    """Three lengths determine one independent size, and the profile of a fourth is that which is measured there."""
    config = AdaccConfig(actions=("retain", "recompute"))
    model = tiny_gpt2()
    profiles = [profile_model(model, token_batch(4, length), config) for length in (24, 40, 16, 32)]
    *known, target = profiles
    assert joined(known[:2]).sizes is None
    predicted = resize_profile(joined(known), target.measured[0][0])
    for action in ("retain", "recompute"):
        policies = [uniform_policy(profile, action) for profile in (predicted, target)]
        assert policies[0].predicted_peak_bytes == policies[1].predicted_peak_bytes
