"""How far off the gradient of a single operator is where its backward reads what a codec left, or what replay makes of
that.

The error of a round trip is not the error that it makes. Backward of fused attention makes its softmax again: it takes
the exponential of scores, and where these are large, queries and keys that are a tenth off leave nothing of it. A
softmax that replay makes of such queries and keys adds up to one, but the gradient of a sharp one goes by what is
missing to one, of which little is left. So operators are run once more on what was recorded, their backward once as it
is, and once for everything that may stand in for a tensor that they saved.

The gradient of a product is as far off as what stands in for its factor, so that products are not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.kernels.codecs import Codec
from adacc_hf.tape.execution_plan import encode_view
from adacc_hf.tape.recorder import is_freed
from adacc_hf.tape.replay import Environment, ReplayStep, view
from adacc_hf.tape.tape import Tape, TapeOperator, TensorRef, geometry_of, leaves, map_tensors
from adacc_hf.torch_glue.tensors import copied, relative_error

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "grouped_mm", "convolution")


@dataclass(frozen=True)
class GradientErrors:
    """Relative L2 errors of operators' gradients, the worst of all operators that saved the value."""

    codecs: dict[tuple[int, str], float] = field(default_factory=dict)
    """Where a codec stores the value, by value and name of the codec."""
    replay: dict[int, float] = field(default_factory=dict)
    """Where replay makes the value of what codecs store: the coarsest ones that are near enough."""


@torch.no_grad()
def gradient_errors(tape: Tape, bases: Sequence[torch.Tensor], codecs: Mapping[int, Sequence[Codec]]) -> GradientErrors:
    """The errors on the recorded tensors `bases`.

    `codecs` has those that activations may be stored with, with loss, the coarsest first. Those whose error is above
    DEGRADED_ERROR are measured, and replay starts from the others.
    """
    found: dict[tuple[int, str], float] = {}
    while any(codecs.values()):
        errors = _errors_of(tape, bases, codecs)
        found |= errors.codecs
        near = {value: [c for c in some if is_near(found, value, c.name)] for value, some in codecs.items()}
        if near == codecs:
            return GradientErrors(found, errors.replay)
        codecs = near
    return GradientErrors(found)


def is_near(errors: Mapping[tuple[int, str], float], value: int, codec: str) -> bool:
    """Whether what the codec leaves of the value is near enough for backward; so is what was not measured."""
    return errors.get((value, codec), 0.0) <= DEGRADED_ERROR


def _errors_of(tape: Tape, bases: Sequence[torch.Tensor], codecs: Mapping[int, Sequence[Codec]]) -> GradientErrors:
    found = GradientErrors()
    recomputing = _Remaking(tape, bases, codecs)
    for operator in tape.operators:
        recomputing.run(operator)
        candidates = [value for value in (*operator.inputs(), *operator.made()) if recomputing.has_stand_in(value)]
        if candidates:
            _try(_backward_of(operator, tape, bases), candidates, recomputing, found)
        recomputing.end(operator)
    return found


def _try(
    backward: _Backward | _Product | None, values: Sequence[int], recomputing: _Remaking, found: GradientErrors
) -> None:
    """Note what `backward` makes of all that may stand in for `values`."""
    if backward is None:
        return
    for value in values:
        for name, decoded in recomputing.decoded(value):
            _raise_to(found.codecs, (value, name), backward.error(value, decoded))
        if value in recomputing.recomputed:
            _raise_to(found.replay, value, backward.error(value, recomputing.recomputed[value]))


def _raise_to(errors: dict, key: object, error: float) -> None:
    errors[key] = max(error, errors.get(key, 0.0))


class _Remaking:
    """The saved values of a tape as codecs leave them, and as replay makes them, one operator after the other.

    Replay makes a value of what codecs leave of the activations right before it: it may start anywhere.
    """

    def __init__(self, tape: Tape, bases: Sequence[torch.Tensor], codecs: Mapping[int, Sequence[Codec]]) -> None:
        self.recomputed: dict[int, torch.Tensor] = {}
        """What replay makes of saved values, as long as an operator is to come that may have saved it too."""
        self._tape = tape
        self._bases = bases
        self._codecs = {value: some for value, some in codecs.items() if some and not _is_gone(tape, bases, value)}
        self._saved = {value for value in tape.saved_values() if not tape.is_held_elsewhere(value)}
        self._last = {value.index: max(tape.consumers(value.index), default=-1) for value in tape.values}
        self._decoded: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._inexact: set[int] = set()
        self._environment: Environment = [None] * len(tape.values)
        for value in tape.values:
            if value.producer is None:
                self._settle(value.index)

    def has_stand_in(self, value: int) -> bool:
        return value in self._saved and (value in self._codecs or value in self.recomputed)

    def decoded(self, value: int) -> list[tuple[str, torch.Tensor]]:
        """What each codec leaves of a value, by the codec's name."""
        if value not in self._decoded:
            self._decoded[value] = [
                (codec.name, _round_trip(codec, self._tape, self._bases[value], value))
                for codec in self._codecs.get(value, ())
            ]
        return self._decoded[value]

    def run(self, operator: TapeOperator) -> None:
        """Make what the operator makes, of what is left of its inputs, if replay may."""
        made, environment = operator.made(), self._environment
        is_changed = not self._inexact.isdisjoint(operator.inputs())
        is_ready = is_changed and all(environment[value] is not None for value in operator.inputs())
        if is_ready and not self._tape.recomputable.isdisjoint(made):
            ReplayStep(operator, self._tape).run(environment)
            # No replay makes indices of what codecs left (rule R14), and truths are near where they come out wrong.
            remade = {value: tensor for value in made if (tensor := environment[value]) is not None}
            changed = {value: tensor for value, tensor in remade.items() if tensor.is_floating_point()}
            self._inexact.update(changed)
            self.recomputed |= {value: tensor for value, tensor in changed.items() if value in self._saved}
        for value in made:
            self._settle(value)

    def _settle(self, value: int) -> None:
        """Leave in the environment what later operators read: what the coarsest codec leaves, else what was made."""
        if value in self._codecs:
            self._inexact.add(value)
            self._environment[value] = self.decoded(value)[0][1]
        elif value not in self._inexact:
            self._environment[value] = None if _is_gone(self._tape, self._bases, value) else self._bases[value]

    def end(self, operator: TapeOperator) -> None:
        """Let go of what no later operator reads."""
        for value in (*operator.inputs(), *operator.made()):
            if self._last[value] <= operator.index:
                self._environment[value] = None
                self.recomputed.pop(value, None)
                self._decoded.pop(value, None)


def _round_trip(codec: Codec, tape: Tape, base: torch.Tensor, value: int) -> torch.Tensor:
    tensor = view(base, encode_view(tape, value))
    codec.fit(tensor)
    return view(codec.decode(codec.encode(tensor)), tape.values[value].ref)


def _is_gone(tape: Tape, bases: Sequence[torch.Tensor], value: int) -> bool:
    return tape.values[value].overwritten or is_freed(bases[value], tape.values[value])


def _backward_of(operator: TapeOperator, tape: Tape, bases: Sequence[torch.Tensor]) -> _Backward | _Product | None:
    """The operator's backward; None where it has none, or cannot run."""
    touched = [*operator.inputs(), *operator.made()]
    can_run = operator.outputs and not operator.mutations and not operator.is_collective and not operator.blanks()
    if not can_run or any(_is_gone(tape, bases, value) for value in touched):
        return None
    if operator.short_name in _PRODUCTS:
        return _Product(operator, bases)
    try:
        return _Backward(operator, bases)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if operator.is_function or isinstance(error, RuntimeError):  # it has no derivative, or one of its user's own
            return None
        raise


class _Product:
    """The backward of a product, which nobody has to run."""

    def __init__(self, operator: TapeOperator, bases: Sequence[torch.Tensor]) -> None:
        self._factors = {value: bases[value] for value in operator.inputs()}

    def error(self, value: int, base: torch.Tensor) -> float:
        """The relative L2 error of the gradient of the other factor with `base` in place of `value`."""
        return float(relative_error([self._factors[value]], [base])) if value in self._factors else 0.0


class _Backward:
    """The backward of an operator that was run once more, with others in place of what it saved."""

    def __init__(self, operator: TapeOperator, bases: Sequence[torch.Tensor]) -> None:
        self._inputs: list[torch.Tensor] = []
        self._is_function = is_function = operator.is_function
        saved: set[int] = set()
        # The graph holds these two functions: with `self` in one of them nothing would ever free either.
        instead: dict[int, torch.Tensor] = {}
        self._instead = instead
        """By the address of the storage that it stands in for."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.add(_address(tensor))
            return tensor.detach()

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            base = instead.get(_address(tensor))
            found = tensor if base is None else view(base, TensorRef(0, geometry_of(tensor), tensor.dtype))
            return copied(found) if is_function else found  # whose backward may write into what it saved (rule R6)

        args, kwargs = map_tensors((operator.args, operator.kwargs), TensorRef, lambda ref: self._leaf(bases, ref))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            results = leaves(operator.target(*args, **kwargs))
        self._outputs = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
        addresses = {value: _address(bases[value]) for value in operator.inputs()}
        addresses |= {value: _address(results[position]) for position, value in operator.outputs}
        self._saved = {value: address for value, address in addresses.items() if address in saved and self._outputs}
        self._weights = list(_noise(self._outputs)) if self._saved else []
        self._exact = self._gradients() if self._saved else []

    def _leaf(self, bases: Sequence[torch.Tensor], ref: TensorRef) -> torch.Tensor:
        tensor = view(bases[ref.value], ref).detach()
        if tensor.is_floating_point():
            self._inputs.append(tensor.requires_grad_())
        return tensor

    def error(self, value: int, base: torch.Tensor) -> float:
        """The relative L2 error of all gradients with `base` in place of `value`; 0 where that was not saved."""
        if value not in self._saved:
            return 0.0
        self._instead[self._saved[value]] = base
        try:
            others = self._gradients()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # under anomaly detection, of what is not finite
            return math.inf
        finally:
            self._instead.clear()
        return float(relative_error(self._exact, others))

    def _gradients(self) -> list[torch.Tensor]:
        weights = [weight.clone() for weight in self._weights] if self._is_function else self._weights
        found = torch.autograd.grad(self._outputs, self._inputs, weights, retain_graph=True, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _noise(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """A gradient for each output, always the same."""
    for output in outputs:
        generator = torch.Generator(output.device).manual_seed(0)
        yield torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
