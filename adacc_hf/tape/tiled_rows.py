"""Execution of row-wise modules in tiles: a few rows (tokens) at a time, in forward and in backward.

Forward runs the module tile by tile without a graph and keeps only the module's input. Backward runs each tile again
with a graph, and adds up the gradients of the parameters. So the module's inner tensors exist for one tile at a time
(ALST, arXiv 2506.13996, does this for MLPs of all blocks). On a tape the module is one operator (`TiledModule`), which
replay never runs. Its input is an ordinary activation: a plan may retain, compress or recompute it.

A module without matrix products, such as a norm that computes in float32, runs in tiles in backward only
(`TiledBackward`). Its forward runs its ordinary operators on all rows, which are on the tape, so that its result can be
recomputed. Most of its memory is taken in backward.

The gradients differ from plain training's only by the order of sums over tokens. The sums over tiles are in float32, or
in the parameter's dtype if that is wider, as in the chunked head (`head/chunked_loss.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from adacc_hf.artifacts.errors import TilesError
from adacc_hf.artifacts.tiles import Tiling, tile_rows
from adacc_hf.tape.function_operators import autocast_as, autocast_of
from adacc_hf.tape.guards import BlockPaths
from adacc_hf.torch_glue.private import forward_hooks, forward_pre_hooks, without_modes
from adacc_hf.torch_glue.rng_state import draw_from_state, from_bytes, generator_state, to_bytes
from adacc_hf.torch_glue.tensors import is_fake
from adacc_hf.torch_glue.zero3 import is_identity_hook

ABSENT = object()
"""Stands for an attribute that an object does not have."""

Watcher = Callable[[str, int], None]
"""Callback that gets ("begin" or "end", index of the module in `Tiling.modules`) of each run over a module's tiles."""

_watcher: Watcher | None = None
"""Callback to measure memory, or None if nothing is measured."""


Gradients = Callable[[Tensor, Sequence[Tensor], Tensor], tuple[Tensor | None, ...]]
"""Function of (result, inputs, gradient of the result) that returns the gradient of each input, or None."""


_gradient_function: Gradients = partial(torch.autograd.grad, allow_unused=True)


@contextmanager
def gradients_by(function: Gradients) -> Iterator[None]:
    """Compute the gradients of tiles by `function` inside the `with` block, for tensors that autograd's engine cannot
    run backward on."""
    global _gradient_function
    before, _gradient_function = _gradient_function, function
    try:
        yield
    finally:
        _gradient_function = before


@contextmanager
def watching_tiles(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` when a run over tiles that starts in the `with` block, or its backward, begins and ends."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


def in_tiles(block: nn.Module, tiling: Tiling | None, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn`, a call of `block`, changed to run its row-wise modules in tiles unless `tiling` is None."""
    keywords = fn.keywords if isinstance(fn, partial) else {}
    return fn if tiling is None else partial(run_in_tiles, block, tiling, fn, **keywords)


def run_in_tiles(block: nn.Module, tiling: Tiling, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of `fn`, a call of `block` whose row-wise modules run in tiles."""
    with ExitStack() as stack:
        for index, path in enumerate(tiling.modules):
            module = block.get_submodule(path)
            function = TiledBackward if path in tiling.backward_only else TiledModule
            own = module.__dict__.get("forward", ABSENT)
            forward = partial(_forward_in_tiles, module, module.forward, own, function, tiling.num_tiles, index)
            stack.enter_context(_forward_attribute(module, forward))
        return fn(*args, **kwargs)


@contextmanager
def _forward_attribute(module: nn.Module, forward: Any) -> Iterator[None]:
    """Set the attribute `forward` in the `__dict__` of `module` inside the `with` block, or remove it for ABSENT."""
    before = module.__dict__.get("forward", ABSENT)
    _set_forward(module, forward)
    try:
        yield
    finally:
        _set_forward(module, before)


def _set_forward(module: nn.Module, forward: Any) -> None:
    if forward is ABSENT:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


def refusal_of(module: nn.Module) -> str | None:
    """Return the reason why `module` must not run in tiles, or None: forward hooks would run for each tile."""
    inner = (child for child in module.modules() if child is not module)
    hooks = [hook for child in inner for of in (forward_pre_hooks, forward_hooks) for hook in of(child).values()]
    if any(_is_foreign(hook) for hook in hooks):
        return "a module inside it has forward hooks"
    return None


def _is_foreign(hook: Any) -> bool:
    """Return True if `hook`, a forward hook, must not run for each tile: it is neither the recorder's, to learn which
    module runs, nor an identity of ZeRO 3."""
    code = hook.func if isinstance(hook, partial) else hook
    return not str(getattr(code, "__module__", "")).startswith("adacc_hf.") and not is_identity_hook(code)


def _forward_in_tiles(
    module: nn.Module,
    forward: Callable[..., Tensor],
    own: Any,
    function: type[TiledBackward],
    num_tiles: int,
    index: int,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Run `forward`, the forward of `module`, in tiles through the autograd function `function`, or without tiles if
    gradients are disabled or the arguments are not one tensor with rows (see `TiledCall`)."""
    is_one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dim() > 1
    if not is_one or not torch.is_grad_enabled() or refusal_of(module) is not None:
        return forward(*args, **kwargs)
    trainable = trainable_parameters(module)
    if not trainable and not args[0].requires_grad:
        return forward(*args)
    call = TiledCall(module, forward, own, tuple(trainable), num_tiles, index)
    return function.apply(args[0], *trainable.values(), call)


def trainable_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of `module` that require gradients, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


@dataclass(frozen=True)
class TiledCall:
    """One call of a row-wise module in tiles."""

    module: nn.Module
    forward: Callable[..., Tensor]
    own: Any
    """The attribute `forward` in the `__dict__` of `module` outside this call, or ABSENT."""
    names: tuple[str, ...]
    """Names of the trainable parameters in the module."""
    num_tiles: int
    index: int = 0
    """Index of the module in `Tiling.modules`."""

    def on_parameters(self, parameters: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Run the module on `rows` with `parameters` in place of its own trainable parameters."""
        return run_on_parameters(self.module, self.forward, parameters, (rows,))


def run_on_parameters(
    module: nn.Module, forward: Callable[..., Any], parameters: Mapping[str, Tensor], args: tuple[Any, ...]
) -> Any:
    """Return `forward(*args)`, a call of `module` without its hooks, with `parameters` in place of its own."""
    named = {f"module.{name}": parameter for name, parameter in parameters.items()}
    return torch.func.functional_call(_Runner(module, forward), named, args)


class _Runner(nn.Module):
    """Module that calls the forward of another module, without that module's hooks."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, *args: Any) -> Any:
        return self._forward(*args)


def _prepare(ctx: Any, rows: Tensor, parameters_and_call: tuple[Any, ...]) -> TiledCall:
    """Store `rows` and the parameters in `ctx` for backward, and return the TiledCall, which comes last."""
    # Tensors come first, because autograd's graph has an edge for each tensor, and FakeBackward counts positions.
    *parameters, call = parameters_and_call
    ctx.call, ctx.watcher, ctx.device = call, _watcher, rows.device
    ctx.parameters = tuple(parameters)
    ctx.autocast = autocast_of()
    ctx.state = None
    ctx.save_for_backward(rows)
    return call


@contextmanager
def _drawing(device: torch.device) -> Iterator[list[Tensor]]:
    """Yield a list that gets the generator's earlier state if the `with` block draws random numbers."""
    states: list[Tensor] = []
    before = generator_state(device)
    yield states
    with without_modes():  # the comparison is not an operator of the block
        after = generator_state(device)
        if before is not None and after is not None and not is_fake(before) and not torch.equal(before, after):
            states.append(before)


class TiledBackward(Function):
    """Autograd function of a row-wise module whose forward runs on all rows, and whose backward runs in tiles."""

    keeps_saved_tensors = True
    """Read by the recorder of tapes: backward does not write into saved tensors."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters_and_call: Any) -> Tensor:
        call = _prepare(ctx, rows, parameters_and_call)
        with autocast_as(ctx.autocast):
            ctx.path = _path_of(call, Tiles(rows, call.num_tiles).first)
        with _drawing(rows.device) as states:
            result = call.forward(rows)
        _check_result(result, tuple(rows.shape[:-1]))
        if states:
            raise TilesError(
                f"the module {type(call.module).__name__} draws random numbers, which it did not when the model was "
                f'profiled, so its tiles would draw others: leave "tile" out of AdaccConfig(actions=...)'
            )
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        call: TiledCall = ctx.call
        sums = GradientSums(ctx.parameters)
        tiles = Tiles(rows, call.num_tiles)
        row_gradient = torch.empty_like(tiles.rows) if ctx.needs_input_grad[0] else None
        gradient = gradient.reshape(len(tiles.rows), -1)
        drawing = draw_from_state(from_bytes(ctx.state), ctx.device)
        with _watched(ctx.watcher, call.index), autocast_as(ctx.autocast), drawing:
            if _path_of(call, tiles.first) != ctx.path:
                raise TilesError(
                    f"the module {type(call.module).__name__} runs other Python code in backward than it did in "
                    f"forward, for example because an adapter was switched or a setting changed, so its tiles would "
                    f'give other gradients: leave "tile" out of AdaccConfig(actions=...)'
                )
            targets = [] if row_gradient is None else tiles.parts(row_gradient)
            for number, parts in enumerate(zip(tiles.parts(tiles.rows), tiles.parts(gradient), strict=True)):
                part = backward_of_tile(call, sums, *parts, row_gradient is not None)
                if part is not None:
                    targets[number].copy_(part)
                del part
        return (None if row_gradient is None else row_gradient.view(rows.shape), *sums.gradients(), None)


class TiledModule(TiledBackward):
    """Autograd function that runs a row-wise module in tiles. On a tape, it is one operator that replay never runs."""

    is_one_operator = True
    """Read by the recorder of tapes: the operators inside are not on the tape."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters_and_call: Any) -> Tensor:
        call = _prepare(ctx, rows, parameters_and_call)
        tiles = Tiles(rows, call.num_tiles)
        result: Tensor | None = None
        targets: list[Tensor] = []
        with _drawing(rows.device) as states, _watched(ctx.watcher, call.index), autocast_as(ctx.autocast):
            ctx.path = _path_of(call, tiles.first)
            for number, tile in enumerate(tiles.parts(tiles.rows)):
                part = call.forward(tile)
                if result is None:
                    result = tiles.empty(part)
                    targets = tiles.parts(result)
                targets[number].copy_(part)
                del part
        ctx.state = to_bytes(states[0]) if states else None
        assert result is not None  # there is at least one tile
        return result.view(*rows.shape[:-1], result.shape[-1])


def backward_of_tile(
    call: TiledCall, sums: GradientSums, rows: Tensor, gradient: Tensor, needs_row_gradient: bool
) -> Tensor | None:
    """Run one tile again with a graph, add the parameters' gradients to `sums`, and return the gradient of `rows`.

    The parameters are replaced by detached tensors on the same memory, because hooks on a parameter must run once for
    the whole gradient, not for each tile.
    """
    rows = rows.detach().requires_grad_(needs_row_gradient)
    detached = [parameter.detach().requires_grad_() for parameter in sums.parameters]
    with torch.enable_grad():
        result = call.on_parameters(dict(zip(call.names, detached, strict=True)), rows)
    inputs = [rows, *detached] if needs_row_gradient else detached
    gradients = _gradient_function(result, inputs, gradient.view(result.shape))
    del result
    sums.add(gradients[1:] if needs_row_gradient else gradients)
    return gradients[0] if needs_row_gradient else None


class GradientSums:
    """Sums over tiles of the gradients of `parameters`, in float32 or the parameter's wider dtype."""

    def __init__(self, parameters: tuple[Tensor, ...]) -> None:
        self.parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Add the gradients of one tile. None stands for a parameter that the tile did not use."""
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self._sums[place]
            if total is None:
                # A copy only if the dtype changes: the gradient of a tile belongs to nobody else.
                self._sums[place] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            else:
                total += gradient

    def gradients(self) -> list[Tensor | None]:
        """Return the sums in the parameters' dtypes, and drop the sums of this object."""
        sums, self._sums = self._sums, []
        gradients: list[Tensor | None] = []
        for place, parameter in enumerate(self.parameters):
            total, sums[place] = sums[place], None
            gradients.append(None if total is None else total.to(parameter.dtype))
        return gradients


def _check_result(result: Any, expected: tuple[int, ...]) -> None:
    """Raise TilesError if the result of a module on rows of the shape `expected` does not have as many rows."""
    if not isinstance(result, Tensor) or tuple(result.shape[:-1]) != expected:
        raise TilesError(
            f"a module returned {type(result).__name__} for {math.prod(expected)} rows, not as many rows: "
            f'leave "tile" out of AdaccConfig(actions=...)'
        )


class Tiles:
    """The rows of a tensor, divided into `num_tiles` tiles of equal size. The last tile may have fewer rows."""

    def __init__(self, rows: Tensor, num_tiles: int) -> None:
        self.outer = (1,) * (rows.dim() - 2)
        self.rows = rows.detach().reshape(-1, rows.shape[-1])
        """All rows, as a matrix."""
        self.size = tile_rows(len(self.rows), num_tiles)

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Return each tile's part of `matrix`, which has all rows, with the input's number of dimensions."""
        return [part.view(*self.outer, *part.shape) for part in matrix.split(self.size)]

    @property
    def first(self) -> Tensor:
        return self.parts(self.rows)[0]

    def empty(self, part: Any) -> Tensor:
        """Return an uninitialized matrix for the module's results on all rows. `part` is the first tile's result."""
        _check_result(part, (*self.outer, min(self.size, len(self.rows))))
        return part.new_empty(len(self.rows), part.shape[-1])


@contextmanager
def _watched(watcher: Watcher | None, index: int) -> Iterator[None]:
    if watcher is not None:
        watcher("begin", index)
    yield
    if watcher is not None:
        watcher("end", index)


_PATHS: WeakKeyDictionary[nn.Module, BlockPaths] = WeakKeyDictionary()


@contextmanager
def _without_own_hooks(module: nn.Module) -> Iterator[None]:
    """Remove this package's forward hooks from `module` and the modules in it until the `with` block ends."""
    tables = [hooks(child) for child in module.modules() for hooks in (forward_pre_hooks, forward_hooks)]
    own = [(table, {key: hook for key, hook in table.items() if not _is_foreign(hook)}) for table in tables if table]
    for table, hooks in own:
        for key in hooks:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in own:
            table.update(hooks)


def _path_of(call: TiledCall, rows: Tensor) -> Any:
    """Return a key of the path that `call` takes through the module's Python code (`tape/guards.py`)."""
    paths = _PATHS.setdefault(call.module, BlockPaths())
    # A recorder must not see how Dynamo reads the module, nor Dynamo the recorder's hooks, which are gone in backward.
    # Guards may compare the names of the module's attributes, which include `forward` only while the block runs.
    own_forward = _forward_attribute(call.module, call.own)
    with without_modes(), own_forward, _without_own_hooks(call.module), torch.enable_grad():
        return paths.key(call.module, call.forward, (rows.detach().requires_grad_(),))
