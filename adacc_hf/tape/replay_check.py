"""Which values of a tape replay recomputes bit for bit (rule R7), and which are equal to each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from adacc_hf.tape.replay import Environment, ReplayStep, view
from adacc_hf.tape.tape import Tape, TapeOperator, TensorRef, map_tensors
from adacc_hf.torch_glue.tensors import copy_with_storage


def verify(tape: Tape, bases: list[torch.Tensor]) -> frozenset[int]:
    """Replay the whole tape and return the values that came out bit for bit as recorded (rule R7).

    `bases` are the recorded tensors, by value. A value that came out otherwise is replaced by the original, if that is
    still there, so that what follows from it is judged by itself; otherwise what follows from it is not recomputable.
    Versions that were overwritten cannot be compared but where autograd saved them; else they count as far as what
    follows from them does.
    """
    environment: Environment = [None] * len(tape.values)
    for record in tape.values:
        if record.source is not None and record.source.place != "unknown" and not record.overwritten:
            environment[record.index] = bases[record.index]
    good: set[int] = set()
    last_reader = {record.index: max(tape.consumers(record.index), default=-1) for record in tape.values}
    for operator in tape.operators:
        _verify_operator(tape, operator, bases, environment, good)
        for value in [*operator.inputs(), *operator.made()]:
            if last_reader[value] <= operator.index:
                environment[value] = None
    return obtainable(tape, good, tape.saved_values())


def replayed_alike(
    tape: Tape, operators: Sequence[TapeOperator], num_outer: int, bases: list[torch.Tensor]
) -> frozenset[int]:
    """The values that a part of a tape's `operators` recompute bit for bit from the first `num_outer` values and from
    what no operator makes."""
    environment: Environment = [None] * len(tape.values)
    for value in dict.fromkeys(value for operator in operators for value in operator.inputs()):
        record = tape.values[value]
        is_outer = value < num_outer or record.source is not None
        if is_outer and not record.overwritten:
            environment[value] = bases[value]
    good: set[int] = set()
    for operator in operators:
        _verify_operator(tape, operator, bases, environment, good)
    return obtainable(replace(tape, operators=list(operators)), good, range(num_outer))


def _verify_operator(
    tape: Tape, operator: TapeOperator, bases: list[torch.Tensor], environment: Environment, good: set[int]
) -> None:
    """Replay one operator, compare what it makes, and leave in `environment` what later operators may read."""
    ready = operator.may_run_again and not _is_timed_by_thread(tape, operator)
    ready = ready and all(environment[value] is not None for value in operator.inputs())
    if ready:
        ready = _runs_without_hidden_writes(tape, operator, environment)
    if operator.allocates:
        _fill_with_others(operator, bases, environment)
    # With gradients off LSTM on a CPU leaves out what its backward reads, and runs another kernel.
    ready = ready and all(environment[made] is not None for made in operator.made())
    for made in operator.made():
        replayed = environment[made]
        if ready and replayed is not None and _came_out_alike(tape, made, replayed, bases[made]):
            good.add(made)
            if tape.values[made].is_encodable:  # all of its storage was compared: two of it are not needed any more
                environment[made] = bases[made]
        else:
            environment[made] = None if tape.values[made].overwritten else bases[made]


def _fill_with_others(operator: TapeOperator, bases: list[torch.Tensor], environment: Environment) -> None:
    """Fill the memory that an operator has allocated with other bits than were recorded.

    What no operator writes to it was written by something else, and must not come out alike by chance: where memory
    is given out again with what it held.
    """
    for _, value in operator.outputs:
        replayed = environment[value]
        if replayed is None or replayed.untyped_storage().nbytes() != bases[value].untyped_storage().nbytes():
            continue
        torch.bitwise_not(_bytes_of(bases[value]), out=_bytes_of(replayed))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _is_timed_by_thread(tape: Tape, operator: TapeOperator) -> bool:
    """Whether cuDNN times its kernels for an operator, and keeps what it took by the thread: for convolutions, where
    `torch.backends.cudnn.benchmark` is on (aten/src/ATen/native/cudnn/Conv_v8.cpp: `thread_local benchmark_cache`).
    In backward's thread it may take another one than where replay is compared.

    Nothing else is known that comes to other bits there. What torch keeps by the thread goes with a backward to its
    thread (ATen/ThreadLocalState.h; torch/csrc/autograd/engine.cpp, `Engine::thread_main`), and so does the stream;
    TF32, deterministic algorithms and the like are the process's (ATen/Context.h).
    """
    if not torch.backends.cudnn.benchmark or "convolution" not in operator.short_name:
        return False
    return any(tape.values[value].device.type == "cuda" for value in operator.made())


def _came_out_alike(tape: Tape, value: int, replayed: torch.Tensor, recorded: torch.Tensor) -> bool:
    """Whether a value is what it was, as far as that can be told: of a version that is gone what autograd saved of it.

    Fused cells (GRU's) save parts of a tensor of which they then overwrite the others.
    """
    if not tape.values[value].overwritten:
        return same_bits(replayed, recorded)
    saved = [slot for slot in tape.slots if slot.value == value]
    return all(same_bits(view(replayed, slot), view(recorded, slot)) for slot in saved)


def _runs_without_hidden_writes(tape: Tape, operator: TapeOperator, environment: Environment) -> bool:
    """Replay one operator; returns whether it left alone what its schema does not declare as written.

    Of torch's own operators only those of batch normalisation write undeclared, into buffers. Operators from elsewhere
    may lie about anything. What may be written is copied first, so that a liar does no harm.
    """
    declared = {old for old, _ in operator.mutations}
    inputs = [value for value in operator.inputs() if value not in declared]
    if operator.target.namespace == "aten":
        inputs = [value for value in inputs if _is_buffer(tape, value)]
    originals = {value: tensor for value in inputs if (tensor := environment[value]) is not None}
    copies = {value: copy_with_storage(original) for value, original in originals.items()}
    for value, copy in copies.items():
        environment[value] = copy
    honest = _runs(operator, tape, environment)
    honest = honest and all(same_bits(copies[value], original) for value, original in originals.items())
    for value, original in originals.items():
        environment[value] = original
    return honest


def _runs(operator: TapeOperator, tape: Tape, environment: Environment) -> bool:
    """Replay one operator; return False if it is a Function whose forward does not run twice."""
    try:
        ReplayStep(operator, tape).run(environment)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the user's code raises
        if not operator.is_function:
            raise
        return False
    return True


def _is_buffer(tape: Tape, value: int) -> bool:
    source = tape.values[value].source
    return source is not None and source.place == "buffer"


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are the same to the last bit, and lie alike."""
    if left.dtype is not right.dtype or left.shape != right.shape or left.stride() != right.stride():
        return False
    if left.numel() == 0:
        return True
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def runs_alike(tape: Tape) -> bool:
    """Return True if every operator of the block made the recorded bits again from the same inputs.

    Random operators count as such, since torch's checkpoint restores the generators. A block does not, if it reads a
    tensor that no operator made and nobody gave it, or overwrites one of its inputs.
    """
    is_unseen = any(record.source is not None and record.source.place == "unknown" for record in tape.values)
    overwrites = any(record.overwritten and tape.is_block_input(record.index) for record in tape.values)
    operators = (operator for operator in tape.operators if not operator.random)
    return not is_unseen and not overwrites and all(tape.recomputable.issuperset(op.made()) for op in operators)


def obtainable(tape: Tape, good: Collection[int], stored: Iterable[int]) -> frozenset[int]:
    """Values among `good` whose inputs can all be had: from outside, out of `stored`, or by replay."""
    saved = set(stored)
    recomputable: set[int] = set()
    for operator in tape.operators:
        available = all(_obtainable(tape, value, saved, recomputable) for value in operator.inputs())
        if available and operator.may_run_again:
            recomputable.update(value for value in operator.made() if value in good)
    return frozenset(recomputable)


def _obtainable(tape: Tape, value: int, saved: set[int], recomputable: set[int]) -> bool:
    record = tape.values[value]
    if record.source is not None:
        return record.source.place != "unknown" and not record.overwritten
    return (value in saved and not record.overwritten) or value in recomputable


# Values that are the same because the same operator made them from the same input: one storage serves them all.
#
# Under autocast q, k and v each save a cast of one tensor, in three storages. A plan that keeps one of them and
# recomputes the others takes these from the one that it keeps: nothing runs, and two storages are free.


def equal_values(tape: Tape, recomputable: Collection[int]) -> dict[int, int]:
    """Values that an earlier saved one can stand for, mapped to the first such.

    Both came out of the same operator with the same arguments, in the same layout, and nothing changed them in place.
    Both are `recomputable`: replay of each gave the recorded bits (rule R7), so that the operator's results follow from
    its arguments and are equal too. A saved value's stand-in was saved first, since the first slot decides whose
    storage is kept.
    """
    makers: dict[Any, TapeOperator] = {}
    first: dict[int, int] = {}
    """Each value that repeats an earlier one, mapped to the first of its like."""
    for operator in tape.operators:
        if not _is_comparable(tape, operator, recomputable):
            continue
        maker = makers.setdefault(_call(operator, first), operator)
        if maker is not operator and _made_alike(tape, maker, operator):
            pairs = zip(operator.outputs, maker.outputs, strict=True)
            first.update({value: earlier for (_, value), (_, earlier) in pairs})
    return _stand_ins(tape, first)


def merged(tape: Tape, equal: Mapping[int, int]) -> Tape:
    """`tape`, with `equal[v]` in place of `v` wherever an operator reads it or a slot holds it."""
    operators = [substituted(operator, equal) for operator in tape.operators]
    slots = [_substituted(slot, equal) for slot in tape.slots]
    return replace(tape, operators=operators, slots=slots, _consumers={})


def substituted(operator: TapeOperator, equal: Mapping[int, int]) -> TapeOperator:
    """`operator`, reading `equal[v]` in place of `v`."""
    args, kwargs = _substituted((operator.args, operator.kwargs), equal)
    return replace(operator, args=args, kwargs=kwargs, _inputs=None)


def _is_comparable(tape: Tape, operator: TapeOperator, recomputable: Collection[int]) -> bool:
    made = operator.made()
    return (
        operator.may_run_again
        and not operator.random
        and not operator.mutations
        and all(value in recomputable and not tape.values[value].overwritten for value in made)
    )


def _call(operator: TapeOperator, first: Mapping[int, int]) -> Any:
    """What tells the operator's call from others: equal for calls that must give the same."""
    return operator.target, repr(_substituted((operator.args, operator.kwargs), first))


def _made_alike(tape: Tape, left: TapeOperator, right: TapeOperator) -> bool:
    """Whether two operators gave the same results in storages of the same layout."""
    if [position for position, _ in left.outputs] != [position for position, _ in right.outputs]:
        return False
    return all(_layout(tape, a) == _layout(tape, b) for (_, a), (_, b) in zip(left.outputs, right.outputs, strict=True))


def _layout(tape: Tape, value: int) -> Any:
    record = tape.values[value]
    return record.nbytes, record.ref.geometry, record.ref.dtype, record.device


def _stand_ins(tape: Tape, first: Mapping[int, int]) -> dict[int, int]:
    """For each value of a group the first saved one before it; groups of which nothing was saved gain nothing."""
    first_slot: dict[int, int] = {}
    for number, slot in enumerate(tape.slots):
        first_slot.setdefault(slot.value, number)
    saved: dict[int, int] = {}
    """For each group, known by its first value, the first saved value."""
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


def _substituted(tree: Any, equal: Mapping[int, int]) -> Any:
    return map_tensors(tree, TensorRef, lambda ref: replace(ref, value=equal.get(ref.value, ref.value)))
