"""Compiled code of the kernels, checked without a GPU: for every architecture no kernel spills, accesses move 128 bits,
and the instructions keep pace with memory.

Every kernel is compiled ahead of time from the arguments that its wrapper would launch it with.
"""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adacc_hf.kernels import _symmetric, asymmetric_int4, int8
from adacc_hf.kernels.outlier_int4 import choose_outliers

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot be compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from adacc_hf.kernels import (
    _triton,
    asymmetric_int4_triton,
    bitmask_triton,
    channel_int4_triton,
    fp8_triton,
    int8_triton,
    outlier_int4_triton,
    token_int4_triton,
)

MODULES = (
    *(asymmetric_int4_triton, bitmask_triton, channel_int4_triton, fp8_triton),
    *(int8_triton, outlier_int4_triton, token_int4_triton),
)
TARGETS = {
    "sm_70": GPUTarget("cuda", 70, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
}
# GPT-117M: 768 channels, a micro-batch of 256 tokens.
ROWS, CHANNELS = 256, 768


@dataclass
class Launch:
    """One recorded call of `_triton.launch`."""

    kernel: Any
    arguments: tuple[Any, ...]
    tile: int
    thread_elements: int
    constants: dict[str, Any]

    def warps(self, target: GPUTarget) -> int:
        return _triton.num_warps(self.tile, self.thread_elements, target.warp_size)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Return the list of the wrappers' launches, which do not reach a device."""
    recorded_launches: list[Launch] = []

    def record(
        kernel: Any,
        grid: Any,
        *arguments: Any,
        tile: int = _triton.TILE_ELEMENTS,
        thread_elements: int = _triton.THREAD_ELEMENTS,
        **constants: Any,
    ) -> None:
        recorded_launches.append(Launch(kernel, arguments, tile, thread_elements, constants))

    for module in MODULES:
        monkeypatch.setattr(module, "launch", record)
    return recorded_launches


def _compile(launch: Launch, target: GPUTarget) -> Any:
    """Return the kernel as Triton's launcher would specialise it: aligned pointers, multiples of 16, ones as
    constants."""
    names = launch.kernel.arg_names
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    attributes = {}
    for place, (name, value) in enumerate(zip(names, launch.arguments, strict=False)):
        is_special = type(value) is int and not launch.kernel.params[place].do_not_specialize
        if value is None or (is_special and value == 1):
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
            if is_special and value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    signature = {name: signature.get(name, "constexpr") for name in names}
    options = {"num_warps": launch.warps(target), "enable_fp_fusion": False}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    try:
        return triton.compile(source, target=target, options=options)
    except ValueError as error:
        if "not supported" in str(error):
            pytest.skip(f"Triton {triton.__version__} cannot compile for {target}: {error}")
        raise


def _outlier(x: Tensor, count: int) -> None:
    outliers = choose_outliers(x.abs().sum(0, dtype=torch.float32), count, 64, x.element_size()) if count else None
    pair = (outliers.indices, outliers.keep) if outliers else (None, None)
    outlier_int4_triton.decode(x, -1 / 8, *outlier_int4_triton.encode(x, *pair, 64, -1 / 8, "nearest", 0))


def _channel(x: Tensor) -> None:
    channel_int4_triton.decode(x, *channel_int4_triton.encode(x, 64, -1 / 8, "nearest", 0), -1 / 8)


def _token(x: Tensor) -> None:
    token_int4_triton.decode(x, *token_int4_triton.encode(x, 1 / 8, "nearest", 0), 1 / 8)


def _int8(x: Tensor, rounding: str) -> None:
    tensors = int8_triton.encode(x.view(-1), 64, int8.FACTOR, rounding, 2**32 - 1)
    int8_triton.decode(x.view(-1), *tensors, int8.FACTOR)


def _fp8(x: Tensor, rounding: str = "nearest") -> None:
    fp8_triton.decode(x, *fp8_triton.encode(x, 128, rounding, 2**32 - 1), 128)


def _asymmetric(x: Tensor, scale: str) -> None:
    formula = (asymmetric_int4.SCALE_FACTORS[scale], asymmetric_int4.OFFSET_CODES[scale])
    tensors = asymmetric_int4_triton.encode(x.view(-1), 64, *formula, "nearest", 0)
    asymmetric_int4_triton.decode(x.view(-1), *tensors, *formula)


def _bitmask(x: Tensor) -> None:
    patterns = x.view(-1).view({4: torch.int32, 2: torch.int8}[x.element_size()])
    bitmask_triton.decode(patterns, *bitmask_triton.encode(patterns, with_pattern=x.element_size() == 4))


ROUND_TRIPS: dict[str, Callable[[Tensor], None]] = {
    "outlier_int4": lambda x: _outlier(x, 0),
    "outlier_int4-raw": lambda x: _outlier(x, 8),
    "channel_int4": _channel,
    "token_int4": _token,
    "token_int4-long": lambda x: _token(x.view(16, -1)),
    "int8": lambda x: _int8(x, "nearest"),
    "int8-stochastic": lambda x: _int8(x, "stochastic"),
    "fp8": _fp8,
    "fp8-stochastic": lambda x: _fp8(x, "stochastic"),
    "asymmetric_int4": lambda x: _asymmetric(x, "range15"),
    "asymmetric_int4-paper": lambda x: _asymmetric(x, "paper"),
    "bitmask": _bitmask,
}


def _wide_accesses(code: str, kind: str) -> dict[str, int]:
    """Count the 128-bit loads and stores of global memory in the code."""
    patterns = {
        "cuda": (r"ld\.global[.\w:]*\.v4\.b32|ld\.global[.\w:]*\.v2\.b64", r"st\.global[.\w:]*\.v4\.b32"),
        "hip": (r"(?:global|buffer)_load_dwordx4", r"(?:global|buffer)_store_dwordx4"),
    }
    load, store = patterns[kind]
    return {"loads": len(re.findall(load, code)), "stores": len(re.findall(store, code))}


_ALLOWED_STACK = {("sm_100", "outlier_int4-raw", torch.float32): 8} if triton.__version__.startswith("3.6.") else {}
"""Bytes of stack that a kernel may use: Triton 3.6's assembler spills one register of this kernel once, 4 bytes of a
thread's 64 elements."""


def _spilled(compiled: Any, target: GPUTarget, scratch: Path) -> int:
    """Return the bytes of stack that the kernel uses, or the registers that it spills."""
    if target.backend == "hip":
        return sum(int(n) for n in re.findall(r"[vs]gpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"]))
    usage = _inspected(compiled, scratch, triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    return int(stack)


def _inspected(compiled: Any, scratch: Path, *command: str) -> str:
    """Return the output of a CUDA tool for the machine code."""
    cubin = scratch / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return subprocess.run([*command, cubin], check=True, capture_output=True, text=True).stdout


def _instructions(compiled: Any, scratch: Path) -> Counter[str]:
    """Count the instructions that a thread executes, by name. Each is counted once, because only the kernel of long
    rows has a loop.

    Code after the kernel's own part is left out. It handles divisions with denormal results.
    """
    listing = _inspected(compiled, scratch, triton.knobs.nvidia.nvdisasm.path, "-c")
    own = re.split(r"^\$__internal_\S+:", listing, maxsplit=1, flags=re.MULTILINE)[0]
    pattern = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP)(?:@\S+\s+)?([A-Z][A-Z0-9]*)"
    return Counter(re.findall(pattern, own, flags=re.MULTILINE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_spill_nothing_and_move_128_bits_at_once(
    target: str, name: str, dtype: torch.dtype, launches: list[Launch], tmp_path: Path
) -> None:
    x = torch.ones(ROWS, CHANNELS, dtype=dtype)
    ROUND_TRIPS[name](x)
    assert len(launches) == 2  # one to encode, one to decode
    for launch in launches:
        compiled = _compile(launch, TARGETS[target])
        assert _spilled(compiled, TARGETS[target], tmp_path) <= _ALLOWED_STACK.get((target, name, dtype), 0)
        kind = TARGETS[target].backend
        wide = _wide_accesses(compiled.asm["ptx" if kind == "cuda" else "amdgcn"], kind)
        main, codes = launch.arguments[0], launch.arguments[1]
        # The first argument is the tensor, the second its codes. All bytes of both must move in 128-bit accesses.
        encoding = "encode" in launch.kernel.__name__
        threads = launch.warps(TARGETS[target]) * TARGETS[target].warp_size
        elements = launch.tile * prod(main.shape) // prod(codes.shape)
        expected = {"tensor": elements * main.element_size() // 16 // threads, "codes": launch.tile // 16 // threads}
        assert wide["loads"] >= expected["tensor" if encoding else "codes"]
        assert wide["stores"] >= expected["codes" if encoding else "tensor"]


# Each of the 132 multiprocessors of an H100 issues 128 instructions of threads per clock, at 1.755 GHz, while its
# memory moves 3.35 TB/s at most: 8.8 instructions a byte. Codecs should reach 85 % of a copy, which reaches about 90 %
# of that, so that 11.6 can be issued per byte. If every slot were taken, nothing would hide latency. This limit leaves
# one in three free.
MOST_INSTRUCTIONS_PER_BYTE = 7.5

# Some instructions are issued less often. Hopper has half as many lanes for operations on integers, bits and
# comparisons (64 a clock of each multiprocessor: 5.8 a byte at that rate), and an eighth for conversions between
# integers and floats and for approximations (16: 1.45 a byte). Float multiplications and additions have the full rate.
HALF_RATE = frozenset(
    {"BFE", "BMSK", "F2FP", "FLO", "FMNMX", "FSEL", "FSETP", "I2FP", "IABS", "IADD3", "IMNMX", "ISETP", "LEA", "LOP3"}
    | {"MOV", "P2R", "PLOP3", "PRMT", "R2P", "SEL", "SGXT", "SHF", "VABSDIFF", "VIADD", "VIMNMX", "VIMNMX3"}
)
MOST_HALF_RATE_PER_BYTE = 5.8
EIGHTH_RATE = frozenset(["F2F", "F2I", "FCHK", "I2F", "MUFU", "POPC"])
MOST_EIGHTH_RATE_PER_BYTE = 1.45


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in ROUND_TRIPS if not name.endswith("-stochastic")])
def test_memory_takes_longer_than_the_instructions(
    name: str, dtype: torch.dtype, launches: list[Launch], tmp_path: Path
) -> None:
    """Stochastic rounding is left out. No codec uses it by default, and hashing adds ten instructions an element."""
    x = torch.ones(ROWS, CHANNELS, dtype=dtype)
    ROUND_TRIPS[name](x)
    for launch in launches:
        main, codes = launch.arguments[0], launch.arguments[1]
        ratio = prod(main.shape) / prod(codes.shape)  # elements that share a code's byte
        bytes_per_code = ratio * main.element_size() + 1
        per_thread = launch.tile / (launch.warps(TARGETS["sm_90"]) * 32)
        counts = _instructions(_compile(launch, TARGETS["sm_90"]), tmp_path)
        of_bytes = per_thread * bytes_per_code
        assert counts.total() / of_bytes < MOST_INSTRUCTIONS_PER_BYTE
        assert 0 < sum(counts[name] for name in HALF_RATE) / of_bytes < MOST_HALF_RATE_PER_BYTE
        assert sum(counts[name] for name in EIGHTH_RATE) / of_bytes < MOST_EIGHTH_RATE_PER_BYTE


@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_arithmetic_is_rounded_as_in_the_references(target: str, name: str, launches: list[Launch]) -> None:
    """The code has no fused multiply-add, no flushed denormals and no approximate division, because each would give
    other bits on a GPU."""
    ROUND_TRIPS[name](torch.ones(ROWS, CHANNELS))
    for launch in launches:
        ptx = _compile(launch, TARGETS[target]).asm["ptx"]
        assert "fma." not in ptx
        assert ".ftz" not in ptx
        assert not re.search(r"(div|rcp)\.(full|approx)", ptx)


def test_channel_sums_compile(launches: list[Launch], tmp_path: Path) -> None:
    outlier_int4_triton.channel_sums(torch.ones(ROWS, CHANNELS))
    compiled = _compile(launches[0], TARGETS["sm_90"])
    assert _spilled(compiled, TARGETS["sm_90"], tmp_path) == 0
    assert _wide_accesses(compiled.asm["ptx"], "cuda")["loads"] > 0


ONE_BY_ONE = {name: case for name, case in ROUND_TRIPS.items() if name != "token_int4-long"}
ONE_BY_ONE["outlier_int4-raw"] = lambda x: _outlier(x, 1)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_kernels_compile_where_sizes_are_one(name: str, launches: list[Launch]) -> None:
    """Triton turns an argument of 1 into an integer constant, for which methods of tensors fail to compile."""
    ONE_BY_ONE[name](torch.ones(1, 1))
    for launch in launches:
        assert _compile(launch, TARGETS["sm_80"]).asm["ptx"]


def test_group_sizes_compile_for_odd_widths(launches: list[Launch]) -> None:
    for group_size in _symmetric.GROUP_SIZES:
        outlier_int4_triton.encode(torch.ones(7, 33), None, None, group_size, -1 / 8, "stochastic", 1)
        channel_int4_triton.encode(torch.ones(7, 33), group_size, -1 / 8, "nearest", 1)
    for launch in launches:
        assert _compile(launch, TARGETS["sm_90"]).asm["ptx"]


@pytest.mark.parametrize("argument", ["seed", "num_outliers"])
def test_what_changes_in_a_run_is_never_a_constant_of_a_kernel(argument: str) -> None:
    """Triton would otherwise compile a kernel again for a seed of 1, for multiples of 16, and for each number of
    outliers."""
    kernels = [(module, kernel) for module in MODULES for name, kernel in vars(module).items() if "_kernel" in name]
    taking = [(module, kernel) for module, kernel in kernels if argument in kernel.arg_names]
    assert taking
    for module, kernel in taking:
        place = kernel.arg_names.index(argument)
        assert kernel.params[place].do_not_specialize, f"{module.__name__}.{kernel.__name__}"
