"""What compression costs in accuracy: the error of a round trip, and that of a block's gradient.

The gradient of one block is compared with an uncompressed backward of the same block: its inputs, the random
generator's state and the gradients of its outputs are kept during a tracking step, and both backwards are run after it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.errors import UnrestorableError
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.policy import RETAIN, Action, Plan
from adacc_hf.kernels.codecs import Payload
from adacc_hf.torch_glue.distributed import is_sharded
from adacc_hf.torch_glue.model_state import SMALL_COPY, ModelState
from adacc_hf.torch_glue.no_trace import NoTrace
from adacc_hf.torch_glue.private import tree_leaves, tree_map
from adacc_hf.torch_glue.rng_state import RandomStates
from adacc_hf.torch_glue.tensors import difference_norm, l2_norm

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Policy
    from adacc_hf.artifacts.profile import KindProfile, Profile
    from adacc_hf.run.block_executor import BlockExecutor

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GradientError:
    """How far a block's gradient under compression is from the exact one, inputs' and parameters' taken together."""

    error: float
    """L2 norm of the difference over that of the exact gradient; inf if only the compressed one is not finite."""
    cosine: float
    """1 if both point the same way."""

    @classmethod
    def between(cls, exact: Iterable[Tensor | None], other: Iterable[Tensor | None]) -> GradientError | None:
        """None if the exact gradient is zero or not finite: compression is not to blame then."""
        pairs = [(e, o) for e, o in zip(exact, other, strict=True) if e is not None and o is not None]
        exact, other = zip(*pairs, strict=True) if pairs else ((), ())
        norm, off, other_norm = (float(n) for n in (l2_norm(exact), difference_norm(exact, other), l2_norm(other)))
        if not math.isfinite(norm) or norm == 0:
            return None
        if not math.isfinite(off):
            return cls(error=math.inf, cosine=0.0)
        error, length = off / norm, other_norm / norm
        # By the law of cosines, in a triangle of which one side is 1.
        return cls(error=error, cosine=(1 + length * length - error * error) / (2 * length) if length else 0.0)

    @classmethod
    def worst(cls, errors: Sequence[GradientError]) -> GradientError:
        return cls(error=max(e.error for e in errors), cosine=min(e.cosine for e in errors))


class Uncompressed:
    """A stand-in for a codec that keeps the tensor as it is."""

    name = "uncompressed"
    lossless = True

    def encode(self, tensor: Tensor) -> Payload:
        return Payload((tensor.clone(),), tensor.dtype, tuple(tensor.shape), tensor.stride())

    def decode(self, payload: Payload) -> Tensor:
        return payload.tensors[0].clone()


@dataclass(slots=True)
class _SeenCall:
    """One call of a block: what it takes to run it again, and the gradients that its outputs got."""

    block: nn.Module
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    random_states: RandomStates
    autocast_dtype: torch.dtype | None
    gradients: dict[int, Tensor]
    state: ModelState | None = None
    """The state before the call of what the call changed."""
    obstacle: str | None = None
    """Why the call cannot be run again."""


class BlockSample:
    """Watches the next call of one block under its plan; `compare` tells afterwards what its gradient lost."""

    def __init__(self, plan: BlockExecutor) -> None:
        self.plan = plan
        self._seen: _SeenCall | None = None
        self._exact: list[Tensor | None] | None = None
        """The exact gradient, once something was compared with it."""
        plan.observer = self

    def run(
        self,
        plan: BlockExecutor,
        block: nn.Module,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        plan.observer = None
        seen = self._seen = _seen_call(block, fn, args, kwargs)
        state = ModelState((block, fn, args, kwargs), SMALL_COPY)
        result = plan.run(block, fn, args, kwargs)
        try:
            seen.state = state.changed()
        except UnrestorableError as error:
            seen.obstacle = str(error)
        for place, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient, place=place: seen.gradients.__setitem__(place, gradient.detach()))
        return result

    def close(self) -> None:
        """Stop watching and let go of what was kept."""
        self.plan.observer = self._seen = self._exact = None

    def compare(self, bypassed: frozenset[int] = frozenset()) -> GradientError | None:
        """The gradient's error with the activations `bypassed` kept uncompressed.

        None if the block was not called, got no gradient, or holds parameters that are sharded outside its forward, if
        there is no memory to run it in, and if it cannot be run again without a trace, of which a warning tells.
        """
        seen = self._seen
        if seen is None or not seen.gradients or is_sharded(seen.block):
            return None
        if seen.obstacle is not None:
            self._warn_uncompared(seen.obstacle)
            return None
        self.plan.wrap_codec = lambda value, codec: Uncompressed() if value in bypassed else codec
        try:
            if self._exact is None:
                self._exact = _gradient(seen, lambda fn, args, kwargs: fn(*args))
            other = _gradient(seen, lambda *call: self.plan.run_again(seen.block, *call))
        except _FreedGraphError as error:
            self._warn_uncompared(str(error))
            return None
        except torch.OutOfMemoryError:
            log.warning(
                "Adacc: no memory to compare the gradient of %s with an exact one: set guard_blocks=0, or a "
                "smaller memory_budget",
                self.plan.name,
            )
            return None
        finally:
            self.plan.wrap_codec = None
        return GradientError.between(self._exact, other)

    def _warn_uncompared(self, obstacle: str) -> None:
        """Say that the block's gradient is not compared, in this process once for each reason."""
        if obstacle not in _refused:
            _refused.add(obstacle)
            log.warning("Adacc: the gradient of %s is not compared with an exact one: %s", self.plan.name, obstacle)


_refused: set[str] = set()
"""Reasons for which no gradient was compared, as far as a warning has told of them."""


class _FreedGraphError(Exception):
    """A block's backward leads to what ran before the block, other than by its arguments."""


def _seen_call(block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _SeenCall:
    tensors = [leaf for leaf in [*tree_leaves((args, kwargs)), *block.parameters()] if isinstance(leaf, Tensor)]
    device = tensors[0].device
    enabled = torch.is_autocast_enabled(device.type)
    return _SeenCall(
        block=block,
        fn=fn,
        args=_detached(args),
        kwargs=_detached(kwargs),
        device=device,
        random_states=RandomStates([device]),
        autocast_dtype=torch.get_autocast_dtype(device.type) if enabled else None,
        gradients={},
    )


def _detached(tree: Any) -> Any:
    """The same arguments, whose tensors lead to nothing that ran before."""

    def cut(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return tree_map(cut, tree)


def _gradient(seen: _SeenCall, call: Callable[..., Any]) -> list[Tensor | None]:
    """The gradients of the call's inputs and of the block's parameters, from a run that leaves no trace.

    `call` is given the block's function and its arguments, the keyword arguments in the function too. A whole backward
    runs, as in training: autograd functions that run one of their own (tiled layers, reentrant checkpoints) put
    gradients of parameters where no `torch.autograd.grad` looks.
    """
    args, kwargs = _detached(seen.args), _detached(seen.kwargs)
    fn = partial(seen.fn.func, *seen.fn.args, **kwargs) if isinstance(seen.fn, partial) else seen.fn
    wanted = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted += [parameter for parameter in seen.block.parameters() if parameter.requires_grad]
    autocast = torch.autocast(seen.device.type, dtype=seen.autocast_dtype, enabled=seen.autocast_dtype is not None)
    with NoTrace((seen.block, fn, args), lambda: RandomStates([seen.device]), SMALL_COPY) as run:
        if seen.state is not None:
            seen.state.restore()
        seen.random_states.restore()
        with autocast:
            leaves = tree_leaves(call(fn, args, kwargs))
        outputs = [leaves[place] for place in seen.gradients]
        run.protect_gradients_of(outputs)
        try:
            torch.autograd.backward(outputs, list(seen.gradients.values()))
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise _FreedGraphError(
                "it reads tensors with a gradient that are no arguments of it, whose graph is gone after the step; "
                "set guard=False, or pass them as arguments"
            ) from None
        return [leaf.grad for leaf in wanted]


# What comparing a block's gradient takes: its input is held from its forward, and the gradient of its output from its
# backward, until the step's end, and then the block runs as in plain training.


def comparison_peaks(profile: Profile) -> dict[str, int]:
    """Most bytes live while the gradient of a block is compared after a step, by the block's name.

    The exact backward and the one under the policy follow each other: the gradients of the former are held meanwhile,
    and the latter stores no more.
    """
    peaks = []
    for kind in profile.kinds:
        plain = Plan(kind=kind.digest, choices=tuple((value.index, RETAIN) for value in kind.activations))
        outcome, (held, _) = run_block(kind, plain), _input_bytes(kind, plain)
        # As large as the gradients of the block's parameters, and the generator's states that replay may draw from.
        parameters = sum(value.nbytes for value in kind.values if value.producer is None and not value.activation)
        # Its input, the gradient of its output, and that of its input.
        sample = 3 * held + parameters
        peaks.append(profile.static_bytes + sample + max(outcome.forward_working_bytes, outcome.working_bytes))
    return {block.name: peaks[block.kind] for block in profile.blocks}


def peaks_with_samples(profile: Profile, policy: Policy) -> dict[str, int]:
    """Most bytes live in a step under `policy` that holds a sample of one block, by the block's name."""
    profile = profile.with_head(policy.head)
    plans = [policy.plan_of(block.name) for block in profile.blocks]
    peaks: dict[str, int] = {}
    """By what runs, in the order of the step."""
    for label, live in simulate(profile, plans).timeline:
        peaks[label] = max(live, peaks.get(label, 0))
    return {
        block.name: _with_sample(peaks, block.name, *_input_bytes(profile.kind_of(block), plan))
        for block, plan in zip(profile.blocks, plans, strict=True)
    }


def _input_bytes(kind: KindProfile, plan: Plan) -> tuple[int, int]:
    """Bytes of a block's own inputs, and of those that it does not keep as they are."""
    choices = dict(plan.choices)
    inputs = [value for value in kind.values if value.producer is None and value.activation]
    kept = [value for value in inputs if value.saved and choices[value.index].action is Action.RETAIN]
    held = sum(value.nbytes for value in inputs)
    return held, held - sum(value.nbytes for value in kept)


def _with_sample(peaks: Mapping[str, int], name: str, held: int, unkept: int) -> int:
    """The peak with a sample of a block, whose inputs take `held` bytes, `unkept` of them on top of what it stores.

    The gradient of its output is as large as its input, to which it is added.
    """
    most = sample = 0
    for label, live in peaks.items():
        if label == f"forward {name}":
            sample = unkept
        is_own = label == f"backward {name}"
        most = max(most, live + (unkept + held if is_own else sample))
        if is_own:
            sample = 2 * held
    return most
