"""Training steps through partitioned graphs that run operator by operator, so that bits can be compared.

Inductor fuses other operators together when a graph is cut elsewhere, and sums come out in another order; the graphs
themselves, run as they are, show what the partitioner alone changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from adacc_hf.torch_glue.memory import backward

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True, kw_only=True)
class GraphStep:
    """What one training step through partitioned graphs gave."""

    loss: Tensor
    gradients: dict[str, Tensor]
    stored_bytes: int
    """Bytes of what forward handed to backward, each storage once, but for inputs that somebody else holds: parameters,
    buffers, and what wants no gradient."""


class _Recorder:
    """A backend that runs graphs as they are, and counts what forward hands over."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._num_outputs: list[int] = []
        self.stored_bytes = 0

    def backend(self) -> Any:
        return aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=lambda module, _: make_boxed_func(module),
            partition_fn=self._cut,
            decompositions=select_decomp_table(),
        )

    def _cut(self, module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        self._num_outputs.append(kwargs["num_fwd_outputs"])
        return self._partition(module, inputs, **kwargs)

    def _forward(self, module: fx.GraphModule, _: Any) -> Any:
        num_outputs = self._num_outputs[-1] if self._num_outputs else None

        def run(*inputs: Any) -> Any:
            results = module(*inputs)
            if num_outputs is not None:
                self.stored_bytes += _new_bytes(results[num_outputs:], inputs)
            return results

        return make_boxed_func(run)


def _new_bytes(stored: Sequence[Any], inputs: Sequence[Any]) -> int:
    """Bytes of the storages of `stored` that no input holds which is state or wants no gradient."""
    elsewhere = {t.untyped_storage()._cdata for t in inputs if isinstance(t, Tensor) and _is_elsewhere(t)}
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in stored if isinstance(t, Tensor)}
    return sum(nbytes for storage, nbytes in sizes.items() if storage not in elsewhere)


def _is_elsewhere(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or not tensor.requires_grad


def graph_step(
    model: nn.Module, batch: dict[str, Tensor], partition: Partition, seed: int = 0, dynamic: bool = False
) -> GraphStep:
    """Compile `model` with `partition` for one training step; its gradients, and what was compiled, are dropped."""
    torch._dynamo.reset()
    recorder = _Recorder(partition)
    torch.manual_seed(seed)
    loss = torch.compile(model, backend=recorder.backend(), dynamic=dynamic)(**batch).loss
    backward(loss)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    return GraphStep(loss=loss.detach(), gradients=gradients, stored_bytes=recorder.stored_bytes)
