"""Measurement of the gradient errors that lossy codecs cause: backward reads a decoded or recomputed tensor.

The round-trip error of a codec does not predict the gradient's error. The backward of fused attention, for example,
recomputes the softmax from the saved queries and keys, and a relative error of 10 % in large scores changes
probabilities by large factors. So the operators of a recorded block run once more. The backward of each operator runs
on exact tensors, and once for each inexact tensor that may replace a saved tensor. Matrix products are not run, because
the error of their gradient equals that of the replaced factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.kernels.codecs import Codec
from adacc_hf.tape.execution_plan import encode_view
from adacc_hf.tape.replay import Environment, ReplayStep, recorded_environment, view, walk
from adacc_hf.tape.tape import Tape, TapeOperator, TensorRef, geometry_of, leaves, map_tensors
from adacc_hf.torch_glue.tensors import clone_with_storage, relative_error

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "grouped_mm", "convolution")


@dataclass(frozen=True)
class GradientErrors:
    """Largest relative L2 error of operators' gradients, by the saved value that an inexact tensor replaces."""

    codecs: dict[tuple[int, str], float] = field(default_factory=dict)
    """Gradient error if a codec stores the value, keyed by (value index, codec name)."""
    replay: dict[int, float] = field(default_factory=dict)
    """Gradient error by value index if the value is recomputed from decoded values, of the coarsest accurate codec."""


@torch.no_grad()
def gradient_errors(tape: Tape, bases: Sequence[torch.Tensor], codecs: Mapping[int, Sequence[Codec]]) -> GradientErrors:
    """Measure the gradient errors of codecs and recomputation in one recorded block, on its tensors `bases`.

    `codecs` contains the lossy codecs of each activation, the coarsest first. Errors of recomputation are for inputs
    decoded by the coarsest codec whose error is at most DEGRADED_ERROR.
    """
    codec_errors: dict[tuple[int, str], float] = {}
    while any(codecs.values()):
        errors = _measure_gradient_errors(tape, bases, codecs)
        codec_errors |= errors.codecs
        accurate = {
            value: [c for c in value_codecs if is_accurate_enough(codec_errors, value, c.name)]
            for value, value_codecs in codecs.items()
        }
        if accurate == codecs:
            return GradientErrors(codec_errors, errors.replay)
        codecs = accurate
    return GradientErrors(codec_errors)


def is_accurate_enough(errors: Mapping[tuple[int, str], float], value: int, codec: str) -> bool:
    """Return True unless `codec` causes a gradient error above DEGRADED_ERROR on `value`."""
    return errors.get((value, codec), 0.0) <= DEGRADED_ERROR


def _measure_gradient_errors(
    tape: Tape, bases: Sequence[torch.Tensor], codecs: Mapping[int, Sequence[Codec]]
) -> GradientErrors:
    """Return the largest errors of all operators' gradients, with one saved value at a time decoded or recomputed."""
    worst_errors = GradientErrors()
    environment = recorded_environment(tape, bases)
    stand_ins = _StandIns(tape, environment, codecs)
    for operator in walk(tape, environment):
        stand_ins.run(operator)
        candidates = [value for value in (*operator.inputs(), *operator.results()) if stand_ins.has_stand_in(value)]
        error_of = _error_function(operator, tape, environment) if candidates else None
        if error_of is not None:
            for value in candidates:
                for name, decoded in stand_ins.decoded(value):
                    error = max(error_of(value, decoded), worst_errors.codecs.get((value, name), 0.0))
                    worst_errors.codecs[value, name] = error
                if value in stand_ins.recomputed:
                    error = error_of(value, stand_ins.recomputed[value])
                    worst_errors.replay[value] = max(error, worst_errors.replay.get(value, 0.0))
        stand_ins.free_unused(operator)
    return worst_errors


class _StandIns:
    """Inexact tensors that may replace a recorded block's saved tensors: decoded, or recomputed from decoded ones."""

    def __init__(self, tape: Tape, recorded: Environment, codecs: Mapping[int, Sequence[Codec]]) -> None:
        self.recomputed: dict[int, torch.Tensor] = {}
        """Recomputed tensors of saved values, until the last operator that may have saved the value."""
        self._tape = tape
        self._recorded = recorded
        self._codecs = {
            value: value_codecs
            for value, value_codecs in codecs.items()
            if value_codecs and recorded[value] is not None
        }
        self._saved = {value for value in tape.saved_values() if not tape.is_held_elsewhere(value)}
        self._last = {value.index: max(tape.consumers(value.index), default=-1) for value in tape.values}
        self._decoded: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._inexact: set[int] = set()
        self._environment: Environment = [None] * len(tape.values)
        for value in tape.values:
            if value.producer is None:
                self._set_current(value.index)

    def has_stand_in(self, value: int) -> bool:
        return value in self._saved and (value in self._codecs or value in self.recomputed)

    def decoded(self, value: int) -> list[tuple[str, torch.Tensor]]:
        if value not in self._decoded:
            self._decoded[value] = [
                (codec.name, _decoded_base(codec, self._tape, tensor, value))
                for codec in self._codecs.get(value, ())
                if (tensor := self._recorded[value]) is not None
            ]
        return self._decoded[value]

    def run(self, operator: TapeOperator) -> None:
        """Compute the results of `operator` from inexact inputs, except for results that replay cannot recompute."""
        results, environment = operator.results(), self._environment
        has_inexact_input = not self._inexact.isdisjoint(operator.inputs())
        is_ready = has_inexact_input and all(environment[value] is not None for value in operator.inputs())
        if is_ready and not self._tape.recomputable.isdisjoint(results):
            ReplayStep(operator, self._tape).run(environment)
            # Replay never computes indices from decoded values (rule R14). A truth value changes only if the compared
            # numbers are close.
            replayed = {value: tensor for value in results if (tensor := environment[value]) is not None}
            inexact = {value: tensor for value, tensor in replayed.items() if tensor.is_floating_point()}
            self._inexact.update(inexact)
            self.recomputed |= {value: tensor for value, tensor in inexact.items() if value in self._saved}
        for value in results:
            self._set_current(value)

    def _set_current(self, value: int) -> None:
        """Set the tensor that later operators read: decoded from the coarsest codec, else recomputed, else recorded."""
        if value in self._codecs:
            self._inexact.add(value)
            self._environment[value] = self.decoded(value)[0][1]
        elif value not in self._inexact:
            self._environment[value] = self._recorded[value]

    def free_unused(self, operator: TapeOperator) -> None:
        for value in (*operator.inputs(), *operator.results()):
            if self._last[value] <= operator.index:
                self._environment[value] = None
                self.recomputed.pop(value, None)
                self._decoded.pop(value, None)


def _decoded_base(codec: Codec, tape: Tape, base: torch.Tensor, value: int) -> torch.Tensor:
    tensor = view(base, encode_view(tape, value))
    codec.fit(tensor)
    return view(codec.decode(codec.encode(tensor)), tape.values[value].ref)


def _error_function(
    operator: TapeOperator, tape: Tape, environment: Environment
) -> Callable[[int, torch.Tensor], float] | None:
    """Return a function of (value, replacement) that computes the error of the operator's gradients, or None."""
    operands = [*operator.inputs(), *operator.results()]
    can_run = operator.outputs and not operator.mutations and not operator.is_collective and not operator.blanks()
    bases = {value: tensor for value in operands if (tensor := environment[value]) is not None}
    if not can_run or len(bases) < len(set(operands)) or any(tape.values[value].overwritten for value in operands):
        return None
    if operator.short_name in _PRODUCTS:
        factors = {value: bases[value] for value in operator.inputs()}
        return lambda value, other: float(relative_error([factors[value]], [other])) if value in factors else 0.0
    try:
        return _OperatorBackward(operator, bases).error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if operator.is_function or isinstance(error, RuntimeError):  # no derivative, or the user's own
            return None
        raise


class _OperatorBackward:
    """Autograd graph of one operator that ran again, whose backward can read replaced saved tensors."""

    def __init__(self, operator: TapeOperator, bases: Mapping[int, torch.Tensor]) -> None:
        self._inputs: list[torch.Tensor] = []
        self._is_function = is_function = operator.is_function
        saved_addresses: set[int] = set()
        # The graph holds these two functions. A reference to `self` in either one would be a cycle that is never freed.
        replacements: dict[int, torch.Tensor] = {}
        self._replacements = replacements
        """Tensors that backward reads in place of saved tensors, by the address of the saved tensor's storage."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved_addresses.add(_storage_address(tensor))
            return tensor.detach()

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            base = replacements.get(_storage_address(tensor))
            replacement = tensor if base is None else view(base, TensorRef(0, geometry_of(tensor), tensor.dtype))
            # The backward of an autograd function may write into its saved tensors (rule R6).
            return clone_with_storage(replacement) if is_function else replacement

        args, kwargs = map_tensors((operator.args, operator.kwargs), TensorRef, lambda ref: self._leaf(bases, ref))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            results = leaves(operator.target(*args, **kwargs))
        self._outputs = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
        addresses = {value: _storage_address(bases[value]) for value in operator.inputs()}
        addresses |= {value: _storage_address(results[position]) for position, value in operator.outputs}
        self._saved = {
            value: address for value, address in addresses.items() if address in saved_addresses and self._outputs
        }
        self._weights = [_random_gradient(output) for output in self._outputs] if self._saved else []
        self._exact = self._gradients() if self._saved else []

    def _leaf(self, bases: Mapping[int, torch.Tensor], ref: TensorRef) -> torch.Tensor:
        tensor = view(bases[ref.value], ref).detach()
        if tensor.is_floating_point():
            self._inputs.append(tensor.requires_grad_())
        return tensor

    def error(self, value: int, replacement: torch.Tensor) -> float:
        """Return the relative L2 error of the gradients with `replacement`, or 0 if `value` is not saved."""
        if value not in self._saved:
            return 0.0
        self._replacements[self._saved[value]] = replacement
        try:
            changed_gradients = self._gradients()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # anomaly detection found gradients that are not finite
            return math.inf
        finally:
            self._replacements.clear()
        return float(relative_error(self._exact, changed_gradients))

    def _gradients(self) -> list[torch.Tensor]:
        weights = [weight.clone() for weight in self._weights] if self._is_function else self._weights
        gradients = torch.autograd.grad(self._outputs, self._inputs, weights, retain_graph=True, allow_unused=True)
        return [gradient for gradient in gradients if gradient is not None]


def _storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _random_gradient(output: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(output.device).manual_seed(0)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
