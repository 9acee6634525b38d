"""Verification of replay: the search for values that replay recomputes bit for bit, and for equal values.

In training, replay recomputes only values that passed this verification (rule R7).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from adacc_hf.tape.replay import Environment, ReplayStep, view
from adacc_hf.tape.tape import Tape, TapeOperator, TensorRef, geometry_of, map_tensors
from adacc_hf.torch_glue.second_run import checksum
from adacc_hf.torch_glue.tensors import bytes_in_order, copy_with_storage, storage_bytes


def verify(tape: Tape, bases: list[torch.Tensor]) -> frozenset[int]:
    """Replay the whole tape, and return the values for which replay gave the recorded bits. `bases` contains the
    recorded tensors, indexed by value.

    If replay of a value gives different bits, the next operators read the recorded tensor in its place. If the recorded
    tensor is freed or overwritten, this is impossible, and the values that depend on it are not recomputable.

    Of an overwritten value, only the parts that autograd saved can be compared. If autograd saved no part, only the
    values computed from it are compared.
    """
    return exactly_replayed_values(tape, tape.operators, bases, 0, tape.saved_values())


def exactly_replayed_values(
    tape: Tape, operators: Sequence[TapeOperator], bases: list[torch.Tensor], num_outer: int, stored: Iterable[int]
) -> frozenset[int]:
    """Replay the given `operators` of a tape, and return the values that these operators recompute bit for bit, if the
    values `stored` are stored.

    The inputs of `operators` are the first `num_outer` values, and the values that no operator computes. `bases`
    contains the recorded tensors, indexed by value.
    """
    environment: Environment = [None] * len(tape.values)
    for value in dict.fromkeys(value for operator in operators for value in operator.inputs()):
        place = tape.values[value].place
        is_outer = place != "unknown" and (value < num_outer or place is not None)
        if is_outer and not _is_gone(tape, value):
            environment[value] = bases[value]
    exact_values: set[int] = set()
    last_reader = {tape_value.index: max(tape.consumers(tape_value.index), default=-1) for tape_value in tape.values}
    for operator in operators:
        _verify_operator(tape, operator, bases, environment, exact_values)
        for value in [*operator.inputs(), *operator.results()]:
            if last_reader[value] <= operator.index:
                environment[value] = None
    return obtainable_values(replace(tape, operators=list(operators)), exact_values, stored)


def _verify_operator(
    tape: Tape, operator: TapeOperator, bases: list[torch.Tensor], environment: Environment, exact_values: set[int]
) -> None:
    """Replay one operator, and add each value with the recorded bits to `exact_values`."""
    is_ready = operator.may_run_again and not _is_timed_by_thread(tape, operator)
    is_ready = is_ready and all(environment[value] is not None for value in operator.inputs())
    if is_ready:
        is_ready = _runs_without_hidden_writes(tape, operator, environment)
    if operator.allocates:
        _invert_bits(operator, bases, environment)
    # Without gradients, an LSTM on a CPU omits the tensors for its backward, and runs another kernel.
    is_ready = is_ready and all(environment[value] is not None for value in operator.results())
    for value in operator.results():
        replayed = environment[value]
        if is_ready and replayed is not None and _has_recorded_bits(tape, value, replayed, bases[value]):
            exact_values.add(value)
            if tape.values[value].is_encodable and value not in tape.checksums:  # all was compared: free the duplicate
                environment[value] = bases[value]
        else:
            environment[value] = None if _is_gone(tape, value) else bases[value]


def _is_gone(tape: Tape, value: int) -> bool:
    """Return True if the recorded tensor of a value is overwritten or freed."""
    return tape.values[value].overwritten or value in tape.checksums


def _invert_bits(operator: TapeOperator, bases: list[torch.Tensor], environment: Environment) -> None:
    """Fill memory that `operator` allocated in replay with inverted bits, which are not equal by chance."""
    for _, value in operator.outputs:
        replayed = environment[value]
        if replayed is None or replayed.untyped_storage().nbytes() != bases[value].untyped_storage().nbytes():
            continue
        torch.bitwise_not(storage_bytes(bases[value]), out=storage_bytes(replayed))


def _is_timed_by_thread(tape: Tape, operator: TapeOperator) -> bool:
    """Return True if cuDNN selects the operator's kernel by a benchmark whose result is cached per thread.

    cuDNN selects kernels of convolutions by a benchmark if `torch.backends.cudnn.benchmark` is on
    (aten/src/ATen/native/cudnn/Conv_v8.cpp: `thread_local benchmark_cache`). Backward's thread may then select a kernel
    that differs from the one in the thread that compares replay.

    No other cause of different bits in backward's thread is known. torch transfers the thread-local state and the
    stream to backward's thread (ATen/ThreadLocalState.h; torch/csrc/autograd/engine.cpp, `Engine::thread_main`). TF32,
    deterministic algorithms and similar settings are global (ATen/Context.h).
    """
    if not torch.backends.cudnn.benchmark or "convolution" not in operator.short_name:
        return False
    return any(tape.values[value].device.type == "cuda" for value in operator.results())


def _has_recorded_bits(tape: Tape, value: int, replayed: torch.Tensor, recorded: torch.Tensor) -> bool:
    """Return True if `replayed` has the bits of `recorded`, or of its checksum, if `recorded` is freed. If a later
    operator overwrote the value, as in fused GRU cells, only the parts that autograd saved are compared."""
    if not tape.values[value].overwritten and value in tape.checksums:
        is_like = (geometry_of(replayed), replayed.dtype) == (tape.values[value].ref.geometry, recorded.dtype)
        return is_like and bool(checksum(replayed) == tape.checksums[value])
    if not tape.values[value].overwritten:
        return same_bits(replayed, recorded)
    saved = [slot for slot in tape.slots if slot.value == value]
    return all(same_bits(view(replayed, slot), view(recorded, slot)) for slot in saved)


def _runs_without_hidden_writes(tape: Tape, operator: TapeOperator, environment: Environment) -> bool:
    """Replay one operator on copies, and return True if it wrote only to arguments that its schema declares as mutable.
    Of torch's own operators, only batch normalization makes other writes, to buffers."""
    declared = {old for old, _ in operator.mutations}
    inputs = [value for value in operator.inputs() if value not in declared]
    if operator.target.namespace == "aten":
        inputs = [value for value in inputs if tape.values[value].place == "buffer"]
    originals = {value: tensor for value in inputs if (tensor := environment[value]) is not None}
    copies = {value: copy_with_storage(original) for value, original in originals.items()}
    for value, copy in copies.items():
        environment[value] = copy
    is_honest = _can_replay(operator, tape, environment)
    is_honest = is_honest and all(same_bits(copies[value], original) for value, original in originals.items())
    for value, original in originals.items():
        environment[value] = original
    return is_honest


def _can_replay(operator: TapeOperator, tape: Tape, environment: Environment) -> bool:
    """Replay one operator and return True. Return False if it is an `autograd.Function` whose second run raises."""
    try:
        ReplayStep(operator, tape).run(environment)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the user's code may raise anything
        if not operator.is_function:
            raise
        return False
    return True


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors, such as a recorded tensor and its replay, have the same dtype, layout and bits."""
    if first.dtype is not second.dtype or first.shape != second.shape or first.stride() != second.stride():
        return False
    if first.numel() == 0:
        return True
    bits = [bytes_in_order(tensor) for tensor in (first, second)]
    # Comparing tensors on a GPU stores a boolean for each element, so that elements of eight bytes take less memory.
    if not any(each.numel() % 8 or each.storage_offset() % 8 for each in bits):
        bits = [each.view(torch.int64) for each in bits]
    return torch.equal(*bits)


def is_reproducible(tape: Tape) -> bool:
    """Return True if every operator on the tape gave the recorded bits again for the same inputs.

    Random operators count as reproducible, because torch's checkpoint restores the generators. A block is not
    reproducible if it reads a tensor of unknown source or overwrites one of its inputs.
    """
    reads_unknown = any(value.place == "unknown" for value in tape.values)
    overwrites = any(value.overwritten and tape.is_block_input(value.index) for value in tape.values)
    operators = (operator for operator in tape.operators if not operator.random)
    return not reads_unknown and not overwrites and all(tape.verified.issuperset(op.results()) for op in operators)


def obtainable_values(tape: Tape, exact_values: Collection[int], stored: Iterable[int]) -> frozenset[int]:
    """Return those of `exact_values` that replay can compute from existing tensors and from `stored`."""
    saved = set(stored)
    recomputable: set[int] = set()

    def is_obtainable(value: int) -> bool:
        tape_value = tape.values[value]
        exists = tape_value.place != "unknown" if tape_value.source is not None else value in saved
        return (exists and not tape_value.overwritten) or value in recomputable

    for operator in tape.operators:
        if operator.may_run_again and all(map(is_obtainable, operator.inputs())):
            recomputable.update(value for value in operator.results() if value in exact_values)
    return frozenset(recomputable)


# Equal values: results of the same operator on the same input, so one storage can serve them all.
#
# Under autocast, q, k and v each save a cast of one tensor, in three storages. If a plan keeps one cast and recomputes
# the other two, all three slots read the kept cast. No operator runs, and two storages are freed.


def equal_values(tape: Tape, recomputable: Collection[int]) -> dict[int, int]:
    """Return a dict from each value that duplicates another to the first saved value with the same bits.

    Two values have the same bits if the same operator computed both from the same arguments. Both must also have the
    same layout, be in `recomputable`, so that they depend only on the arguments, and never be changed in place.

    The saved value must come before the duplicate on the tape. Autograd must also have saved it first, because the
    first saved tensor decides which storage is kept.
    """
    producers: dict[Any, TapeOperator] = {}
    first: dict[int, int] = {}
    """First value with the same bits, by duplicate value."""
    for operator in tape.operators:
        may_repeat = operator.may_run_again and not operator.random and not operator.mutations
        results = operator.results()
        if not may_repeat or not all(v in recomputable and not tape.values[v].overwritten for v in results):
            continue
        key = operator.target, repr(_with_equal_values((operator.args, operator.kwargs), first))
        producer = producers.setdefault(key, operator)
        if producer is not operator and _have_equal_layouts(tape, producer, operator):
            pairs = zip(operator.outputs, producer.outputs, strict=True)
            first.update({value: earlier for (_, value), (_, earlier) in pairs})
    return _saved_duplicates(tape, first)


def merge_equal_values(tape: Tape, equal: Mapping[int, int]) -> Tape:
    """Return a copy of `tape` that refers to the value `equal[v]` in place of the value `v`."""
    arguments = [_with_equal_values((operator.args, operator.kwargs), equal) for operator in tape.operators]
    operators = [
        replace(operator, args=args, kwargs=kwargs, _inputs=None)
        for operator, (args, kwargs) in zip(tape.operators, arguments, strict=True)
    ]
    slots = [_with_equal_values(slot, equal) for slot in tape.slots]
    return replace(tape, operators=operators, slots=slots, _consumers={})


def _have_equal_layouts(tape: Tape, first: TapeOperator, second: TapeOperator) -> bool:
    """Return True if corresponding results of two operators have the same bytes, geometry, dtype and device."""
    layouts = []
    for outputs in (first.outputs, second.outputs):
        values = [(position, tape.values[value]) for position, value in outputs]
        layouts.append([(position, v.nbytes, v.ref.geometry, v.ref.dtype, v.device) for position, v in values])
    return layouts[0] == layouts[1]


def _saved_duplicates(tape: Tape, first: Mapping[int, int]) -> dict[int, int]:
    """Return {duplicate: earlier saved value}, from `first`, {duplicate: first value with the same bits}."""
    first_slot: dict[int, int] = {}
    for number, slot in enumerate(tape.slots):
        first_slot.setdefault(slot.value, number)
    saved: dict[int, int] = {}
    """First saved value of each group of values with the same bits, by the first value of the group."""
    for value in sorted({*first, *first.values()}):
        if value in first_slot:
            saved.setdefault(first.get(value, value), value)
    return {
        value: saved[group]
        for value, group in first.items()
        if group in saved
        and saved[group] < value
        and first_slot[saved[group]] <= first_slot.get(value, len(tape.slots))
    }


def _with_equal_values(tree: Any, equal: Mapping[int, int]) -> Any:
    """Return an operator's arguments in which each value in `equal` is replaced by the value with the same bits."""
    return map_tensors(tree, TensorRef, lambda ref: replace(ref, value=equal.get(ref.value, ref.value)))
