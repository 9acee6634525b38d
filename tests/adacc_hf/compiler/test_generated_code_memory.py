"""Live bytes of generated code: of code written by hand in Inductor's style, and of Inductor's own code, measured."""

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

from adacc_hf.compiler import AdaccPartitioner
from adacc_hf.compiler import graph_memory as dry_run
from adacc_hf.compiler.backend import InstalledPartitioner
from adacc_hf.compiler.graph_memory import GraphInput, most_live_bytes_of_code
from adacc_hf.torch_glue.meters import MemoryMeter

SQUARE = 4 * 8 * 8


def cpp_fused_0(*_: Any) -> None:
    raise AssertionError("a kernel was run")


def empty_strided_cpu(*_: Any) -> None:
    raise AssertionError("memory was allocated")


def _code(call: Callable[[list[Any]], Any]) -> FunctionType:
    """Return `call` with the names that all of Inductor's code has."""
    return FunctionType(call.__code__, {**globals(), "AsyncCompile": None}, "call")


def _inputs(*owned: bool) -> tuple[GraphInput, ...]:
    return tuple(GraphInput(((8, 8), (8, 1), torch.float32), None, is_owned, False) for is_owned in owned)


def in_a_row(args: list[Any]) -> Any:
    x, y = args
    args.clear()
    first = empty_strided_cpu((8, 8), (8, 1), torch.float32)
    cpp_fused_0(x, y, first)
    del x
    second = empty_strided_cpu((8, 8), (8, 1), torch.float32)
    torch.mm(first, y, out=second)
    del first
    third = second
    del second
    return (torch.ops.aten.cat.default([third, y]),)


def test_inputs_die_with_their_last_reader_and_results_live_on() -> None:
    code = _code(in_a_row)
    # At the end y, `third`, and a tensor of both are live.
    assert most_live_bytes_of_code(code, _inputs(True, True)) == 4 * SQUARE
    assert most_live_bytes_of_code(code, _inputs(True, False)) == 3 * SQUARE
    assert most_live_bytes_of_code(code, _inputs(False, False)) == 3 * SQUARE
    assert most_live_bytes_of_code(code, _inputs(True, True)) == 4 * SQUARE


def needs_data(args: list[Any]) -> Any:
    (x,) = args
    return x.sum().item()


def asks_the_device(args: list[Any]) -> Any:
    raise KeyError("multi_processor_count")


@pytest.mark.parametrize(("function", "reason"), [(needs_data, "meta tensors"), (asks_the_device, "KeyError: 'multi_")])
def test_what_needs_data_is_not_known(function, reason, caplog):
    caplog.set_level("INFO", logger="adacc_hf")
    dry_run.log_unknown.cache_clear()
    assert most_live_bytes_of_code(_code(function), _inputs(True)) is None
    assert most_live_bytes_of_code(_code(function), _inputs(True)) is None
    (record,) = caplog.records
    assert reason in record.message


def test_other_code_than_inductors_is_not_run() -> None:
    assert most_live_bytes_of_code(in_a_row, _inputs(True, True)) is None
    assert most_live_bytes_of_code(None, ()) is None


@pytest.fixture
def fresh_inductor(fresh_dynamo: None) -> Iterator[None]:
    """Drop Inductor's code before and after the test."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.usefixtures("fresh_inductor")
def test_the_peak_of_a_step_is_what_its_code_shows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 256))
    x = torch.randn(128, 64)
    installed = InstalledPartitioner(AdaccPartitioner(memory_budget=0.6, min_compress_bytes=0))
    compiled = torch.compile(lambda x: model(x).square().mean())
    try:
        for _ in range(2):  # the first one compiles
            model.zero_grad(set_to_none=True)
            installed.inspect_code()  # too early: no code yet, or none that is new
            with MemoryMeter.for_device(x.device) as meter:
                meter.mark(("step",))
                loss = compiled(x)
                installed.count_calls(loss)
                loss.backward()
            installed.inspect_code()
        (region,) = installed.partitioner.policy.regions
        assert region.code_bytes is not None
        # The caller of backward holds the loss and its gradient, too.
        assert 0 <= meter.peak_bytes - max(region.code_bytes) <= 8
    finally:
        installed.remove()
