"""One kernel for a chain of pointwise operators, made by Inductor with eager's rounding, for all sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from adacc_hf.eval.trials.pointwise_chains import Chain
from adacc_hf.tape.tape import TapeOperator, TensorRef, map_tensors

EAGER_ROUNDING = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.use_pytorch_libdevice": True,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.use_decompose_tanh": False,
    "fx_graph_cache": False,
}
"""Inductor's settings under which the result of each operator is rounded as if it ran alone. Its cache of graphs would
take one that was traced without rounding for one with it."""

Kernel = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class ChainKernels:
    """The kernels of chains, one for all chains of the same operators."""

    def __init__(self) -> None:
        self._kernels: dict[str, tuple[Kernel, float]] = {}

    def of(self, chain: Chain, examples: Sequence[torch.Tensor]) -> tuple[Kernel, float]:
        """The kernel of `chain`, and the seconds that it took to compile."""
        name = _signature(chain)
        if name not in self._kernels:
            started = time.perf_counter()
            kernel = compile_chain(chain, examples)
            kernel(list(examples))  # C++ is compiled at the first call
            self._kernels[name] = kernel, time.perf_counter() - started
        return self._kernels[name]


def compile_chain(chain: Chain, examples: Sequence[torch.Tensor]) -> Kernel:
    """Compile the chain for tensors of any size that lie as `examples` do. Sizes of 1 stay 1.

    The kernel takes a list, which it empties, of the chain's inputs, and returns its outputs.
    """
    # Imported here: Inductor takes seconds to import, and warns.
    from torch._guards import TracingContext, tracing
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    def all_sizes(example: torch.Tensor) -> StatelessSymbolicContext[Any, Any]:
        sizes = [DimDynamic.STATIC if size in (0, 1) else DimDynamic.DUCK for size in example.shape]
        return StatelessSymbolicContext(dynamic_sizes=sizes)

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(example, symbolic_context=all_sizes(example)) for example in examples]
    # Eager's rounding is noted while the chain is traced.
    with inductor_config.patch(EAGER_ROUNDING), torch.no_grad():
        with mode:
            graph = make_fx(chain_function(chain), decomposition_table=select_decomp_table())(*fakes)
        with tracing(TracingContext(mode)):
            return compile_fx_inner(graph, fakes)


def chain_function(chain: Chain) -> Callable[..., list[torch.Tensor]]:
    """The chain as a function of its input tensors that returns its outputs."""

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        inputs = dict(zip(chain.inputs, tensors, strict=True))
        made: dict[int, torch.Tensor] = {}

        def tensor_of(ref: TensorRef) -> torch.Tensor:
            return inputs[ref] if ref in inputs else made[ref.value]

        for operator in chain.operators:
            args, kwargs = map_tensors((operator.args, operator.kwargs), TensorRef, tensor_of)
            made[operator.made()[0]] = _call_functional(operator, args, kwargs)
        return [made[value] for value in chain.outputs]

    return run


def _call_functional(operator: TapeOperator, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Call an operator, on a copy if it works in place.

    A third power is the two products that eager's kernel computes, each of which it rounds in 16 bits.
    """
    if operator.target is torch.ops.aten.pow.Tensor_Scalar and args[1] == 3:
        return torch.ops.aten.mul.Tensor(torch.ops.aten.mul.Tensor(args[0], args[0]), args[0])
    if operator.mutations:
        copied = torch.ops.aten.clone.default(args[0])
        functional = getattr(torch.ops.aten, operator.short_name)
        made = getattr(functional, operator.target._overloadname)(copied, *args[1:], **kwargs)
        return made if made.dtype is copied.dtype else made.to(copied.dtype)
    result: torch.Tensor = operator.target(*args, **kwargs)
    return result


def _signature(chain: Chain) -> str:
    """A name that is equal for chains that do the same to tensors of the same sizes."""
    numbers: dict[int, int] = {}

    def renamed(ref: TensorRef) -> tuple[Any, ...]:
        size, stride, _ = ref.geometry
        return numbers.setdefault(ref.value, len(numbers)), size, stride, ref.dtype

    parts: list[Any] = [renamed(ref) for ref in chain.inputs]
    for operator in chain.operators:
        call = map_tensors((operator.args, operator.kwargs), TensorRef, renamed)
        parts.append((operator.name, call, numbers.setdefault(operator.made()[0], len(numbers))))
    return repr((parts, [numbers[value] for value in chain.outputs]))
