"""Guarantees of every codec's interface, for any shape, dtype and data."""

import json
import subprocess
import sys

import pytest
import torch
from codec_cases import DTYPES, LOSSY, PARTS, spread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from adacc_hf.kernels import _cpu
from adacc_hf.kernels.codecs import Codec, Kernels, get_codec, list_codecs, register

SHAPE = (2, 3, 70, 4)


def _noise(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


def _mask(dtype: torch.dtype, value: float = 1.125) -> Tensor:
    return (_noise(torch.float32) > 0).to(dtype) * value


def test_listing_the_codecs_names_all_seven_and_loads_no_triton() -> None:
    script = (
        "import sys; from adacc_hf.kernels.codecs import list_codecs; print(*list_codecs(), 'triton' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.split() == [
        *("asymmetric_int4", "bitmask", "channel_int4", "fp8", "int8", "outlier_int4", "token_int4"),
        "False",
    ]


def test_an_unknown_codec_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown codec 'int5'; known codecs: asymmetric_int4, bitmask"):
        get_codec("int5")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int8", {"scale": "paper"}, r"'int8' has no option 'scale'; its options: group_size"),
        ("bitmask", {"seed": 1}, r"'bitmask' has no option 'seed'; its options: none"),
        ("outlier_int4", {"group_size": 48}, r"group_size=48 is not one of \(16, 32"),
        ("fp8", {"group_size": 100}, r"'fp8': group_size=100 is not one of \(16, 32"),
        ("outlier_int4", {"num_outliers": -1}, r"num_outliers=-1 must be 0 or more"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_codec(name, **options)


def test_options_survive_json_and_rebuild_the_codec(lossy: Codec) -> None:
    options = json.loads(json.dumps(lossy.options))
    rebuilt = get_codec(lossy.name, **options)
    assert rebuilt.options == lossy.options
    assert repr(rebuilt) == repr(lossy)


def test_an_unsupported_tensor_is_refused(codec_name: str) -> None:
    codec = get_codec(codec_name)
    wrong = torch.zeros(4, 4, dtype=torch.complex64)
    assert not codec.supports((4, 4), wrong.dtype)
    assert not codec.accepts(wrong)
    with pytest.raises(TypeError, match=rf"codec '{codec_name}' .* shape \(4, 4\) and torch.complex64"):
        codec.encode(wrong)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("lossy", "dtype", "part"), spread(LOSSY, DTYPES, PARTS), indirect=True)
def test_lossy_codecs_restore_shapes_and_predict_bytes(lossy, dtype, part):
    x = part(_noise(dtype))
    payload = lossy.encode(x)
    restored = lossy.decode(payload)
    assert (restored.dtype, restored.shape, restored.stride()) == (x.dtype, x.shape, x.stride())
    assert payload.nbytes == lossy.predicted_bytes(tuple(x.shape), dtype)
    assert payload.nbytes == sum(t.untyped_storage().nbytes() for t in payload.tensors)
    # The bound is loose, because exact bounds are tested per codec. Poison or permuted elements give errors of 1 and
    # more.
    assert _relative_error(restored, x) < 0.3


def _relative_error(restored: Tensor, x: Tensor) -> float:
    x, restored = x.float(), restored.float()
    return float((restored - x).norm() / x.norm().clamp(min=1e-30)) if x.numel() else 0.0


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("part", "dtype", "value"),
    spread(PARTS, DTYPES, [1.125, -1.0, float("-inf"), float("nan")]),
    indirect=["part", "dtype"],
)
def test_bitmask_is_lossless_on_what_it_accepts(dtype, value, part):
    x = part(torch.where(_noise(torch.float32) > 0, value, 0.0).to(dtype))
    codec = get_codec("bitmask")
    assert codec.accepts(x)
    payload = codec.encode(x)
    restored = codec.decode(payload)
    assert payload.nbytes == codec.predicted_bytes(tuple(x.shape), dtype)
    torch.testing.assert_close(restored, x, rtol=0, atol=0, equal_nan=True)


def test_encoding_leaves_its_input_and_the_generator_alone(codec_name: str) -> None:
    codec = get_codec(codec_name)
    x = _mask(torch.float32)
    original, state = x.clone(), torch.get_rng_state()
    payload = codec.encode(x)
    codec.decode(payload)
    torch.testing.assert_close(x, original, rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)
    inside = {t.untyped_storage().data_ptr() for t in payload.tensors}
    assert x.untyped_storage().data_ptr() not in inside


def test_no_gradient_goes_through_a_codec(lossy: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload with a gradient would keep its tensor's graph alive. The references are ordinary operators."""
    monkeypatch.setattr(_cpu, "library", lambda: None)
    x = _noise(torch.float32).requires_grad_() * 2
    payload = lossy.encode(x)
    assert torch.is_grad_enabled()
    assert not any(tensor.requires_grad for tensor in (*payload.tensors, lossy.decode(payload)))


@pytest.mark.parametrize(
    ("lossy", "bad", "dtype"),
    spread(LOSSY, [float("inf"), float("-inf"), float("nan")], DTYPES),
    indirect=["lossy", "dtype"],
)
def test_what_is_not_finite_stays_so_and_other_groups_are_untouched(lossy, dtype, bad):
    clean = _noise(dtype, (256, 64))
    dirty = clean.clone()
    dirty[3, 5] = bad
    lossy.fit(clean)
    restored, expected = lossy.decode(lossy.encode(dirty)), lossy.decode(lossy.encode(clean))
    assert not restored[3, 5].isfinite()
    # A group is 64 rows of a column, a row, or up to 1024 elements (16 rows), so that row 64 and later rows and, for
    # the channel-wise codec, other columns share no group with [3, 5]. Rows from 128 on share bytes with it.
    far = torch.ones_like(clean, dtype=torch.bool)
    far[: 64 if lossy.name == "channel_int4" else 16, 5 if lossy.name == "channel_int4" else slice(None)] = False
    torch.testing.assert_close(restored[far], expected[far], rtol=0, atol=0)


EXTREME = {
    "zeros": [0.0],
    "constant": [2.5],
    "denormal": [1e-40, -6e-8, 3e-45],
    "tiny": [1e-30, -2e-38],
    "half-largest": [65504.0, -65504.0, 1.0],
    "bfloat16-largest": [3.3895313892515355e38, -3.3895313892515355e38, 0.0],
    "one-sided": [100.0, 101.0, 100.25],
}


@pytest.mark.parametrize(("lossy", "values", "dtype"), spread(LOSSY, EXTREME, DTYPES), indirect=["lossy", "dtype"])
def test_extreme_values_stay_finite_and_within_a_step(lossy: Codec, dtype: torch.dtype, values: str) -> None:
    x = torch.tensor(EXTREME[values]).repeat(50)[:131].to(dtype)
    x = x.nan_to_num(posinf=65504.0, neginf=-65504.0).view(1, -1)
    restored = lossy.decode(lossy.encode(x)).float()
    # A step is at most a seventh of the largest magnitude. Codes may be off by one step, and by 2^-7 of the peak more.
    # Peaks below 2^-100 decode to zero, half ranges below it to the offset, which is exact to half a denormal.
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    limit = x.float().abs().max() * (1 / 7 + 2**-7) + 2.0**-99 + smallest
    assert restored.isfinite().all()
    assert bool(((restored - x.float()).abs() <= limit).all())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.lists(st.integers(0, 9), max_size=5).map(tuple), seed=st.integers(0, 2**31), data=st.data())
def test_any_shape_round_trips(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list_codecs()))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    x = _noise(dtype, shape, seed)
    codec = get_codec(name)
    if name == "bitmask":
        x = x.gt(0).to(dtype)
    if not codec.supports(tuple(x.shape), dtype):
        assert x.numel() == 0  # only tensors without channels are refused
        return
    payload = codec.encode(x)
    restored = codec.decode(payload)
    assert payload.nbytes == codec.predicted_bytes(tuple(x.shape), dtype)
    # A codec of 4 bits clips by at most one step, an eighth of the largest magnitude truncated by 2^-7.
    limit = float(x.abs().max()) * (1 / 8 + 2**-7) if x.numel() else 0.0
    torch.testing.assert_close(restored, x, rtol=0, atol=limit)


@pytest.mark.parametrize("name", list_codecs())
def test_a_tensor_is_coded_where_it_is_whatever_the_default_device(name: str) -> None:
    """A script may call torch.set_default_device("cuda") with a module that stays on the CPU."""
    x = _mask(torch.float32) if name == "bitmask" else _noise(torch.float32)
    codec = get_codec(name)
    expected = codec.decode(codec.encode(x))
    with torch.device("meta"):
        payload = codec.encode(x)
        assert torch.equal(codec.decode(payload), expected)
    assert {tensor.device.type for tensor in payload.tensors} == {"cpu"}


class Halved(Codec):
    """A codec with formulas only: no kernels, and neither `encode` nor `decode`."""

    name = "halved"

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype is torch.float32

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.half(),)

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return tensors[0].to(dtype).view(size)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("keeps_rows", [False, True])
def test_a_formula_makes_a_codec(part, keeps_rows, monkeypatch):
    monkeypatch.setattr(Halved, "keeps_rows", keeps_rows)
    x = part(_noise(torch.float32))
    restored = Halved().decode(Halved().encode(x))
    torch.testing.assert_close(restored, x.half().float(), rtol=0, atol=0)
    assert Halved.is_traceable()


@pytest.mark.parametrize("is_built", [True, False])
def test_kernels_are_taken_where_they_are_built(is_built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def encode(x: Tensor, codes: Tensor) -> None:
        calls.append("encode")
        codes.copy_(x)

    def decode(out: Tensor, codes: Tensor) -> None:
        calls.append("decode")
        out.copy_(codes)

    class WithKernels(Halved):
        cpu = Kernels(encode, decode)

        def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
            return ((shape, torch.float16),)

    monkeypatch.setattr(_cpu, "library", lambda: object() if is_built else None)
    x = _noise(torch.float32)
    torch.testing.assert_close(WithKernels().decode(WithKernels().encode(x)), x.half().float(), rtol=0, atol=0)
    assert calls == (["encode", "decode"] if is_built else [])


@pytest.mark.parametrize(
    ("class_body", "message"),
    [
        ({"suits": frozenset({"linaer"})}, r"suits=\['linaer'\] are unknown: choose from input, mask"),
        ({"suits": frozenset({"mask"})}, r"suits masks, which must be stored without loss: set lossless=True"),
        ({"instead_of": "int5"}, r"instead_of='int5' must name a registered codec that suits all of \[\]"),
        ({"instead_of": "int8", "suits": frozenset({"qkv"})}, r"instead_of='int8' .* suits all of \['qkv'\]"),
    ],
    ids=lambda class_body: next(iter(class_body)) if isinstance(class_body, dict) else "",
)
def test_what_a_codec_cannot_say_of_itself_is_refused(class_body: dict, message: str) -> None:
    codecs = list_codecs()
    with pytest.raises(ValueError, match=f"codec 'halved': {message}"):
        register(type("Other", (Halved,), class_body))
    assert list_codecs() == codecs
