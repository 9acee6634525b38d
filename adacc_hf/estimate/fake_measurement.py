"""Readings from tensors without memory: lives of storages are counted, all that needs data or a device is assumed.

- Replay is taken to be exact for torch's own operators and ours, and for no others (R7); what they draw is drawn again
  where rule R5 allows it.
- Times are the roofline's, those of codecs too: one read and one write of what goes in and out.
- A share of the channels is taken for outliers, and codec errors are those on normally distributed numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.profile import CodecOption
from adacc_hf.estimate.devices import Device
from adacc_hf.estimate.fake_backward import FakeBackward
from adacc_hf.estimate.fake_device import FakeMemoryMeter
from adacc_hf.head.chunked_loss import at_most_chunks
from adacc_hf.head.lazy_logits import LossCall
from adacc_hf.kernels.codecs import MASK, Codec, codec_type, get_codec
from adacc_hf.price.codec_gradient_error import GradientErrors
from adacc_hf.price.codec_selection import (
    OUTLIER_SHARE,
    assumed_outliers,
    candidates,
    make_codec,
    with_outlier_codec,
)
from adacc_hf.price.cost_model import Prices
from adacc_hf.price.measurement import Measurement, on_leaves
from adacc_hf.tape.execution_plan import encode_view
from adacc_hf.tape.recorder import RngUse
from adacc_hf.tape.replay import stand_in, takes_device, view
from adacc_hf.tape.replay_check import obtainable
from adacc_hf.tape.tape import Blank, Tape, TapeOperator, TensorRef, map_tensors
from adacc_hf.torch_glue.memory import MemoryMeter, count_static_bytes, forward_loss
from adacc_hf.torch_glue.private import (
    TorchDispatchMode,
    attention_operator,
    op_name,
    schema_of,
    tree_leaves,
    unset_fake_temporarily,
)
from adacc_hf.torch_glue.rng_state import RandomStates
from adacc_hf.torch_glue.tensors import relative_error

NUMBER_BYTES = 16
"""A Python number among a pointwise operator's arguments is a tensor while it runs, in 8 bytes, and cast to the others'
dtype, in 8 at most."""
_SAMPLE = (256, 256)
"""Shape of the numbers that codec errors are taken on."""


KNOWN = ("aten", "adacc_hf")
"""Namespaces of operators of which it is known whether they draw random numbers: torch's, and CompAct's projection."""


class FakeMeasurement(Measurement):
    """Readings from tensors without memory, for `device`."""

    records_other_sizes = False
    watches_one_block = False

    def __init__(self, device: Device, outlier_share: float = OUTLIER_SHARE) -> None:
        self.device = device
        self.outlier_share = outlier_share
        self.rng_use = FakeRngUse
        self._backward = FakeBackward()

    def verify(self, tape: Tape, bases: list[torch.Tensor]) -> frozenset[int]:
        at_hand = {v.index for v in tape.values if v.source is not None and _is_external(v.source.place, v.overwritten)}
        good: set[int] = set()
        for operator in tape.operators:
            is_ready = operator.target.namespace in KNOWN and operator.may_run_again
            if is_ready and at_hand.issuperset(operator.inputs()):
                good.update(operator.made())
                at_hand.update(operator.made())
            else:
                at_hand.update(value for value in operator.made() if not tape.values[value].overwritten)
        return obtainable(tape, good, tape.saved_values())

    def outliers(self, tape: Tape, bases: list[torch.Tensor], config: AdaccConfig) -> dict[int, int]:
        channels = {v: encode_view(tape, v).geometry[0][-1] for v in with_outlier_codec(tape, config)}
        return {value: assumed_outliers(number, config, self.outlier_share) for value, number in channels.items()}

    def price(
        self,
        tape: Tape,
        bases: list[torch.Tensor],
        config: AdaccConfig,
        outliers: dict[int, int],
        run_block: Callable[[], object] | None = None,
    ) -> Prices:
        codecs = {
            value: self._options(tape, value, [make_codec(name, config, outliers.get(value, 0)) for name in names])
            for value, names in candidates(tape, config).items()
        }
        times = [self._operator_ms(operator, bases) for operator in tape.operators]
        workspaces = [_workspace(operator) for operator in tape.operators]
        return Prices(times, workspaces, codecs)

    def gradient_errors(
        self, tape: Tape, bases: list[torch.Tensor], prices: Prices, config: AdaccConfig
    ) -> GradientErrors:
        return GradientErrors()

    def _operator_ms(self, operator: TapeOperator, bases: list[torch.Tensor]) -> float:
        args, kwargs = map_tensors((operator.args, operator.kwargs), TensorRef, lambda ref: view(bases[ref.value], ref))
        results = [bases[value] for value in operator.made()]
        blanks = [stand_in(blank, blank.device) for blank in operator.blanks()]
        results += [] if takes_device(operator) else blanks  # dropout's result, which is as large as its input
        given = iter(blanks)
        args, kwargs = map_tensors((args, kwargs), Blank, lambda _: next(given))
        return operator_ms(self.device, operator.target, args, kwargs, results)

    def _options(self, tape: Tape, value: int, codecs: Sequence[Codec]) -> tuple[CodecOption, ...]:
        shape, dtype = encode_view(tape, value).geometry[0], tape.values[value].ref.dtype
        suited = [codec for codec in codecs if codec.supports(shape, dtype) and _accepts(codec, tape, value)]
        return tuple(self._option(codec, shape, dtype) for codec in suited)

    def _option(self, codec: Codec, shape: tuple[int, ...], dtype: torch.dtype) -> CodecOption:
        nbytes = codec.predicted_bytes(shape, dtype)
        ms = moved_ms(self.device, math.prod(shape) * dtype.itemsize + nbytes)
        options = tuple(sorted(codec.options.items()))
        return CodecOption(
            codec=codec.name,
            options=options,
            nbytes=nbytes,
            encode_ms=ms,
            decode_ms=ms,
            error=0.0 if codec.lossless else _error_on_normal(codec.name, options),
            lossless=codec.lossless,
        )

    def head_ms(self, loss: LossCall, compute: Callable[[LossCall], torch.Tensor]) -> float:
        with at_most_chunks(None), _SumOfTimes(self.device) as times:
            FakeBackward().run(compute(on_leaves(loss)))
        return times.total_ms

    def meter(self, device: torch.device) -> MemoryMeter:
        return FakeMemoryMeter()

    def on_gradient(self, tensor: torch.Tensor, call: Callable[[], None]) -> None:
        self._backward.on_gradient(tensor, call)

    def backward(self, loss: torch.Tensor) -> None:
        with torch.autocast(loss.device.type, enabled=False):
            self._backward.run(loss)

    def seconds_at(self, device: torch.device) -> float:
        return 0.0  # nothing runs

    def step_ms(self, model: nn.Module, batch: Mapping[str, Any], measured_ms: float) -> float:
        with at_most_chunks(None), _SumOfTimes(self.device) as times:
            self.backward(forward_loss(model, batch))
        model.zero_grad(set_to_none=True)
        return times.total_ms

    def static_bytes(self, model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> int:
        return count_static_bytes(model, batch, optimizer)

    def available_bytes(self, device: torch.device, static_bytes: int) -> int:
        return self.device.memory_bytes

    def random_states(self, devices: Iterable[torch.device]) -> RandomStates:
        return RandomStates([])


class FakeMemoryMeasurement(FakeMeasurement):
    """The same without the times of the step and of the heads, on which no peak depends."""

    def head_times(self, find_losses: Callable[[], list[LossCall]]) -> dict[str, float]:
        return {"plain": 0.0, "chunked": 0.0}

    def step_ms(self, model: nn.Module, batch: Mapping[str, Any], measured_ms: float) -> float:
        return 0.0


class FakeRngUse(RngUse):
    """Whether an operator draws random numbers, by its tag and its probability: no generator moves on fake tensors."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        may_draw = torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in KNOWN
        self._draws = may_draw and _argument(func, args, kwargs, _PROBABILITIES) != 0

    def happened(self) -> bool:
        return self._draws


class _SumOfTimes(TorchDispatchMode):
    """Adds up the roofline times of all operators."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.total_ms = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total_ms += operator_ms(self.device, func, args, kwargs or {}, result)
        return result


def _workspace(operator: TapeOperator) -> int:
    """Bytes that a run of it takes besides its results."""
    # Of dropout, what stands for its input, and its result, which replay makes of the mask.
    blanks = 0 if takes_device(operator) else 2 * sum(blank.nbytes for blank in operator.blanks())
    return blanks + (NUMBER_BYTES if _reads_number(operator) else 0)


def _reads_number(operator: TapeOperator) -> bool:
    is_pointwise = torch.Tag.pointwise in getattr(operator.target, "tags", ())
    return is_pointwise and any(isinstance(argument, (int, float)) for argument in operator.args)


def _is_external(place: str, overwritten: bool) -> bool:
    return place != "unknown" and not overwritten


_PROBABILITIES = ("dropout_p", "p")
"""Names of the argument that says how much is dropped."""


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The argument of `func` that has one of `names`, or None."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name in names:
            return args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
    return None


def _accepts(codec: Codec, tape: Tape, value: int) -> bool:
    """Whether the codec may be taken to accept the data: bits only where there are two values by construction."""
    if MASK not in codec.suits or tape.values[value].ref.dtype is torch.bool:
        return True
    producer = tape.values[value].producer
    while producer is not None and not tape.operators[producer].random:
        inputs = tape.operators[producer].inputs()
        producer = tape.values[inputs[0]].producer if len(inputs) == 1 else None
    return producer is not None and "bernoulli" in tape.operators[producer].name


@cache
def _error_on_normal(name: str, options: tuple[tuple[str, Any], ...]) -> float:
    with unset_fake_temporarily(), torch.device("cpu"):
        numbers = torch.randn(_SAMPLE, generator=torch.Generator("cpu").manual_seed(0))
        codec = get_codec(name, **dict(options) | ({"num_outliers": 0} if codec_type(name).keeps_outliers else {}))
        codec.fit(numbers)
        return float(relative_error([numbers], [codec.decode(codec.encode(numbers))]))


_ALLOCATE = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}
_ALLOCATE |= {torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided}


# The time of an operator that was never run: what the device's peaks allow, plus its launch.


def operator_ms(device: Device, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> float:
    """Milliseconds of one operator: max(operations / peak, bytes moved / bandwidth) + launch.

    Tensors among `args`, `kwargs` and `results` may be fake or on meta. A view takes no time, nor does new memory.
    """
    # Torch asks each fake tensor for its device by an operator, prim::device, more often than it computes.
    if target.is_view or target.namespace == "prim" or target.overloadpacket in _ALLOCATE:
        return 0.0
    read = {name: argument for name, argument in kwargs.items() if name != "out"}  # that is the result, written alone
    given, made = _tensors((args, read)), _tensors(results)
    moved_ms = 1e3 * sum(map(_touched_bytes, [*given, *made])) / device.bandwidth_bytes
    return max(moved_ms, _product_ms(device, target, args, kwargs, results)) + device.launch_ms


def moved_ms(device: Device, num_bytes: float) -> float:
    """Milliseconds to read or write `num_bytes` in one launch."""
    return 1e3 * num_bytes / device.bandwidth_bytes + device.launch_ms


def _product_ms(device: Device, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> float:
    formula = flop_registry.get(_counted_as(target))
    if formula is None:
        return 0.0
    factors = _tensors((args, kwargs))[1 if target.overloadpacket in _ADDING else 0 :]
    rate = device.flops.get(str(factors[0].dtype).removeprefix("torch."), device.flops["float32"])
    counted = [argument for argument in _with_all_heads(target, args) if not isinstance(argument, torch.dtype)]
    operations = formula(*counted, **kwargs, out_val=results)
    if "scaled_dot_product" in op_name(target):
        # Fused kernels leave out what lies above the diagonal, but for a strip that shrinks with the length.
        operations *= 0.5 if _argument(target, args, kwargs, ("is_causal",)) else 1.0
        rate *= device.attention_share
    elif any(map(_is_unaligned, [*factors, *_tensors(results)])):
        rate *= device.unaligned_share
    return 1e3 * operations / rate


_ADDING = {torch.ops.aten.addmm, torch.ops.aten.baddbmm}
"""Products whose first argument is what they are added to, perhaps in a wider dtype."""

_ROW_BYTES = 16
"""Tensor cores of 16-bit numbers are fed by kernels that load as many bytes at once."""


def _is_unaligned(matrix: torch.Tensor) -> bool:
    """Return True if some rows of the 16-bit matrix start between multiples of _ROW_BYTES."""
    if matrix.dim() < 2 or matrix.dtype.itemsize != 2:
        return False
    # Of the last two dimensions one has a stride of 1, and the stride of the other is the length of a row.
    rows = zip(matrix.shape[-2:], matrix.stride()[-2:], strict=True)
    return any(size > 1 and stride != 1 and stride * matrix.dtype.itemsize % _ROW_BYTES for size, stride in rows)


def _counted_as(target: Any) -> Any:
    """The operator whose count of operations stands for that of `target`."""
    if target.overloadpacket is attention_operator("cpu"):
        return attention_operator("flash")
    if target.overloadpacket is attention_operator("cpu_backward"):
        return attention_operator("flash_backward")
    return target.overloadpacket


def _with_all_heads(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args`; for fused attention with a head of keys and values for every head of queries, as the kernels work.

    torch before 2.13 cannot count the operations of fewer.
    """
    if "scaled_dot_product" not in op_name(target):
        return args
    first = 1 if op_name(target).endswith("backward") else 0  # the gradient comes before the queries
    query, key, value = args[first : first + 3]
    heads = [tensor[:, :1].expand(-1, query.shape[1], -1, -1) for tensor in (key, value)]
    return (*args[: first + 1], *heads, *args[first + 3 :])


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of `tensor`; one that is repeated by a stride of 0 is read once."""
    lengths = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(lengths) * tensor.dtype.itemsize if tensor.numel() else 0


def _tensors(tree: Any) -> Sequence[torch.Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
