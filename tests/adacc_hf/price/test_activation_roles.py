"""Roles of GPT-2's activations, and the codec of each role."""

import pytest
import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.kernels.codecs import ROLES, codecs_suiting, get_codec

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
