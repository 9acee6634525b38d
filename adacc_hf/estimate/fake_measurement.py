"""Measurements of a model on fake tensors, in place of the profiler's measurements on a device.

Bytes are counted from the lifetimes of storages. Times and errors are estimated.

- Replay is assumed to be exact only for the operators of torch and of this package. Operators that draw random numbers
  are replayed if their draws can be repeated.
- An operator's time is the time of its operations or of its memory traffic at the device's peak, whichever is longer.
  A codec's time is that of one pass over its input and output.
- A fixed fraction of the channels is assumed to be outliers. Codec errors are measured on normally distributed numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.host_link import HostLink
from adacc_hf.artifacts.kind_profile import CodecOption
from adacc_hf.estimate.devices import Device
from adacc_hf.estimate.fake_backward import FakeBackward
from adacc_hf.estimate.fake_device import DEVICE_QUERY, FakeMemoryMeter
from adacc_hf.head.chunked_loss import at_most_chunks, chunk_rows
from adacc_hf.head.lazy_logits import LossCall
from adacc_hf.kernels.codecs import MASK, Codec, codec_type, get_codec
from adacc_hf.price.codec_gradient_error import GradientErrors
from adacc_hf.price.codec_selection import OUTLIER_SHARE, codec_candidates, make_codec, outlier_codecs
from adacc_hf.price.measurement import Measurement, Prices
from adacc_hf.tape.execution_plan import encode_view
from adacc_hf.tape.operator_effects import DESCRIBED, DeclaredRngUse, operator_argument
from adacc_hf.tape.replay import stand_in, takes_device, view
from adacc_hf.tape.replay_check import obtainable_values
from adacc_hf.tape.tape import Blank, Tape, TapeOperator, TensorRef, map_tensors
from adacc_hf.torch_glue.memory import count_static_bytes
from adacc_hf.torch_glue.meters import MemoryMeter
from adacc_hf.torch_glue.private import (
    GROUPED_PRODUCT,
    UNSAFE_VIEW,
    TorchDispatchMode,
    attention_operator,
    op_name,
    tree_leaves,
    unset_fake_temporarily,
)
from adacc_hf.torch_glue.rng_state import RandomStates
from adacc_hf.torch_glue.tensors import relative_error

NUMBER_BYTES = 16
"""Temporary bytes of a pointwise operator with a Python number as an argument. Torch turns the number into a tensor of
8 bytes, and casts it to the dtype of the other arguments, which takes at most 8 bytes more."""
ENDLESS_BYTES = 2**60
"""Free bytes of host memory that a prediction assumes, larger than any limit on host memory."""
_SAMPLE_SHAPE = (256, 256)
"""Shape of the sample of normally distributed numbers on which codec errors are measured."""


class FakeMeasurement(Measurement):
    """Measurement of a model on fake tensors, with times estimated from the peak rates of `device`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.rng_use = DeclaredRngUse
        self.head_shares = (1, 2)
        self._times = SumOfTimes(device)
        self._ms_at: dict[str, float] = {}
        """Time of the step at the begin of each block's backward."""
        self._backward = FakeBackward()

    def verify(self, tape: Tape, bases: list[torch.Tensor]) -> frozenset[int]:
        available = {
            v.index for v in tape.values if v.source is not None and v.source.place != "unknown" and not v.overwritten
        }
        exact: set[int] = set()
        for operator in tape.operators:
            can_replay = operator.target.namespace in DESCRIBED and operator.may_run_again
            if can_replay and available.issuperset(operator.inputs()):
                exact.update(operator.results())
                available.update(operator.results())
            else:
                available.update(value for value in operator.results() if not tape.values[value].overwritten)
        return obtainable_values(tape, exact, tape.saved_values())

    def outliers(self, tape: Tape, bases: list[torch.Tensor], config: AdaccConfig) -> dict[int, int]:
        if not config.outliers:
            return {}
        channels = {v: encode_view(tape, v).geometry[0][-1] for v in outlier_codecs(tape, config)}
        return {value: math.ceil(OUTLIER_SHARE * number) for value, number in channels.items()}

    def price(self, tape: Tape, bases: list[torch.Tensor], config: AdaccConfig, outliers: dict[int, int]) -> Prices:
        codecs = {
            value: self._options(tape, value, [make_codec(name, outliers.get(value, 0)) for name in names])
            for value, names in codec_candidates(tape, config).items()
        }
        times = [self._operator_ms(operator, bases) for operator in tape.operators]
        workspaces = [_estimated_workspace(operator) for operator in tape.operators]
        return Prices(times, workspaces, codecs)

    def gradient_errors(
        self, tape: Tape, bases: list[torch.Tensor], prices: Prices, config: AdaccConfig
    ) -> GradientErrors:
        return GradientErrors()

    def _operator_ms(self, operator: TapeOperator, bases: list[torch.Tensor]) -> float:
        args, kwargs = map_tensors((operator.args, operator.kwargs), TensorRef, lambda ref: view(bases[ref.value], ref))
        results = [bases[value] for value in operator.results()]
        blanks = [stand_in(blank, blank.device) for blank in operator.blanks()]
        results += [] if takes_device(operator) else blanks  # dropout's result is as large as its input
        remaining_blanks = iter(blanks)
        args, kwargs = map_tensors((args, kwargs), Blank, lambda _: next(remaining_blanks))
        return operator_ms(self.device, operator.target, args, kwargs, results)

    def _options(self, tape: Tape, value: int, codecs: Sequence[Codec]) -> tuple[CodecOption, ...]:
        shape, dtype = encode_view(tape, value).geometry[0], tape.values[value].ref.dtype
        suitable = [
            codec for codec in codecs if codec.supports(shape, dtype) and _is_assumed_to_accept(codec, tape, value)
        ]
        return tuple(self._option(codec, shape, dtype) for codec in suitable)

    def _option(self, codec: Codec, shape: tuple[int, ...], dtype: torch.dtype) -> CodecOption:
        nbytes = codec.predicted_bytes(shape, dtype)
        ms = transfer_ms(self.device, math.prod(shape) * dtype.itemsize + nbytes)
        options = tuple(sorted(codec.options.items()))
        return CodecOption(
            codec=codec.name,
            options=options,
            nbytes=nbytes,
            encode_ms=ms,
            decode_ms=ms,
            error=0.0 if codec.lossless else _codec_error_on_normal(codec.name, options),
            lossless=codec.lossless,
        )

    def head_ms(self, loss: LossCall, compute: Callable[[LossCall], torch.Tensor]) -> float:
        """Return the milliseconds of a head. All chunks from the third on take the same time."""
        times = []
        for limit in (2, 3):
            with at_most_chunks(limit), SumOfTimes(self.device) as clock:
                FakeBackward().run(compute(loss.detached()))
            times.append(clock.total_ms)
        num_rows, width = loss.rows.shape
        return times[1] + max(0.0, num_rows / chunk_rows(width) - 3) * (times[1] - times[0])

    def meter(self, device: torch.device) -> MemoryMeter:
        return FakeMemoryMeter(self._note_mark)

    def _note_mark(self, label: tuple[Any, ...]) -> None:
        if label[0] == "backward":
            self._ms_at.setdefault(label[1], self._times.total_ms)

    @property
    def backward_ms(self) -> dict[str, float]:
        """Milliseconds of each block's backward in the step, up to the next block's. The last block is left out."""
        return {name: end - begin for (name, begin), (_, end) in pairwise(self._ms_at.items())}

    def on_gradient(self, tensor: torch.Tensor, call: Callable[[], None]) -> None:
        self._backward.on_gradient(tensor, call)

    def backward(self, loss: torch.Tensor) -> None:
        with torch.autocast(loss.device.type, enabled=False):
            self._backward.run(loss)

    def clock(self) -> AbstractContextManager[Any]:
        self._times, self._ms_at = SumOfTimes(self.device), {}
        return self._times

    def seconds_at(self, device: torch.device) -> float:
        return self._times.total_ms / 1e3

    def static_bytes(self, model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> int:
        return count_static_bytes(model, batch, optimizer)

    def available_bytes(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
        return self.device.memory_bytes

    def host_link(self, device: torch.device, config: AdaccConfig, model: nn.Module) -> tuple[HostLink | None, int]:
        """Return the cost of storing payloads in host memory, from the device's rates.

        The host is assumed to provide the memory that `config` allows.
        """
        bandwidth = self.device.host_bandwidth_bytes
        if config.host_memory is None or bandwidth is None:
            return None, 0
        bytes_per_ms = bandwidth / 1e3
        link = HostLink(
            to_host_bytes_per_ms=bytes_per_ms, to_device_bytes_per_ms=bytes_per_ms, copy_ms=self.device.launch_ms
        )
        return link, ENDLESS_BYTES

    def random_states(self, devices: Iterable[torch.device]) -> RandomStates:
        return RandomStates([])


class SumOfTimes(TorchDispatchMode):
    """Dispatch mode that adds up the estimated times of all operators called while the mode is active."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.total_ms = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_QUERY:
            return args[0].device
        result = func(*args, **(kwargs or {}))
        self.total_ms += operator_ms(self.device, func, args, kwargs or {}, result)
        return result


def _estimated_workspace(operator: TapeOperator) -> int:
    # Replay of dropout allocates a placeholder of the input, and a result although only the mask is needed.
    blank_bytes = 0 if takes_device(operator) else 2 * sum(blank.nbytes for blank in operator.blanks())
    is_pointwise = torch.Tag.pointwise in getattr(operator.target, "tags", ())
    has_number = any(isinstance(argument, (int, float)) for argument in operator.args)
    return blank_bytes + (NUMBER_BYTES if is_pointwise and has_number else 0)


def _is_assumed_to_accept(codec: Codec, tape: Tape, value: int) -> bool:
    """Return True if the codec is assumed to accept the data of `value`, which a fake tensor does not have. A codec for
    masks needs data with two distinct numbers only. Only booleans and values computed from a Bernoulli sample are
    certain to be such data."""
    if MASK not in codec.suits or tape.values[value].ref.dtype is torch.bool:
        return True
    producer = tape.values[value].producer
    while producer is not None and not tape.operators[producer].random:
        inputs = tape.operators[producer].inputs()
        producer = tape.values[inputs[0]].producer if len(inputs) == 1 else None
    return producer is not None and "bernoulli" in tape.operators[producer].name


@cache
def _codec_error_on_normal(name: str, options: tuple[tuple[str, Any], ...]) -> float:
    """Return the codec's error on normally distributed numbers. For a fake tensor, which has no numbers, this is the
    estimate of the error."""
    with unset_fake_temporarily(), torch.device("cpu"):
        sample = torch.randn(_SAMPLE_SHAPE, generator=torch.Generator("cpu").manual_seed(0))
        codec = get_codec(name, **dict(options) | ({"num_outliers": 0} if codec_type(name).keeps_outliers else {}))
        codec.fit(sample)
        return float(relative_error([sample], [codec.decode(codec.encode(sample))]))


_WITHOUT_KERNEL = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}
_WITHOUT_KERNEL |= {torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided, UNSAFE_VIEW}


# Roofline time of an operator: the lower bound from the device's peak rates, plus the launch.


def operator_ms(device: Device, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> float:
    """Return the milliseconds of one operator on `device`: the launch, and the work at the device's peak rates.

    The work takes max(operations / peak, bytes moved / bandwidth). Tensors among `args`, `kwargs` and `results` may be
    fake or on meta. Views and allocations take no time.
    """
    if target.is_view or target.namespace == "prim" or target.overloadpacket in _WITHOUT_KERNEL:
        return 0.0
    read_kwargs = {name: argument for name, argument in kwargs.items() if name != "out"}  # `out` is only written
    tensors = [*_operand_tensors((args, read_kwargs)), *_operand_tensors(results)]
    memory_ms = 1e3 * sum(map(_touched_bytes, tensors)) / device.bandwidth_bytes
    return max(memory_ms, _product_ms(device, target, args, kwargs, results)) + device.launch_ms


def transfer_ms(device: Device, num_bytes: float) -> float:
    """Return the milliseconds that an operator takes to read or write `num_bytes`, with its launch."""
    return 1e3 * num_bytes / device.bandwidth_bytes + device.launch_ms


def _product_ms(device: Device, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> float:
    """Return the milliseconds of an operator's matrix products at the device's peak rate, or 0 for other operators."""
    is_grouped = target.overloadpacket is GROUPED_PRODUCT
    formula = _grouped_operations if is_grouped else flop_registry.get(_flop_equivalent(target))
    if formula is None:
        return 0.0
    factors = _operand_tensors((args, kwargs))[1 if target.overloadpacket in _MULTIPLY_ADD else 0 :]
    rate = device.flops.get(str(factors[0].dtype).removeprefix("torch."), device.flops["float32"])
    formula_args = [argument for argument in _expand_kv_heads(target, args) if not isinstance(argument, torch.dtype)]
    operations = formula(*formula_args, **kwargs, out_val=results)
    if "scaled_dot_product" in op_name(target):
        # Fused causal kernels skip the scores above the diagonal, except a strip whose share falls with the length.
        operations *= 0.5 if operator_argument(target, args, kwargs, ("is_causal",)) else 1.0
        rate *= device.attention_share
    elif any(map(_is_unaligned, [*factors, *_operand_tensors(results)])):
        rate *= device.unaligned_share
    return 1e3 * operations / rate


def _grouped_operations(first: torch.Tensor, second: torch.Tensor, *_: Any, **__: Any) -> int:
    """Return the number of operations of a grouped matrix product, which torch's FLOP table does not contain. If one
    factor is 2-D, its rows or columns are split into the groups."""
    if first.dim() == 2:
        return 2 * first.numel() * second.shape[-1]
    return 2 * second.numel() * first.shape[-2]


_MULTIPLY_ADD = {torch.ops.aten.addmm, torch.ops.aten.baddbmm}
"""Operators of matrix products that add their first argument to the product. The dtype of this argument may be wider
than that of the factors."""

_ROW_BYTES = 16
"""Bytes that the fast kernels for 16-bit matrices load at once. These kernels need rows that start at multiples of this
number of bytes."""


def _is_unaligned(matrix: torch.Tensor) -> bool:
    """Return True if a fake `matrix` has 16-bit elements, and some rows do not start at multiples of _ROW_BYTES."""
    if matrix.dim() < 2 or matrix.dtype.itemsize != 2:
        return False
    # One of the last two dimensions has a stride of 1. The stride of the other is the length of a row.
    rows = zip(matrix.shape[-2:], matrix.stride()[-2:], strict=True)
    return any(size > 1 and stride != 1 and stride * matrix.dtype.itemsize % _ROW_BYTES for size, stride in rows)


def _flop_equivalent(target: Any) -> Any:
    """Return the operator in torch's FLOP table whose formula applies to `target`. Attention on a CPU, for example,
    uses the formula of flash attention."""
    if target.overloadpacket is attention_operator("cpu"):
        return attention_operator("flash")
    if target.overloadpacket is attention_operator("cpu_backward"):
        return attention_operator("flash_backward")
    return target.overloadpacket


def _expand_kv_heads(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `args` of fused attention, with keys and values expanded to one head per query head. The operation counts
    are the same, and torch before 2.13 cannot count attention with fewer key heads than query heads."""
    if "scaled_dot_product" not in op_name(target):
        return args
    first = 1 if op_name(target).endswith("backward") else 0  # the output's gradient precedes the queries
    query, key, value = args[first : first + 3]
    heads = [tensor[:, :1].expand(-1, query.shape[1], -1, -1) for tensor in (key, value)]
    return (*args[: first + 1], *heads, *args[first + 3 :])


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the distinct elements of a fake `tensor`. Elements repeated by a stride of 0 count once."""
    lengths = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(lengths) * tensor.dtype.itemsize if tensor.numel() else 0


def _operand_tensors(tree: Any) -> Sequence[torch.Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
