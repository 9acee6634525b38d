"""BlockSample: measures the error of a block's gradient under compression, during the run.

In a tracking step, the inputs of one call of a block, the state of the random generators and the gradients of the
outputs are recorded. After the step, the block's traced graph runs forward and backward twice, without and with
compression, and the gradients are compared. No Python code of the block runs again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.errors import UnrecordedCallError
from adacc_hf.artifacts.policy import RETAIN, Plan
from adacc_hf.kernels.codecs import Payload
from adacc_hf.torch_glue.compat import forward_needs_all_ranks
from adacc_hf.torch_glue.memory import is_out_of_memory
from adacc_hf.torch_glue.private import tree_leaves, tree_map
from adacc_hf.torch_glue.rng_state import RandomStates, preserve_random_states
from adacc_hf.torch_glue.second_run import measuring
from adacc_hf.torch_glue.tensors import difference_norm, gradient_leaves, gradients_set_aside, l2_norm

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Policy
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.run.block_executor import BlockExecutor
    from adacc_hf.tape.guards import GraphOfCall

log = logging.getLogger(__name__)


def gradient_error(exact: Iterable[Tensor | None], other: Iterable[Tensor | None]) -> float | None:
    """Return the L2 norm of the difference of two gradients, as vectors of all their tensors, relative to the norm of
    `exact`. Return None if `exact` is zero or not finite, and infinity if only `other` is not finite."""
    pairs = [(e, o) for e, o in zip(exact, other, strict=True) if e is not None and o is not None]
    exact_norm = float(l2_norm([e for e, _ in pairs]))
    if not math.isfinite(exact_norm) or exact_norm == 0:
        return None
    difference = float(difference_norm([e for e, _ in pairs], [o for _, o in pairs]))
    return difference / exact_norm if math.isfinite(difference) else math.inf


class IdentityCodec:
    """A codec that stores a copy, in place of the codec of a value whose effect on the error is left out."""

    name = "uncompressed"
    lossless = True

    def encode(self, tensor: Tensor) -> Payload:
        return Payload((tensor.clone(),), tensor.dtype, tuple(tensor.shape))

    def decode(self, payload: Payload) -> Tensor:
        return payload.tensors[0].clone()


class _RecordedCall:
    """A recorded call of a block: arguments and state for running the call again, and the gradients of its outputs."""

    def __init__(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in [*tree_leaves((args, kwargs)), *block.parameters()] if isinstance(leaf, Tensor)]
        self.device = tensors[0].device
        self.block, self.fn, self.args, self.kwargs = block, fn, _detached_arguments(args), _detached_arguments(kwargs)
        self.random_states = RandomStates([self.device])
        is_autocast = torch.is_autocast_enabled(self.device.type)
        self.autocast_dtype = torch.get_autocast_dtype(self.device.type) if is_autocast else None
        self.gradients: dict[int, Tensor] = {}
        """Gradients of the outputs, by the output's index in `_outputs`."""
        self.graph: GraphOfCall | None = None
        """The traced graph of the call. None if the call cannot be run again."""


class BlockSample:
    """A recorder of the next call of one block. Compares the call's gradient under compression with the exact
    gradient. `warn(text, detail)` logs why a gradient is not compared."""

    def __init__(self, plan: BlockExecutor, warn: Callable[..., None] = log.warning) -> None:
        self.plan, self._warn = plan, warn
        self._call: _RecordedCall | None = None
        self._exact: list[Tensor | None] | None = None
        """Exact gradient of the recorded call, computed by the first `compare`."""
        plan.observer = self

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the block under its plan and return its result. Record the call and its outputs' gradients."""
        plan = self.plan
        plan.observer = None
        call = self._call = _RecordedCall(block, fn, args, kwargs)
        result = plan.run(block, fn, args, kwargs)
        call.graph = plan.latest_graph()
        for index, leaf in enumerate(_outputs(result, (args, kwargs))):
            leaf.register_hook(lambda gradient, index=index: call.gradients.__setitem__(index, gradient.detach()))
        return result

    def close(self) -> None:
        """Stop recording, and free the recorded call and the exact gradient."""
        self.plan.observer = self._call = self._exact = None

    def compare(self, bypassed: Set[int] = frozenset()) -> float | None:
        """Return the error of the block's gradient if the plan's activations are compressed, except the activations
        `bypassed`.

        Return None if the block was not called, got no gradient, or has a forward that needs all ranks. Warn and return
        None if memory runs out, or if no graph with the operators of the call was traced.
        """
        call = self._call
        if call is None or not call.gradients or forward_needs_all_ranks(call.block):
            return None
        self.plan.wrap_codec = lambda value, codec: IdentityCodec() if value in bypassed else codec
        try:
            if self._exact is None:
                self._exact = rerun_gradients(call, lambda graph, *_: graph[0](*graph[1]))
            return gradient_error(self._exact, rerun_gradients(call, partial(self.plan.run_again, call.block)))
        except UnrecordedCallError as error:
            obstacle = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            obstacle = 'there is not enough memory; set tracking="off", or a smaller memory_budget'
        finally:
            self.plan.wrap_codec = None
        self._warn(f"Adacc: the gradient of %s is not compared with the exact one: {obstacle}", self.plan.name)
        return None


def _detached_arguments(tree: Any) -> Any:
    def detach(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return tree_map(detach, tree)


def _outputs(result: Any, arguments: Any) -> list[Tensor]:
    """Return the tensors in the result of a block, or of its graph, that get a gradient and are no arguments."""
    outputs = {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad}
    for leaf in tree_leaves(arguments):
        outputs.pop(id(leaf), None)
    return list(outputs.values())


def rerun_gradients(call: _RecordedCall, run_call: Callable[..., Any]) -> list[Tensor | None]:
    """Run the forward, by `run_call((graph, inputs), args, kwargs)`, and backward of a recorded call's graph, and
    return the gradients of the call's inputs and parameters. `torch.autograd.grad` would miss the gradients of a nested
    backward, which accumulates into `grad`."""
    if call.graph is None:
        raise UnrecordedCallError("Dynamo has traced no graph with the operators of its call")
    args, kwargs = _detached_arguments(call.args), _detached_arguments(call.kwargs)
    fn = partial(call.fn.func, *call.fn.args, **kwargs) if isinstance(call.fn, partial) else call.fn
    parameters = [parameter for parameter in call.block.parameters() if parameter.requires_grad]
    sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    autocast = torch.autocast(call.device.type, dtype=call.autocast_dtype, enabled=call.autocast_dtype is not None)
    with preserve_random_states([call.device]), measuring(), torch.enable_grad():
        call.random_states.restore()
        graph, inputs = call.graph(fn, args)
        inputs = tuple(map(_copy, inputs))  # the call may write to arguments and buffers
        with autocast:
            result = run_call((graph, inputs), args, kwargs)
        outputs = _outputs(result, (args, kwargs))
        outputs = [outputs[index] for index in call.gradients]
        del result
        with gradients_set_aside([*gradient_leaves(outputs), *parameters]):
            try:
                torch.autograd.backward(outputs, list(call.gradients.values()))
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                raise UnrecordedCallError(
                    "the block reads tensors that require a gradient and are not its arguments, and their graph is "
                    'freed after the step; set tracking="off", or pass them as arguments'
                ) from None
            return [leaf.grad for leaf in [*sources, *parameters]]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else value


def check_peaks(profile: Profile, policy: Policy) -> dict[str, int]:
    """Return, for each block by name, the most live bytes of a step under `policy` in which this block is sampled: in
    the step, or while the gradient is compared after it. The block then runs as in plain training."""
    peaks = []
    for kind in profile.kinds:
        plain = Plan(kind=kind.digest, choices=tuple((value.index, RETAIN) for value in kind.activations))
        outcome = run_block(kind, plain)
        sources = [value for value in kind.values if value.producer is None]
        input_bytes = sum(value.nbytes for value in sources if value.activation)
        # The parameters, whose gradients are as large, and the random generator's states for replay.
        parameter_bytes = sum(value.nbytes for value in sources if not value.activation)
        # The sample keeps the block's inputs, which the plan may not retain, and a gradient of its output of equal
        # size. In the comparison, the exact backward runs first, and its gradients are kept during the backward under
        # the policy, which stores no more: those of the inputs, which are copied, and of the parameters.
        sample_bytes = 4 * input_bytes + parameter_bytes
        after = profile.static_bytes + sample_bytes + max(outcome.forward_working_bytes, outcome.working_bytes)
        peaks.append(max(policy.predicted_peak_bytes + 2 * input_bytes, after))
    return {block.name: peaks[block.kind] for block in profile.blocks}
