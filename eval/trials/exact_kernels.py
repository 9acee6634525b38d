"""Whether a kernel gives the bits of an operator, and how far off it is if not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from adacc_hf.eval.trials.chain_kernel import Kernel, compile_chain
from adacc_hf.eval.trials.pointwise_chains import Chain
from adacc_hf.tape.replay import ReplayStep
from adacc_hf.tape.tape import Tape, TapeOperator, TensorRef, map_tensors, tensor_refs
from adacc_hf.torch_glue.tensors import copy_with_storage, difference_norm, l2_norm

NUM_TRIED = 2**20
"""Numbers that an operator is tried on."""
LENGTHS = (NUM_TRIED, *range(2, 130))
"""Lengths of the tensors that hold them. An operator may compute what does not fill a vector by another function."""
STRIDES = (1, 2)
"""Elements from one number to the next. Likewise an operator may take another function where they are not dense."""

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def differing(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The elements whose bits differ, as booleans. All NaNs count as equal: an operator may give any of them."""
    bits = _BITS[own.dtype.itemsize]
    found = own.contiguous().view(bits) != other.contiguous().view(bits)
    return found & ~(own.isnan() & other.isnan()) if own.is_floating_point() else found


def compare(made: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Share of differing elements, greatest difference, and relative L2 error of what a kernel made."""
    assert all(m.dtype is e.dtype and m.shape == e.shape for m, e in zip(made, expected, strict=True))
    num_differing = sum(int(differing(m, e).sum()) for m, e in zip(made, expected, strict=True))
    lies_alike = all(m.stride() == e.stride() for m, e in zip(made, expected, strict=True))
    pairs = [_finite(m.double(), e.double()) for m, e in zip(made, expected, strict=True)]
    gaps = [(m - e).abs() for m, e in pairs]
    length = float(l2_norm([e for _, e in pairs]))
    off = float(difference_norm([m for m, _ in pairs], [e for _, e in pairs]))
    return {
        "differing": num_differing / max(1, sum(e.numel() for e in expected)),
        "greatest": max((float(gap.max()) for gap in gaps if gap.numel()), default=0.0),
        "relative_error": off / length if length else 0.0,
        "lies_alike": lies_alike,
    }


def _finite(made: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, with 0 where either is no finite number."""
    is_finite = made.isfinite() & expected.isfinite()
    return made.where(is_finite, 0.0), expected.where(is_finite, 0.0)


class ExactOperators:
    """Finds the operators of which a kernel of their own gives the same bits, on numbers of every size."""

    def __init__(self, seed: int) -> None:
        self.shares: dict[str, float] = {}
        """Of each operator that was tried: the share of numbers for which the bits differ."""
        self._generator = torch.Generator().manual_seed(seed)

    def has(self, operator: TapeOperator, tape: Tape) -> bool:
        name = _operator_name(operator)
        if name not in self.shares:
            self.shares[name] = self._share(operator, tape)
        return self.shares[name] == 0.0

    def _share(self, operator: TapeOperator, tape: Tape) -> float:
        """The share of numbers for which a kernel of the operator alone gives other bits."""
        refs = tuple(dict.fromkeys(tensor_refs((operator.args, operator.kwargs))))
        chain = Chain((ReplayStep(operator, tape),), refs, (operator.made()[0],))
        with_all_bits = tape.values[operator.made()[0]].ref.dtype.is_floating_point
        num_differing = num_tried = 0
        for stride in STRIDES:
            numbers = [
                self._numbers(ref, stride * NUM_TRIED, with_all_bits).to(tape.values[ref.value].device) for ref in refs
            ]
            kernel = compile_chain(chain, [_first(tensor, NUM_TRIED, stride) for tensor in numbers])
            for length in LENGTHS:
                tensors = [_first(tensor, length, stride) for tensor in numbers]
                found = _differing_results(kernel, operator, refs, tensors)
                num_differing += int(found.sum())
                num_tried += found.numel()
        return num_differing / num_tried

    def _numbers(self, ref: TensorRef, length: int, with_all_bits: bool) -> torch.Tensor:
        """Numbers about 1, about 100, and of all magnitudes if `with_all_bits`; one number for a tensor of one."""
        if not ref.geometry[0]:
            return torch.ones((), dtype=ref.dtype)
        pick = partial(torch.randint, size=(length,), generator=self._generator)
        if not ref.dtype.is_floating_point:
            return pick(0, 2).bool() if ref.dtype is torch.bool else pick(-1000, 1000).to(ref.dtype)
        normal = torch.randn(length, generator=self._generator).to(ref.dtype)
        bits = _BITS[ref.dtype.itemsize]
        any_bits = pick(torch.iinfo(bits).min, torch.iinfo(bits).max).to(bits).view(ref.dtype)
        kind = pick(0, 3 if with_all_bits else 2)
        return torch.where(kind == 0, normal, torch.where(kind == 1, 100 * normal, any_bits))


def _first(tensor: torch.Tensor, length: int, stride: int) -> torch.Tensor:
    """The first `length` elements of those that are `stride` apart."""
    return tensor[: length * stride : stride] if tensor.dim() else tensor


def _differing_results(
    kernel: Kernel, operator: TapeOperator, refs: Sequence[TensorRef], tensors: list[torch.Tensor]
) -> torch.Tensor:
    copies = [copy_with_storage(tensor) if operator.mutations else tensor for tensor in tensors]
    at = dict(zip(refs, copies, strict=True))
    args, kwargs = map_tensors((operator.args, operator.kwargs), TensorRef, at.__getitem__)
    expected = operator.target(*args, **kwargs)
    (made,) = kernel(list(tensors))
    return differing(made, expected)


def _operator_name(operator: TapeOperator) -> str:
    """The operator with its constants, and the dtypes of its tensors; those of one number are set apart."""

    def described(ref: TensorRef) -> str:
        dtype = str(ref.dtype).removeprefix("torch.")
        return dtype if ref.geometry[0] else f"one {dtype}"

    args, kwargs = map_tensors((operator.args, operator.kwargs), TensorRef, described)
    given = [str(arg) for arg in args] + [f"{name}={value}" for name, value in kwargs.items()]
    return f"{operator.name.removeprefix('aten.')}({', '.join(given)})"
