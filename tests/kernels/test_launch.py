"""Launching again what was launched before: the device gets what Triton's own launcher would give it.

The driver here compiles for an H100, and notes launches in place of making them.
"""

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

from adacc_hf.kernels.outlier_int4 import choose_outliers

pytest.importorskip("triton", reason="Triton is not installed: nothing can be launched")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the launcher", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from adacc_hf.kernels import (
    _triton,
    asymmetric_int4_triton,
    bitmask_triton,
    channel_int4_triton,
    int8_triton,
    outlier_int4_triton,
    token_int4_triton,
)

DEVICE = 77  # Triton keeps what it compiled for each device: no other test may meet what is loaded here
_new_devices = count(DEVICE + 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NotingDriver:
    """As much of a driver as launching needs."""

    def __init__(self) -> None:
        self.device = DEVICE
        self.launches: list[tuple[Any, ...]] = []
        self.constants: list[dict[str, Any]] = []
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """A launcher for one compiled kernel. Constants are no part of a launch: they are compiled in."""
        names = source.fn.arg_names
        given = [name for name in names if source.signature[name] != "constexpr"]

        def start(*arguments: Any) -> None:
            grid, stream, by_name = arguments[:3], arguments[3], dict(zip(names, arguments[9:], strict=True))
            self.constants.append({name: by_name[name] for name in names if name not in given})
            self.launches.append((metadata.hash, grid, stream, [_told_apart(by_name[name]) for name in given]))

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


def _told_apart(argument: Any) -> Any:
    """A number as it is; of a tensor what matters here: outputs are new ones each time."""
    return (argument.dtype, argument.shape) if isinstance(argument, Tensor) else argument


@pytest.fixture(scope="module")
def driver() -> Iterator[NotingDriver]:
    driver = NotingDriver()
    triton.runtime.driver.set_active(driver)
    yield driver
    triton.runtime.driver.set_active(None)  # found when it is next asked for, if there is one


@pytest.fixture
def runs_of_triton(driver: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are launched by Triton's own launcher, by name. Nothing was launched before."""
    names: list[str] = []
    run = JITFunction.run

    def noted(self: JITFunction, *arguments: Any, **options: Any) -> Any:
        names.append(self.__name__)
        return run(self, *arguments, **options)

    monkeypatch.setattr(JITFunction, "run", noted)
    monkeypatch.setattr(_triton, "_runners", {})
    driver.launches.clear()
    driver.constants.clear()
    return names


def test_constants_are_given_in_the_order_of_the_kernel(driver: NotingDriver, runs_of_triton: list[str]) -> None:
    """Whatever the order of the call: today's launcher reads none of them, another may."""
    x = torch.ones(2, 2048)
    codes, peaks = torch.empty(1, 2048, dtype=torch.uint8), torch.empty(2, dtype=torch.bfloat16)
    constants = {"BLOCK": 1024, "T": 1, "SIGNED": True, "STOCHASTIC": False}
    for _ in range(2):
        _triton.launch(token_int4_triton._encode_long_kernel, (1,), x, codes, peaks, 2, 2048, 1, -1 / 8, 0, **constants)
    assert len(runs_of_triton) == 1
    assert driver.constants == [constants, constants]


def _outlier_int4(x: Tensor, num_outliers: int) -> None:
    outliers = choose_outliers(x[0].abs().float(), num_outliers, 64, x.element_size())
    chosen = (outliers.indices, outliers.keep) if num_outliers else (None, None)
    outlier_int4_triton.decode(x, -1 / 8, *outlier_int4_triton.encode(x, *chosen, 64, -1 / 8, "nearest", 0))


def _asymmetric_int4(x: Tensor) -> None:
    tensors = asymmetric_int4_triton.encode(x.view(-1), 64, 1 / 15, 0.0, "nearest", 0)
    asymmetric_int4_triton.decode(x.view(-1), *tensors, 1 / 15, 0.0)


def _bitmask(x: Tensor) -> None:
    patterns = x.view(-1).view({4: torch.int32, 2: torch.int16}[x.element_size()])
    bitmask_triton.decode(patterns, *bitmask_triton.encode(patterns, with_pattern=x.element_size() == 4))


def _channel_int4(x: Tensor) -> None:
    channel_int4_triton.decode(x, *channel_int4_triton.encode(x, 64, -1 / 8, "nearest", 0), -1 / 8)


def _int8(x: Tensor) -> None:
    int8_triton.decode(x.view(-1), *int8_triton.encode(x.view(-1), 64, 1 / 127, "nearest", 0), 1 / 127)


def _token_int4(x: Tensor) -> None:
    token_int4_triton.decode(x, *token_int4_triton.encode(x, 1 / 8, "nearest", 0), 1 / 8)


ROUND_TRIPS: dict[str, Callable[[Tensor], None]] = {
    "asymmetric_int4": _asymmetric_int4,
    "bitmask": _bitmask,
    "channel_int4": _channel_int4,
    "int8": _int8,
    "outlier_int4": lambda x: _outlier_int4(x, 0),
    "outlier_int4-raw": lambda x: _outlier_int4(x, 3),
    "token_int4": _token_int4,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_second_launch_gives_the_device_what_the_first_gave_without_asking_triton(
    name: str, dtype: torch.dtype, driver: NotingDriver, runs_of_triton: list[str]
) -> None:
    x = torch.ones(96, 128, dtype=dtype)
    ROUND_TRIPS[name](x)
    first, asked = driver.launches.copy(), len(runs_of_triton)
    ROUND_TRIPS[name](x)
    assert driver.launches == [*first, *first]
    assert len(first) == asked == len(runs_of_triton) == 2


tensors = st.tuples(
    st.sampled_from([1, 8, 15, 16, 17, 64, 1024]), st.sampled_from([1, 16, 24]), st.sampled_from(DTYPES)
)


@given(st.lists(st.tuples(tensors, st.sampled_from([0, 1, 8])), min_size=2, max_size=5))
@settings(max_examples=30, deadline=None)
def test_any_tensors_after_each_other_get_the_kernels_that_triton_would_choose(
    driver: NotingDriver, calls: list[tuple[tuple[int, int, torch.dtype], int]]
) -> None:
    """Triton compiles kernels for addresses and numbers that are multiples of 16, and for numbers that are 1."""
    driver.launches.clear()
    with pytest.MonkeyPatch.context() as patch:
        for kept in (_triton._runners, None):
            _triton._runners.clear()
            for (rows, columns, dtype), offset in calls * 2:
                if kept is None:
                    patch.setattr(_triton, "_runners", {})
                whole = torch.ones(rows * columns + offset, dtype=dtype)
                ROUND_TRIPS["outlier_int4"](whole[offset:].view(rows, columns))
    half = len(driver.launches) // 2
    assert driver.launches[:half] == driver.launches[half:]


@pytest.fixture
def wanted(driver: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many kernels Triton compiles in a test, by name: for a device that it has none for."""
    found: Counter[str] = Counter()

    def note(fn: Any, **_: Any) -> None:
        found[f"{fn.module}.{fn.name}".rpartition("adacc_hf.kernels.")[2]] += 1

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    monkeypatch.setattr(driver, "device", next(_new_devices))
    monkeypatch.setattr(_triton, "_runners", {})
    return found


SIZES = random.Random(0).sample([(batch, tokens) for batch in range(1, 9) for tokens in range(17, 2000)], 1000)
"""Samples and tokens of batches, all different."""


@pytest.mark.parametrize("columns", [64, 768])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_thousand_sizes_take_no_more_kernels_than_one(name: str, columns: int, wanted: Counter[str]) -> None:
    """What an activation has of each token is fixed, the number of tokens is not."""
    for batch, tokens in SIZES:
        ROUND_TRIPS[name](torch.empty(batch * tokens, columns, dtype=torch.bfloat16))
    # A bit of 64 elements a token is a whole number of 128-bit words for even numbers of tokens alone.
    assert set(wanted.values()) == {2 if (name, columns) == ("bitmask", 64) else 1}
    assert len(wanted) == 2


MOST_BY_WIDTH = {
    "asymmetric_int4": 2,
    "bitmask": 4,  # elements and bits aligned or not, each by itself
    "channel_int4": 2,
    "int8": 2,
    "outlier_int4": 2,
    "outlier_int4-raw": 16,  # aligned or not, or of whole groups, by how many rows a program's 4096 elements touch
    "token_int4": 12,  # aligned or not, by the power of two that a row fits in
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_rows_of_a_thousand_lengths_take_few_kernels(name: str, wanted: Counter[str]) -> None:
    """Attention's scores have as many columns as there are tokens."""
    for batch, tokens in SIZES:
        ROUND_TRIPS[name](torch.empty(batch * 4, tokens, dtype=torch.bfloat16))
    assert len(wanted) == 2
    assert max(wanted.values()) <= MOST_BY_WIDTH[name], wanted


def test_rows_that_are_too_long_for_registers_take_one_kernel_for_all_lengths(wanted: Counter[str]) -> None:
    for columns in range(token_int4_triton.MAX_BLOCK + 16, 2**17, 1600):
        _token_int4(torch.empty(8, columns))
    assert wanted == {"token_int4_triton._encode_long_kernel": 1, "token_int4_triton._decode_kernel": 1}


def test_no_more_kernels_are_remembered_than_there_is_room_for(
    driver: NotingDriver, runs_of_triton: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "MAX_RUNNERS", 3)
    for rows in (16, 32, 48, 64):
        ROUND_TRIPS["int8"](torch.ones(rows, 64))
        assert len(_triton._runners) <= 3
    assert len(driver.launches) == 8
