"""Prices of a tape: roles of GPT-2's activations, candidates for codecs, times and errors."""

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.profiling.pricing import CODEC_OF_ROLE, is_summary, make_codec, relative_error
from adacc_hf.profiling.timing import Timing

CONFIG = AdaccConfig(min_compress_bytes=0)


@pytest.fixture(scope="module")
def gpt2_profiles(tiny_gpt2, token_batch):
    """(attention, autocast) -> the profile."""
    profiles = {}
    for attention in ("sdpa", "eager"):
        for autocast in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                profiles[attention, autocast] = profile_model(tiny_gpt2(attention), token_batch(), CONFIG)
    return profiles


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_roles_of_a_gpt2_block(gpt2_profiles, attention):
    """The paper's classes (section 3.2). On the CPU attention with dropout runs unfused, so both have a softmax."""
    kind = gpt2_profiles[attention, False].kinds[0]
    counts = {}
    for value in kind.activations:
        counts.setdefault(value.role, []).append(value.name)
    assert counts["input"] == ["argument 0"]
    assert len(counts["mask"]) == 3  # attention, residual, MLP
    assert len(counts["softmax"]) == 2  # before and after dropout
    assert len(counts["qkv"]) == 3
    # Outputs of both norms, the context and the activation: what the four linear layers read.
    assert counts["linear"] == ["ln_1:native_layer_norm", "attn:clone", "ln_2:native_layer_norm", "mlp.act:mul"]
    assert counts["activation"] == ["mlp.c_fc:addmm", "mlp.act:tanh"]


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
                # Groups of 64 INT4 codes err by at most 1/16 of a group's range: 0.5 would be no codec at all.
                assert option.error < 0.5
                assert option.encode_ms > 0
                assert option.decode_ms > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_casts_of_parameters_are_never_compressed_but_may_be_recomputed(gpt2_profiles, attention):
    """Rule R4."""
    kind = gpt2_profiles[attention, True].kinds[0]
    casts = [value for value in kind.activations if value.role == "parameter"]
    assert len(casts) == 4  # the weights of four linear layers; biases are not saved
    assert {value.dtype for value in casts} == {"bfloat16"}
    assert all(value.recomputable for value in casts)
    assert not any(value.codecs for value in casts)
    assert not any(value.role == "parameter" for value in gpt2_profiles[attention, False].kinds[0].activations)


def test_what_sums_up_whole_rows_is_never_compressed(tiny_gpt2, token_batch):
    """Fused attention's logarithms of sums go into an exponential, a norm's statistics into every element of a row."""
    model = tiny_gpt2(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    kind = profile_model(model, token_batch(), AdaccConfig(min_compress_bytes=0, codecs=("int8", "token_int4"))).kinds[
        0
    ]
    attention = [value for value in kind.activations if "flash_attention" in value.name]
    summaries = [value for value in kind.activations if value.shape[-1] == 1] + [min(attention, key=lambda v: v.nbytes)]
    assert len(attention) == 2  # the context, and the logarithms
    assert len(summaries) == 5  # a mean and a norm of two layers, and the logarithms
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
    """However few their columns beside what they read and its weights: keys of one head, adapters."""

    def setup(block):
        block.wide, block.narrow, block.back = nn.Linear(8, 64), nn.Linear(64, 2, bias=False), nn.Linear(2, 8)

    model = toy_model(lambda block, hidden: hidden + block.back(block.narrow(block.wide(hidden))), setup=setup)
    activations = profile_model(model, toy_batch(), CONFIG).kinds[0].activations
    assert [bool(value.codecs) for value in activations if value.name == "narrow:mm"] == [True]


@pytest.mark.parametrize(
    ("function", "kept"),
    [(lambda x: x.log_softmax(-1), "log_softmax"), (torch.cos, "up:addmm")],
    ids=["log_softmax", "cos"],
)
def test_what_backward_takes_an_exponential_or_an_angle_of_is_never_compressed(toy_model, toy_batch, function, kept):
    model = toy_model(lambda block, hidden: hidden + function(block.up(hidden)) * block.down(hidden).sigmoid())
    activations = profile_model(model, toy_batch(), CONFIG).kinds[0].activations
    assert [value.codecs for value in activations if kept in value.name] == [()]
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
    """INT4 makes a small element 0 beside large ones."""
    model = toy_model(lambda block, hidden: hidden + function((3 * block.up(hidden)).exp()) * block.down(hidden))
    profile = profile_model(model, toy_batch(), AdaccConfig(min_compress_bytes=0, codecs=("token_int4",)))
    assert any(value.codecs for value in profile.kinds[0].activations)
    with apply_policy(model, Policy.random(profile, 0, ("compress",)), CONFIG):
        model(**toy_batch()).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_what_attention_adds_to_its_scores_is_never_compressed(tiny_llama, token_batch):
    """A padded batch's mask has -inf in it: a group's scale would be infinite, and each gradient none."""
    model, batch = tiny_llama(), token_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, -3:] = 0
    profile = profile_model(model, batch, CONFIG)
    biases = [value for value in profile.kinds[0].activations if value.name == "self_attn:where"]
    assert [value.codecs for value in biases] == [()]
    with apply_policy(model, Policy.random(profile, 0, ("compress",)), CONFIG):
        model(**batch).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


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


def test_outlier_channels_of_the_neediest_block_are_kept(toy_model, toy_batch):
    """Blocks of one kind share a plan, so its codec keeps as many channels as any of them needs."""

    model, batch = toy_model(lambda block, hidden: block.down(block.up(hidden).tanh()), num_blocks=2), toy_batch(64)
    config = AdaccConfig(min_compress_bytes=0, zscore_threshold=1.5)
    options = {}
    for outliers in (True, False):
        profile = profile_model(model, batch, config.with_overrides(outliers=outliers))
        tanh = next(value for value in profile.kinds[0].activations if value.name.endswith("tanh"))
        options[outliers] = dict(tanh.codecs[0].options)["num_outliers"]
    assert options[False] == 0
    with torch.no_grad():
        model.layers[1].up.weight.mul_(0.01)
        model.layers[1].up.weight[3].fill_(10.0)
        model.layers[1].up.bias.fill_(0.0)
    profile = profile_model(model, batch, config)
    tanh = next(value for value in profile.kinds[0].activations if value.name.endswith("tanh"))
    assert dict(tanh.codecs[0].options)["num_outliers"] >= max(1, options[True])


def test_options_come_from_the_settings():
    config = AdaccConfig(group_size=32, zscore_threshold=2.0)
    assert make_codec("outlier_int4", config, 5).options["num_outliers"] == 5
    assert make_codec("outlier_int4", config, 5).options["group_size"] == 32
    assert make_codec("int8", config, 0).options["group_size"] == 32
    assert make_codec("bitmask", config, 0).options == {}


def test_relative_error():
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(0.2)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0


def test_temporaries_of_operators_are_counted(gpt2_profiles):
    """A safe softmax looks for rows of -inf alone, and a Python number is a tensor while an operator runs."""
    kind = gpt2_profiles["sdpa", False].kinds[0]
    besides = {}
    for operator in kind.operators:
        besides.setdefault(operator.name, set()).add(operator.extra_bytes)
    (softmax,) = (operator for operator in kind.operators if operator.name == "aten._safe_softmax.default")
    (result,) = (kind.values[value] for value in softmax.outputs)
    assert softmax.extra_bytes > result.nbytes // torch.float32.itemsize  # a boolean for each element, and more
    assert max(besides["aten.mul.Tensor"]) == 12  # 8 bytes in double precision, and 4 in that of the other factor
    assert besides["aten.native_layer_norm.default"] == besides["aten.bmm.default"] == {0}


@pytest.mark.parametrize(("timing", "scarce_ms"), [(Timing(2.0, 1.0), 2.0), (Timing(2.0, 3.0), 3.0)])
def test_prices_are_in_the_time_that_is_scarce(monkeypatch, tiny_gpt2, token_batch, timing, scarce_ms):
    """Of a block whose launches take longer than the device does, the launches are what a step waits for."""
    monkeypatch.setattr("adacc_hf.profiling.pricing.time_of", lambda run, device: timing)
    (kind,) = profile_model(tiny_gpt2("sdpa"), token_batch(), CONFIG).kinds
    assert {operator.ms for operator in kind.operators} == {0.0, scarce_ms}
    options = [option for value in kind.activations for option in value.codecs]
    assert {option.encode_ms for option in options} == {option.decode_ms for option in options} == {scarce_ms}
