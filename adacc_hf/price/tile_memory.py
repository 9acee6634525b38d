"""Memory of one tile of a row-wise module, as a function of the tile's rows.

Each moment of a tile's forward and backward takes bytes that are linear in the number of rows, so it is measured at two
numbers of rows. The peak at any other number is the maximum over the moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adacc_hf.artifacts.tiles import MEASURED_TILES, Line, Tiling, highest_lines
from adacc_hf.price.measurement import Measurement
from adacc_hf.tape.function_operators import autocast_as, autocast_of
from adacc_hf.tape.row_wise import row_wise_modules
from adacc_hf.tape.tape import Tape, TapeOperator, TensorRef
from adacc_hf.tape.tiled_rows import ABSENT, GradientSums, TiledCall, Tiles, backward_of_tile, trainable_parameters
from adacc_hf.torch_glue.meters import MemoryMeter
from adacc_hf.torch_glue.private import TorchDispatchMode


@dataclass(frozen=True)
class TileMemory:
    """Memory of the forward and the backward of one tile, as lines over the number of rows."""

    forward: tuple[Line, ...]
    backward: tuple[Line, ...]


def tiled_operators(tape: Tape) -> dict[str, TapeOperator]:
    """Return the operators of a tape that stand for modules in tiles, by the paths of the modules."""
    return {op.module: op for op in tape.operators if op.is_function and not op.target.may_run_again}


def tiled_inputs(tape: Tape, tiling: Tiling) -> dict[str, TensorRef]:
    """Return the inputs of the modules that ran in tiles on `tape`, by the modules' paths."""
    inputs = {path: operator.args[0] for path, operator in tiled_operators(tape).items()}
    inputs |= {module.path: module.input for module in row_wise_modules(tape) if module.path in tiling.backward_only}
    return {path: inputs[path] for path in tiling.modules if path in inputs}


def measure_tile(module: nn.Module, rows: Tensor, measurement: Measurement) -> TileMemory | None:
    """Measure the memory of one tile of `module` on `rows`, without what exists for all tiles: result, gradients of
    input and result, and sums of the parameters' gradients.

    Return None for too few rows, or if the module's operators vary with the number of rows.
    """
    small, large = (Tiles(rows, num_tiles) for num_tiles in (2 * MEASURED_TILES, MEASURED_TILES))
    if small.size == large.size:
        return None
    readings = [_measure(module, tiles.first, measurement) for tiles in (small, large)]
    lines = [_lines(few, many, small.size, large.size) for few, many in zip(*readings, strict=True)]
    return None if None in lines else TileMemory(*map(highest_lines, filter(None, lines)))


def _lines(few: list[int], many: list[int], fewer: int, most: int) -> list[Line] | None:
    """Return bytes as lines over rows, from those at `fewer` and at `most` rows, or None if the moments differ."""
    if len(few) != len(many):
        return None
    slopes = [(more - less) / (most - fewer) for less, more in zip(few, many, strict=True)]
    return [(less - slope * fewer, slope) for less, slope in zip(few, slopes, strict=True)]


def _measure(module: nn.Module, rows: Tensor, measurement: Measurement) -> tuple[list[int], list[int]]:
    """Run one tile, and return its live bytes at each moment of its forward, and of its backward."""
    parameters = trainable_parameters(module)
    call = TiledCall(module, module.forward, ABSENT, tuple(parameters), MEASURED_TILES)
    sums = GradientSums(tuple(parameters.values()))
    # The graph of a tile must not reach the hooks with which the block's call is recorded.
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
    with hooks, autocast_as(autocast_of()):
        with torch.no_grad():
            result = torch.zeros_like(call.forward(rows))
            forward = _moments(measurement.meter(rows.device), lambda: call.forward(rows))
            backward_of_tile(call, sums, rows, result, True)  # makes the sums, which exist from the second tile on
        backward = _moments(measurement.meter(rows.device), lambda: backward_of_tile(call, sums, rows, result, True))
    return forward, backward


def _moments(meter: MemoryMeter, run: Callable[[], Any]) -> list[int]:
    """Return the live bytes between successive operators of `run`, above those before it."""
    with meter:
        meter.mark(("begin",))
        with OperatorMarks(meter):
            result = run()
            meter.mark(("end",))
        del result
    base = meter.points[0].live_bytes
    return [point.max_bytes - base for point in meter.points]


class OperatorMarks(TorchDispatchMode):
    """Mode that marks the end of each operator in a meter."""

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._meter.mark(("operator",))
        return result
