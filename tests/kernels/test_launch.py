"""Repeated launches: the device gets the same launches as from Triton's own launcher."""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: nothing can be launched")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the launcher", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from triton_round_trips import ROUND_TRIPS, token_int4

from adacc_hf.kernels import _triton, token_int4_triton

DEVICE = 77  # Triton caches compiled kernels per device, and no other test may use the kernels loaded here
_new_devices = count(DEVICE + 1)
DTYPES = (torch.float32, torch.bfloat16)


class RecordingDriver:
    """Driver with the methods that launching needs."""

    def __init__(self) -> None:
        self.device = DEVICE
        self.launches: list[tuple[Any, ...]] = []
        self.constants: list[dict[str, Any]] = []
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return a launcher for one compiled kernel."""
        names = source.fn.arg_names
        runtime_names = [name for name in names if source.signature[name] != "constexpr"]

        def start(*arguments: Any) -> None:
            grid, stream, by_name = arguments[:3], arguments[3], dict(zip(names, arguments[9:], strict=True))
            self.constants.append({name: by_name[name] for name in names if name not in runtime_names})
            self.launches.append((metadata.hash, grid, stream, [_comparable(by_name[name]) for name in runtime_names]))

        return start

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 0, 0, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, _: int) -> int:
        return 5

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _comparable(argument: Any) -> Any:
    """Return a number as it is, and the dtype and shape of a tensor, because outputs are new tensors each time."""
    return (argument.dtype, argument.shape) if isinstance(argument, Tensor) else argument


@pytest.fixture(scope="module")
def driver() -> Iterator[RecordingDriver]:
    driver = RecordingDriver()
    triton.runtime.driver.set_active(driver)
    yield driver
    triton.runtime.driver.set_active(None)  # Triton looks for a driver again at the next use


@pytest.fixture
def runs_of_triton(driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the kernels that Triton's own launcher launches. The driver's records start empty."""
    names: list[str] = []
    run = JITFunction.run

    def record_run(self: JITFunction, *arguments: Any, **options: Any) -> Any:
        names.append(self.__name__)
        return run(self, *arguments, **options)

    monkeypatch.setattr(JITFunction, "run", record_run)
    monkeypatch.setattr(_triton, "runners", {})
    driver.launches.clear()
    driver.constants.clear()
    return names


def test_constants_are_given_in_the_order_of_the_kernel(driver: RecordingDriver, runs_of_triton: list[str]) -> None:
    x = torch.ones(2, 2048)
    codes, peaks = torch.empty(1, 2048, dtype=torch.uint8), torch.empty(2, dtype=torch.bfloat16)
    constants = {"BLOCK": 1024, "T": 1}
    for _ in range(2):
        _triton.launch(token_int4_triton._encode_kernel, (1,), x, codes, peaks, 2, 2048, 1, -1 / 8, **constants)
    assert len(runs_of_triton) == 1
    assert driver.constants == [constants, constants]


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_second_launch_gives_the_device_what_the_first_gave_without_asking_triton(name, driver, runs_of_triton):
    x = torch.ones(96, 128, dtype=torch.bfloat16)
    ROUND_TRIPS[name](x)
    first, num_triton_runs = driver.launches.copy(), len(runs_of_triton)
    ROUND_TRIPS[name](x)
    assert driver.launches == [*first, *first]
    assert len(first) == num_triton_runs == len(runs_of_triton) == 2


def test_a_tensor_at_another_address_does_not_get_the_kernel_of_an_aligned_one(driver, runs_of_triton):
    buffer = torch.ones(96 * 128 + 1, dtype=torch.bfloat16)
    for offset in (0, 1):
        ROUND_TRIPS["int8"](buffer[offset : offset + 96 * 128].view(96, 128))
    assert len(runs_of_triton) == 4


tensors = st.tuples(st.sampled_from([1, 16, 17, 64]), st.sampled_from([1, 16]), st.sampled_from(DTYPES))


@given(st.lists(st.tuples(tensors, st.sampled_from([0, 1])), min_size=2, max_size=5))
@settings(max_examples=12, deadline=None)
def test_any_tensors_after_each_other_get_the_kernels_that_triton_would_choose(driver, calls):
    """Triton compiles kernels for addresses and numbers that are multiples of 16, and for numbers that are 1."""
    driver.launches.clear()
    with pytest.MonkeyPatch.context() as patch:
        for runners in (_triton.runners, None):
            _triton.runners.clear()
            for (rows, columns, dtype), offset in calls * 2:
                if runners is None:
                    patch.setattr(_triton, "runners", {})
                buffer = torch.ones(rows * columns + offset, dtype=dtype)
                ROUND_TRIPS["outlier_int4"](buffer[offset:].view(rows, columns))
    half = len(driver.launches) // 2
    assert driver.launches[:half] == driver.launches[half:]


@pytest.fixture
def compilations(driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Return the numbers of kernels that Triton would compile in a test, by name, for a device without cached kernels.
    None is compiled."""
    counts: Counter[str] = Counter()
    keys = set()

    def note(fn: Any, key: Any, **_: Any) -> bool:
        if (fn.module, fn.name, str(key)) not in keys:
            counts[f"{fn.module}.{fn.name}".rpartition("adacc_hf.kernels.")[2]] += 1
        keys.add((fn.module, fn.name, str(key)))
        return True

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    monkeypatch.setattr(driver, "device", next(_new_devices))
    monkeypatch.setattr(_triton, "runners", {})
    return counts


SIZES = random.Random(0).sample([(batch, tokens) for batch in range(1, 9) for tokens in range(17, 2000)], 150)
"""Batch sizes as (samples, tokens), all different."""


@pytest.mark.parametrize("columns", [64, 768])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_many_sizes_take_no_more_kernels_than_one(name: str, columns: int, compilations: Counter[str]) -> None:
    """The number of an activation's elements per token is fixed, and the number of tokens varies."""
    for batch, tokens in SIZES:
        ROUND_TRIPS[name](torch.empty(batch * tokens, columns, dtype=torch.bfloat16))
    # Bits of 64 elements per token are a whole number of 128-bit words for even numbers of tokens only.
    assert set(compilations.values()) == {2 if (name, columns) == ("bitmask", 64) else 1}
    assert len(compilations) == 2


MOST_BY_WIDTH = {
    "asymmetric_int4": 2,
    "bitmask": 4,  # elements and bits aligned or not, each separately
    "channel_int4": 2,
    "int8": 2,
    "outlier_int4": 2,
    "outlier_int4-raw": 16,  # aligned or not, or of whole groups, by the rows that a program's 4096 elements touch
    "token_int4": 12,  # aligned or not, by the power of two that a row fits in
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_rows_of_many_lengths_take_few_kernels(name: str, compilations: Counter[str]) -> None:
    """Attention's scores have as many columns as there are tokens."""
    for batch, tokens in SIZES:
        ROUND_TRIPS[name](torch.empty(batch * 4, tokens, dtype=torch.bfloat16))
    assert len(compilations) == 2
    assert max(compilations.values()) <= MOST_BY_WIDTH[name], compilations


def test_rows_that_are_too_long_for_registers_take_one_kernel_for_all_lengths(compilations: Counter[str]) -> None:
    for columns in range(_triton.TILE_ELEMENTS + 16, 2**17, 1600):
        token_int4(torch.empty(8, columns))
    assert compilations == {"token_int4_triton._encode_kernel": 1, "token_int4_triton._decode_kernel": 1}


def test_no_more_kernels_are_remembered_than_there_is_room_for(driver, runs_of_triton, monkeypatch):
    monkeypatch.setattr(_triton, "MAX_RUNNERS", 3)
    for rows in (16, 32, 48, 64):
        ROUND_TRIPS["int8"](torch.ones(rows, 64))
        assert len(_triton.runners) <= 3
    assert len(driver.launches) == 8
