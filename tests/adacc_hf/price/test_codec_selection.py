"""The codecs of each activation: the candidates, their options and their errors, and at another size."""

import pytest
import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.size_model import joined
from adacc_hf.kernels import outlier_int4
from adacc_hf.kernels.codecs import ROLES, codecs_suiting, get_codec
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


# Roles of GPT-2's activations, and the codec of each role.


CONFIG = AdaccConfig(min_compress_bytes=0)
CODEC_OF_ROLE = {
    "linear": "outlier_int4",
    "norm": "outlier_int4",
    "activation": "outlier_int4",
    "other": "outlier_int4",
    "qkv": "channel_int4",
    "softmax": "asymmetric_int4",
    "input": "int8",
    "mask": "bitmask",
}
"""The paper's layer-specific choice (section 3.2), with 8 bits for values that reach every gradient of a block."""
REPLACED = {"input": "fp8"}
"""Codecs that replace the above where they are more exact, which is not the case on an untrained model."""


@pytest.fixture(scope="module")
def gpt2_profiles(tiny_gpt2, token_batch):
    """Function of (attention, autocast) that returns the profile."""
    profiles = {}
    for attention in ("sdpa", "eager"):
        for autocast in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                profiles[attention, autocast] = profile_model(tiny_gpt2(attention), token_batch(), CONFIG)
    return profiles


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_roles_of_a_gpt2_block(gpt2_profiles, attention):
    """Roles are the paper's classes (section 3.2)."""
    kind = gpt2_profiles[attention, False].kinds[0]
    counts = {}
    for value in kind.activations:
        counts.setdefault(value.role, []).append(value.name)
    assert counts["input"] == ["argument 0"]
    assert len(counts["mask"]) == 3  # attention, residual, MLP
    assert len(counts["softmax"]) == 2  # before and after dropout
    assert len(counts["qkv"]) == 3
    # Inputs of the four linear layers: outputs of both norms, the context and the activation.
    assert counts["linear"] == ["ln_1:native_layer_norm", "attn:clone", "ln_2:native_layer_norm", "mlp.act:mul"]
    assert counts["activation"] == ["mlp.c_fc:addmm", "mlp.act:tanh"]


def test_codecs_say_which_roles_they_suit():
    expected = {role: sorted({codec, REPLACED.get(role, codec)}) for role, codec in CODEC_OF_ROLE.items()}
    assert {role: codecs_suiting(role) for role in ROLES} == expected


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_each_role_gets_its_codec(gpt2_profiles, attention, autocast):
    for kind in gpt2_profiles[attention, autocast].kinds:
        for value in kind.activations:
            assert [option.codec for option in value.codecs] in ([], [CODEC_OF_ROLE.get(value.role)])
            for option in value.codecs:
                codec = get_codec(option.codec, **dict(option.options))
                dtype = getattr(torch, value.dtype)
                assert option.nbytes == codec.predicted_bytes(value.encoded_shape, dtype)
                assert option.lossless == (option.codec == "bitmask")
                assert (option.error == 0) == option.lossless
                # Groups of 64 INT4 codes have errors of at most 1/16 of a group's range: 0.5 would mean no codec at
                # all.
                assert option.error < 0.5
                assert option.encode_ms > 0
                assert option.decode_ms > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_casts_of_parameters_are_never_compressed_but_may_be_recomputed(gpt2_profiles, attention):
    """Casts of parameters are never compressed but may be recomputed (rule R4)."""
    kind = gpt2_profiles[attention, True].kinds[0]
    casts = [value for value in kind.activations if value.role == "parameter"]
    assert len(casts) == 4  # the weights of four linear layers; biases are not saved
    assert {value.dtype for value in casts} == {"bfloat16"}
    assert all(value.recomputable for value in casts)
    assert not any(value.codecs for value in casts)
    assert not any(value.role == "parameter" for value in gpt2_profiles[attention, False].kinds[0].activations)
