"""Speed of the codecs, as bytes moved per second, compared with a copy of the same tensor in the same run.

Encoding reads the tensor and writes the payload. Decoding does the reverse. A copy reads and writes the tensor. Before
every sample the caches are flushed by reading, because dirty lines would be written back during the measurement. The
alternatives are timed as well: the plain torch reference, torch.compile of the reference (--compile), and bitsandbytes
if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adacc_hf.eval.records.command_line import positive_int
from adacc_hf.eval.records.ledger import Ledger
from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.trials.isolation import run_here
from adacc_hf.kernels import outlier_int4
from adacc_hf.kernels.codecs import Codec, get_codec, list_codecs
from adacc_hf.price.timing import flush_by_reading, time_on_cuda
from adacc_hf.reports.run_record import Settings, Spread, markdown_table
from adacc_hf.torch_glue.tensors import relative_error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Larger than any last-level cache so far: 256 MiB on a GPU, 64 MiB on a CPU.
FLUSH_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
WARM_UPS = 2
GOALS = {"H100": 0.85, "H200": 0.7}
"""Fraction of a copy's speed that encoding and decoding should reach, by a part of the card's name. An H200 issues as
many instructions as an H100 but moves 1.4 times the bytes, so a copy leaves time for fewer instructions per byte."""
LONGEST_ATTENTION = 512
"""Sequence length of the encoded softmax and mask, whose sizes grow with its square."""
# A codec with a larger relative error is broken, not lossy: per-token INT4 has an error of 0.35 on these outliers, and
# a wrong result has 1 or more.
GATE_ERROR = 0.5


@dataclass(frozen=True, kw_only=True)
class Block:
    """Sizes of a transformer block."""

    width: int
    inner: int
    heads: int


BLOCKS = {
    "gpt2-117m": Block(width=768, inner=3072, heads=12),
    "gpt2-345m": Block(width=1024, inner=4096, heads=16),
    "gpt2-4.7b": Block(width=3072, inner=12288, heads=24),
    "llama-7b": Block(width=4096, inner=11008, heads=32),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. Times are in milliseconds: medians, and the 20th and 80th percentiles."""

    what: str
    shape: tuple[int, ...]
    dtype: str
    tensor_bytes: int
    payload_bytes: int
    copy_ms: Spread
    encode_ms: Spread
    decode_ms: Spread
    round_trip_error: float
    """Relative L2 error after encoding and decoding."""

    @classmethod
    def from_point(cls, point: dict[str, Any]) -> Row:
        """Return the row of a record's point."""
        spreads = {name: Spread(**point[name]) for name in ("copy_ms", "encode_ms", "decode_ms")}
        figures = {name: value for name, value in point.items() if name != "status"}
        return cls(**{**figures, **spreads, "shape": tuple(point["shape"])})

    def gigabytes_per_s(self, spread: Spread) -> float:
        return (self.tensor_bytes + self.payload_bytes) / spread.median / 1e6

    def copy_gigabytes_per_s(self) -> float:
        return 2 * self.tensor_bytes / self.copy_ms.median / 1e6

    def speed_over_copy(self, spread: Spread) -> float:
        """Return the speed of encoding or decoding divided by the speed of a copy."""
        return self.gigabytes_per_s(spread) / self.copy_gigabytes_per_s()

    def missed_goals(self, goal: float) -> list[str]:
        """Describe encoding, decoding, or both, if slower than the fraction `goal` of a copy's speed."""
        speeds = {"encode": self.speed_over_copy(self.encode_ms), "decode": self.speed_over_copy(self.decode_ms)}
        return [f"{self.what} {name} ({speed:.0%})" for name, speed in speeds.items() if speed < goal]

    def cells(self) -> dict[str, str]:
        """Return the row's cells by column."""
        cells = {
            "codec": self.what,
            "shape": " x ".join(map(str, self.shape)),
            "dtype": self.dtype,
            "MiB": f"{self.tensor_bytes / 2**20:.1f}",
            "rate": f"{self.tensor_bytes / self.payload_bytes:.2f}",
            "error": f"{self.round_trip_error:.4f}",
            "copy GB/s": f"{self.copy_gigabytes_per_s():.1f}",
        }
        for name, spread in (("encode", self.encode_ms), ("decode", self.decode_ms)):
            cells[f"{name} GB/s"] = f"{self.gigabytes_per_s(spread):.1f}"
            cells[f"{name} / copy GB/s"] = f"{self.speed_over_copy(spread):.0%}"
            cells[f"{name} time / copy"] = f"{spread.median / self.copy_ms.median:.2f}"
        return cells


@dataclass(frozen=True)
class Contender:
    """A way to compress: its name, and functions from tensor to payload and back."""

    name: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    nbytes: Callable[[Any], int]


def add_tensors(parser: argparse.ArgumentParser) -> None:
    """Add the options of the encoded tensors."""
    parser.add_argument("--model", choices=sorted(BLOCKS), nargs="+", default=["gpt2-117m"], help="block sizes")
    parser.add_argument("--tokens", type=positive_int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--dtype", choices=sorted(DTYPES), nargs="+", default=["float32"])
    parser.add_argument("--samples", type=positive_int, default=20, help="samples of each time")
    parser.add_argument("--compile", action="store_true", help="also torch.compile of the reference: takes a minute")


def tensors_info(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("model", "tokens", "dtype", "samples", "compile")
    card = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    return {name: getattr(arguments, name) for name in names} | ({"card": card} if card else {})


def measure(ledger: Ledger) -> None:
    """Measure every codec and its peers, on those activations of each block for which the codec is made."""
    info = ledger.run_info
    for model in info["model"]:
        for dtype in info["dtype"]:
            pairs = contenders(BLOCKS[model], DTYPES[dtype], info["tokens"], info["compile"], ledger.settings)
            for contender, tensor in pairs:
                key = f"bandwidth, {model}, {dtype}, {contender.name}"
                order = {"contender": contender, "tensor": tensor, "samples": info["samples"]}
                ledger.measure(key, partial(run_here, _point, order))


def _point(contender: Contender, tensor: Tensor, samples: int) -> dict[str, Any]:
    return asdict(time_contender(contender, tensor, samples))


def failures(ledger: Ledger) -> dict[str, str]:
    """Return the reasons why codecs were not timed, by the key of their point."""
    return {key: point["reason"] for key, point in ledger.points.items() if "reason" in point}


def report_text(ledger: Ledger) -> str:
    """Return one line per codec and tensor, as Markdown."""
    failed = failures(ledger)
    points = {key: point for key, point in ledger.points.items() if key.startswith("bandwidth, ")}
    rows = [Row.from_point(point) for key, point in points.items() if key not in failed]
    heading = (
        "Bytes of tensor and payload moved per second, compared with a copy of the tensor, with cold caches; medians "
        f"of {ledger.run_info['samples']}. The error is the relative L2 error of a round trip."
    )
    table = [markdown_table([row.cells() for row in rows])] if rows else []
    table += _goal_text(rows, ledger.run_info.get("card", ""))
    return "\n\n".join([heading, *table, *(f"{key}: {failed[key]}" for key in points if key in failed)]) + "\n"


def _goal_text(rows: Sequence[Row], card: str) -> list[str]:
    """Return a line that lists the codecs below the card's goal, or no line if the card has no goal."""
    goal = next((goal for name, goal in GOALS.items() if name in card), None)
    if goal is None:
        return []
    missed = [text for row in rows if row.what.split()[0] in list_codecs() for text in row.missed_goals(goal)]
    return [f"Goal on {card}: {goal:.0%} of a copy. Missed by: {', '.join(missed) or 'none'}."]


def contenders(
    block: Block, dtype: torch.dtype, tokens: int, with_compile: bool, settings: Settings
) -> Iterator[tuple[Contender, Tensor]]:
    """Yield every codec and its peers, each with an activation of the block for which the codec is made."""
    device = torch.device(settings.device)
    generator = torch.Generator(device).manual_seed(settings.seed)
    normal = partial(torch.randn, generator=generator, device=device)
    inner = normal(tokens, block.inner)
    inner[:, :: block.inner // 8] *= 50  # eight outlier channels
    inner = inner.to(dtype)
    qkv = normal(tokens, 3 * block.width).to(dtype)
    # Attention of the whole micro-batch, as a layer saves it: one sequence's may fit into a cache.
    sequence = min(tokens, LONGEST_ATTENTION)
    scores = normal(tokens // sequence, block.heads, sequence, sequence)
    softmax = scores.softmax(-1).to(dtype)
    mask = scores > -1.2
    del scores
    activations = {
        "outlier_int4": inner,
        "token_int4": inner,
        "int8": inner,
        "fp8": inner,
        "channel_int4": qkv,
        "asymmetric_int4": softmax,
        "bitmask": mask,
    }
    for name, tensor in activations.items():
        yield _codec(get_codec(name)), tensor
    yield _codec(get_codec("outlier_int4", num_outliers=8)), inner
    yield _codec(get_codec("outlier_int4", rounding="stochastic")), inner
    for rival in rivals(inner, with_compile):
        yield rival, inner


def time_contender(contender: Contender, tensor: Tensor, samples: int) -> Row:
    """Time one contender. Raise WrongResultError if its round trip does not reproduce the tensor closely."""
    payload = contender.encode(tensor)
    error = float(relative_error([tensor], [contender.decode(payload)]))
    if not error < GATE_ERROR:
        raise WrongResultError(
            f"{contender.name}: not timed, since the round trip has a relative error of {error:.3f}, above the limit "
            f"of {GATE_ERROR:g}"
        )
    target = torch.empty_like(tensor)
    device = tensor.device.type
    return Row(
        what=contender.name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        tensor_bytes=tensor.nbytes,
        payload_bytes=contender.nbytes(payload),
        copy_ms=Spread.of(sample_ms(lambda: target.copy_(tensor), device, samples)),
        encode_ms=Spread.of(sample_ms(lambda: contender.encode(tensor), device, samples)),
        decode_ms=Spread.of(sample_ms(lambda: contender.decode(payload), device, samples)),
        round_trip_error=error,
    )


@torch.no_grad()
def sample_ms(run: Callable[[], object], device: str, samples: int) -> list[float]:
    """Return `samples` times of `run` in milliseconds, each with cold caches."""
    flush = flush_by_reading(FLUSH_BYTES[device], torch.device(device))
    if device == "cuda":
        timings = time_on_cuda(run, torch.device(device), WARM_UPS + samples, prepare=flush)
        return [timing.device_ms for timing in timings[WARM_UPS:]]
    times = []
    for index in range(-WARM_UPS, samples):
        flush()
        elapsed = _cpu_ms(run)
        if index >= 0:
            times.append(elapsed)
    return times


def _cpu_ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _codec(codec: Codec) -> Contender:
    non_defaults = {
        name: value for name, value in codec.options.items() if value != get_codec(codec.name).options[name]
    }
    suffix = "".join(f" {name}={value}" for name, value in non_defaults.items())
    return Contender(codec.name + suffix, codec.encode, codec.decode, lambda payload: payload.nbytes)


def rivals(tensor: Tensor, with_compile: bool) -> Iterator[Contender]:
    """Yield the alternatives to outlier_int4 that a user has."""
    (rows, columns), dtype, factor = tensor.shape, tensor.dtype, -1 / 8

    def encode(x: Tensor) -> tuple[Tensor, ...]:
        return outlier_int4.encode_ref(x, None, 64, factor, "nearest", 0)

    def decode(tensors: tuple[Tensor, ...]) -> Tensor:
        return outlier_int4.decode_ref((rows, columns), dtype, factor, *tensors)

    def nbytes(tensors: tuple[Tensor, ...]) -> int:
        return sum(t.nbytes for t in tensors)

    yield Contender("plain torch reference", encode, decode, nbytes)
    if with_compile:
        compiled = partial(torch.compile, dynamic=False, fullgraph=True)
        yield Contender("torch.compile of the reference", compiled(encode), compiled(decode), nbytes)
    if importlib.util.find_spec("bitsandbytes"):
        yield from _bitsandbytes(tensor)


def _bitsandbytes(tensor: Tensor) -> Iterator[Contender]:
    """Yield the compressors of bitsandbytes that work on `tensor`. Print the reason for each of the others.

    A release may lack kernels for this GPU or for CPUs, or may not find its compiled library.
    """
    try:
        from bitsandbytes import functional
    except Exception as error:
        _print_left_out("bitsandbytes", error)
        return

    def nbytes(pair: tuple[Tensor, Any]) -> int:
        return pair[0].nbytes + pair[1].absmax.nbytes

    for rival in (
        Contender(
            "bitsandbytes quantize_4bit nf4",
            lambda x: functional.quantize_4bit(x, blocksize=64, quant_type="nf4"),
            lambda pair: functional.dequantize_4bit(*pair),
            nbytes,
        ),
        Contender(
            "bitsandbytes quantize_blockwise",
            lambda x: functional.quantize_blockwise(x, blocksize=256),
            lambda pair: functional.dequantize_blockwise(*pair),
            nbytes,
        ),
    ):
        try:
            rival.decode(rival.encode(tensor))
        except Exception as error:
            _print_left_out(rival.name, error)
        else:
            yield rival


def _print_left_out(name: str, error: Exception) -> None:
    print(f"{name} is left out of the comparison: {type(error).__name__}: {error}", file=sys.stderr)
