"""Compiled code of the kernels, checked without a GPU: for every architecture no kernel spills, accesses move 128 bits,
and the instructions keep pace with memory.

Every kernel is compiled ahead of time from the arguments that its wrapper would launch it with.
"""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot be compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from adacc_hf.kernels import _triton

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


def compile_for(launch: Launch, target: GPUTarget) -> Any:
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


def wide_accesses(code: str, kind: str) -> dict[str, int]:
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


def spilled(compiled: Any, target: GPUTarget, scratch: Path) -> int:
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
    rows has a loop. Code after the kernel's own part is left out. It handles divisions with denormal results."""
    listing = _inspected(compiled, scratch, triton.knobs.nvidia.nvdisasm.path, "-c")
    own = re.split(r"^\$__internal_\S+:", listing, maxsplit=1, flags=re.MULTILINE)[0]
    pattern = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP)(?:@\S+\s+)?([A-Z][A-Z0-9]*)"
    return Counter(re.findall(pattern, own, flags=re.MULTILINE))


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


class KernelCode:
    """Checks of the compiled code of one file of kernels. A subclass names the file and its launches."""

    module: ClassVar[Any]
    """The file of kernels."""
    round_trips: ClassVar[dict[str, Callable[[Tensor], None]]]
    """Functions that encode and decode a tensor of [rows, channels], by the name of the case."""
    varying_arguments: ClassVar[set[str]] = set()
    """Arguments of the kernels that change in a run."""
    one_by_one: ClassVar[dict[str, Callable[[Tensor], None]]] = {}
    """Cases for a tensor of one element, in place of those of the same name in `round_trips`. None leaves one out."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each check that takes a `name` on every case that suits it."""
        if "name" not in metafunc.fixturenames:
            return
        cases = list(self.round_trips)
        if metafunc.function.__name__ == "test_kernels_compile_where_sizes_are_one":
            cases = [name for name in cases if self.one_by_one.get(name, self.round_trips[name]) is not None]
        metafunc.parametrize("name", cases)

    @pytest.fixture
    def launches(self, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
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

        monkeypatch.setattr(self.module, "launch", record)
        return recorded_launches

    @pytest.mark.parametrize(
        "dtype",
        [
            pytest.param(torch.float32, marks=pytest.mark.nightly, id="float32"),
            pytest.param(torch.bfloat16, id="bfloat16"),
        ],
    )
    def test_kernels_for_hopper_keep_pace_with_memory(self, name, dtype, launches, tmp_path):
        self.round_trips[name](torch.ones(ROWS, CHANNELS, dtype=dtype))
        for launch, compiled in self.compiled(launches, "sm_90", name, dtype, tmp_path):
            main, codes = launch.arguments[0], launch.arguments[1]
            ratio = prod(main.shape) / prod(codes.shape)  # elements that share a code's byte
            bytes_per_code = ratio * main.element_size() + 1
            per_thread = launch.tile / (launch.warps(TARGETS["sm_90"]) * 32)
            counts = _instructions(compiled, tmp_path)
            of_bytes = per_thread * bytes_per_code
            assert counts.total() / of_bytes < MOST_INSTRUCTIONS_PER_BYTE
            assert 0 < sum(counts[name] for name in HALF_RATE) / of_bytes < MOST_HALF_RATE_PER_BYTE
            assert sum(counts[name] for name in EIGHTH_RATE) / of_bytes < MOST_EIGHTH_RATE_PER_BYTE

    @pytest.mark.nightly
    @pytest.mark.parametrize("target", [target for target in TARGETS if target != "sm_90"])
    def test_kernels_of_other_architectures_are_as_good(self, target, name, launches, tmp_path):
        dtype = torch.float32 if target in ("sm_80", "sm_100") else torch.bfloat16
        self.round_trips[name](torch.ones(ROWS, CHANNELS, dtype=dtype))
        self.compiled(launches, target, name, dtype, tmp_path)

    def compiled(
        self, launches: list[Launch], target: str, name: str, dtype: torch.dtype, scratch: Path
    ) -> list[tuple[Launch, Any]]:
        """Compile both launches. Assert that no kernel spills, that accesses move 128 bits, and that arithmetic is
        rounded as in the references: no fused multiply-add, no flushed denormals and no approximate division, because
        each would give other bits on a GPU."""
        assert len(launches) == 2  # one to encode, one to decode
        kind, results = TARGETS[target].backend, []
        for launch in launches:
            compiled = compile_for(launch, TARGETS[target])
            assert spilled(compiled, TARGETS[target], scratch) <= _ALLOWED_STACK.get((target, name, dtype), 0)
            code = compiled.asm["ptx" if kind == "cuda" else "amdgcn"]
            wide = wide_accesses(code, kind)
            main, codes = launch.arguments[0], launch.arguments[1]
            # The first argument is the tensor, the second its codes. All bytes of both must move in 128-bit accesses.
            encoding = "encode" in launch.kernel.__name__
            threads = launch.warps(TARGETS[target]) * TARGETS[target].warp_size
            elements = launch.tile * prod(main.shape) // prod(codes.shape)
            expected = {
                "tensor": elements * main.element_size() // 16 // threads,
                "codes": launch.tile // 16 // threads,
            }
            assert wide["loads"] >= expected["tensor" if encoding else "codes"]
            assert wide["stores"] >= expected["codes" if encoding else "tensor"]
            if kind == "cuda":
                assert not re.search(r"fma\.|\.ftz|(div|rcp)\.(full|approx)", code)
            results.append((launch, compiled))
        return results

    def test_kernels_compile_where_sizes_are_one(self, name: str, launches: list[Launch]) -> None:
        """Triton turns an argument of 1 into an integer constant, for which methods of tensors fail to compile."""
        self.one_by_one.get(name, self.round_trips[name])(torch.ones(1, 1))
        for launch in launches:
            assert compile_for(launch, TARGETS["sm_80"]).asm["ptx"]

    def test_what_changes_in_a_run_is_never_a_constant_of_a_kernel(self) -> None:
        """Triton would otherwise compile a kernel again for a seed of 1, for multiples of 16, and for each number of
        outliers."""
        kernels = [kernel for name, kernel in vars(self.module).items() if "_kernel" in name]
        varying = {argument for kernel in kernels for argument in ("num_outliers",) if argument in kernel.arg_names}
        assert varying == self.varying_arguments
        for kernel in kernels:
            for argument in varying.intersection(kernel.arg_names):
                place = kernel.arg_names.index(argument)
                assert kernel.params[place].do_not_specialize, f"{argument} of {kernel.__name__}"
