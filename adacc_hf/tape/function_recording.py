"""Recording of an `autograd.Function` on a tape: as its inner operators, or as one operator.

NOTE [When a Function is one operator]
First, all operators that the Function's forward runs are recorded. If replay of these operators recomputes all tensors
that the Function returns and saves, the operators stay on the tape. Replay then runs only the operators that a saved
tensor needs.

In other cases the operators are not enough: a kernel that the recorder does not see fills memory, or Python reads data.
The Function then becomes one operator, whose target is the class, and replay runs the whole forward again. In both
cases the replayed results are compared with the original results, bit for bit. In training, replay recomputes no
results with other bits (rule R7).

If a second run of the forward would not give the same result, the Function keeps its operators, and the results that
these operators do not recompute are stored. `refusal_reasons` contains the reason: the Function writes into an input of
the block or a parameter, marks arguments as dirty, reads tensors that are not among its arguments, draws random
numbers, changes Python values, or has arguments that a tape cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import Function

from adacc_hf.tape.function_operators import (
    FunctionCall,
    FunctionTarget,
    NotReplayableError,
    Surroundings,
    autocast_as,
    call_of,
    check_argument,
    flatten_results,
    is_one_operator,
    keeps_saved_tensors,
    on_copies,
    results_of,
)
from adacc_hf.tape.replay_check import exactly_replayed_values, same_bits
from adacc_hf.tape.tape import (
    Source,
    Tape,
    TapeOperator,
    TapeValue,
    TensorRef,
    geometry_of,
    has_storage,
    leaves,
    map_tensors,
)
from adacc_hf.torch_glue.dynamo_gaps import describe_results
from adacc_hf.torch_glue.function_calls import ForwardCall, begin_watching, end_watching
from adacc_hf.torch_glue.private import storage_key
from adacc_hf.torch_glue.rng_state import RandomStates, preserve_random_states
from adacc_hf.torch_glue.tensors import checksum_of_bytes, copy_with_storage, is_plain, storage_bytes, wraps_others

WRITES = "writes into its arguments"

_ROLLED_BACK = (
    "values", "bases", "_storages", "operators", "slots", "reads", "_written", "_current", "untrusted",
    "_generator_state",
)  # fmt: skip


class _RecorderMark:
    """Snapshot of a tape recorder before an `autograd.Function` runs, to undo what was recorded since."""

    def __init__(self, recorder: FunctionRecorder) -> None:
        now = {name: vars(recorder)[name] for name in _ROLLED_BACK}
        self.state: dict[str, Any] = {
            name: item.copy() if isinstance(item, list | dict) else item for name, item in now.items()
        }
        self.overwritten = [value.overwritten for value in recorder.values]
        self.num_values, self.num_operators = len(recorder.values), len(recorder.operators)
        self.num_slots, self.num_reads = len(recorder.slots), len(recorder.reads)

    def roll_back(self, recorder: FunctionRecorder) -> None:
        """Remove the values, operators, saved tensors and reads that were recorded since this state was copied."""
        vars(recorder).update(self.state)
        for value, overwritten in zip(recorder.values, self.overwritten, strict=True):
            value.overwritten = overwritten


@dataclass
class _FunctionRun:
    """Record of one run of an `autograd.Function` whose operators were recorded on a tape."""

    function: type[Function]
    args: tuple[Any, ...]
    call: FunctionCall
    result: Any
    saved: list[torch.Tensor]
    """Tensors that the Function saves for backward. Autograd packs them only after the Function was recorded."""
    before: _RecorderMark
    written: list[torch.Tensor]
    """Arguments whose bits changed, one per storage."""

    @property
    def returned(self) -> tuple[Any, ...]:
        return flatten_results(self.result, self.saved)


class FunctionRecorder:
    """Base class of `Recorder`, which defines the annotated attributes, for `autograd.Function`s."""

    untrusted: str | None
    _generator_state: torch.Tensor | None
    _device: torch.device
    _is_fake: bool
    refer: Callable[[torch.Tensor], TensorRef]
    _unsealed: Callable[[], Tape]
    _note: Callable[..., None]
    _hold: Callable[[torch.Tensor], None]
    _release_results: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self.values: list[TapeValue] = []
        self.bases: list[torch.Tensor] = []
        """The first recorded tensor of each value, detached. An empty tensor stands for one with a checksum."""
        self.operators: list[TapeOperator] = []
        self.slots: list[TensorRef] = []
        self.reads: list[str] = []
        """Names of the operators and tensor methods that read data into Python, or made a size that depends on data."""
        self._storages: list[int] = []
        """The storage key of each value."""
        self._written: dict[int, TensorRef] = {}
        """For each value that an in-place operator made, the part of the previous version that it overwrote."""
        self._current: dict[int, int] = {}
        """The latest value (version) of each storage, by storage key."""
        self._externals: dict[int, tuple[torch.Tensor, Source]] = {}
        """(tensor, source) of each tensor that existed before the call and that the block may read, by storage key."""
        self._in_operator = False
        self.refusal_reasons: dict[str, str] = {}
        """Reason why an `autograd.Function` could not become one operator of the tape, by the Function's name."""
        self.function_results: dict[type[Function], Any] = {}
        """What each `autograd.Function` returned (`dynamo_gaps.describe_results`)."""
        self.unseen_writes: set[int] = set()
        """Keys of the storages that an `autograd.Function` wrote, not by operators of the tape."""
        self.function_slots: set[int] = set()
        """Indices, among all saved tensors, of the tensors that `autograd.Function`s saved."""
        self._is_paused = False
        self._is_in_function = False
        self._saved_inside: list[torch.Tensor] = []
        """Tensors that operators inside the running Function have saved, because it enables gradients. They count as
        saved by the Function."""
        self._num_next_saved = 0
        """Number of saved tensors of the latest `autograd.Function` that autograd has not packed yet."""
        self._read_inside: set[int] | None = None
        """Keys of the storages that operators read while the recorder is paused, or None."""

    def __enter__(self) -> Any:
        begin_watching(self._run_function)
        return super().__enter__()  # type: ignore[misc]  # the next base is a dispatch mode

    def __exit__(self, *exception: Any) -> None:
        end_watching()
        super().__exit__(*exception)  # type: ignore[misc]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record operators and reads inside the `with` block: the recorder itself runs them, not the block."""
        before = self._is_paused, self._in_operator
        self._is_paused = self._in_operator = True
        try:
            yield
        finally:
            self._is_paused, self._in_operator = before

    @contextmanager
    def _inside_function(self) -> Iterator[None]:
        """Mark the code inside the `with` block as part of the running `autograd.Function`."""
        self._is_in_function, self._saved_inside = True, []
        try:
            yield
        finally:
            self._is_in_function = False

    def _run_function(self, forward_call: ForwardCall) -> Any:
        """Run an `autograd.Function`, record it on the tape, and return its result."""
        if is_one_operator(forward_call.function) and not self._is_paused and not self._is_in_function:
            return self._record_whole(forward_call)
        num_slots, is_inner = len(self.slots), self._is_in_function or self._is_paused
        result = self._record_function(forward_call)
        if not is_inner:
            self.function_results[forward_call.function] = describe_results(forward_call.args, result)
        if not keeps_saved_tensors(forward_call.function):
            self.function_slots.update(range(num_slots, len(self.slots)))
            self._num_next_saved = len(forward_call.saved)
        return result

    def _record_whole(self, forward_call: ForwardCall) -> Any:
        """Run an `autograd.Function`, record it as one operator, and return its result."""
        tensors = tuple(_argument_tensors(forward_call.args))
        recorded = map_tensors(tensors, torch.Tensor, self.refer)
        with self.paused(), self._inside_function():
            result = forward_call.run()
        target, call = FunctionTarget(forward_call.function), call_of(forward_call.function, tensors)
        self._note(target, recorded, {"call": call}, [], flatten_results(result, forward_call.saved))
        return result

    def _note_slot(self) -> None:
        """Add the newest saved tensor to `function_slots` if the `autograd.Function` that ran last has saved it."""
        if self._num_next_saved:
            self._num_next_saved -= 1
            self.function_slots.add(len(self.slots) - 1)

    def _record_function(self, forward_call: ForwardCall) -> Any:
        """Run an `autograd.Function`, record its operators, or one operator for all of them if their replay does not
        recompute all results, and return its result."""
        function, args = forward_call.function, forward_call.args
        if self._is_in_function or self._is_paused or self._in_operator or self._is_fake:
            return forward_call.run()
        if not all(map(is_plain, _argument_tensors(args))):  # DTensors, whose operators run on local tensors
            with self._inside_function():
                return forward_call.run()
        states = RandomStates([self._device])
        arguments = {storage_key(t.untyped_storage()): t for t in _argument_tensors(args)}
        function_call = call_of(function, args)
        with self.paused():  # this mode is active, unlike in an operator
            self._release_results()
            for tensor in arguments.values():
                self._hold(tensor)
            checksums = {key: checksum_of_bytes(storage_bytes(tensor)) for key, tensor in arguments.items()}
        mark = _RecorderMark(self)
        with self._inside_function():
            result = forward_call.run()
        saved = self._saved_inside + forward_call.saved
        with self.paused(), autocast_as(()):
            written = [t for key, t in arguments.items() if checksum_of_bytes(storage_bytes(t)) != checksums[key]]
            returned = flatten_results(result, saved)
            # Tensors that wrap others have no bits of their own to compare (float8 training).
            is_wrapped = any(map(wraps_others, self.bases[mark.num_values :]))
            is_complete = is_wrapped or self._recomputes_all(mark, returned, written)
        if not is_complete:
            try:
                for argument in args:
                    check_argument(argument)
                if states.have_advanced():
                    raise NotReplayableError("draws random numbers")
                self._replace(_FunctionRun(function, args, function_call, result, saved, mark, written))
            except NotReplayableError as why:
                self.refusal_reasons[f"{function.__module__}.{function.__qualname__}"] = str(why)
                self.unseen_writes.update(storage_key(t.untyped_storage()) for t in written)
        self._saved_inside = []
        return result

    def _recomputes_all(self, before: _RecorderMark, returned: tuple[Any, ...], written: list[torch.Tensor]) -> bool:
        """Return True if replay of the operators inside an `autograd.Function` recomputes all that it `returned`, and
        it wrote by recorded operators alone."""
        new_tensors = [tensor for tensor in _argument_tensors(returned) if self._is_made_after(before, tensor)]
        values = [self._current.get(storage_key(tensor.untyped_storage())) for tensor in new_tensors]
        inner_operators = self.operators[before.num_operators :]
        changed = {old for operator in inner_operators for old, _ in operator.mutations if self._is_outer(before, old)}
        required = {value for value in values if value is not None}
        if changed:  # operators cannot run again on overwritten inputs
            allocated = {value for operator in inner_operators if operator.allocates for _, value in operator.outputs}
            unwritten = {v for v in allocated if not self.values[v].overwritten and self.values[v].nbytes}
            recomputed_values = frozenset(required - unwritten)
        else:
            recomputed_values = exactly_replayed_values(
                self._unsealed(), inner_operators, self.bases, before.num_values, range(before.num_values)
            )
        storages = {self._storages[value] for value in changed}
        has_hidden_write = any(storage_key(t.untyped_storage()) not in storages for t in written)
        is_trusted = self.untrusted == before.state["untrusted"]
        return None not in values and required <= recomputed_values and not has_hidden_write and is_trusted

    def _replace(self, run_record: _FunctionRun) -> None:
        """Replace the operators of an `autograd.Function` by one that runs its whole forward. Raise NotReplayableError,
        and change nothing, if the forward cannot run again."""
        results = results_of(run_record.result)
        target = FunctionTarget(run_record.function)
        if self.reads[run_record.before.num_reads :]:
            raise NotReplayableError("reads data into Python")
        self._check_writes(run_record)
        self._check_run_again(target, run_record, self._foreign_reads(run_record))
        run_record.before.roll_back(self)
        recorded = map_tensors(run_record.args, torch.Tensor, self.refer)
        call = run_record.call._replace(results=results)
        self._note(target, recorded, {"call": call}, run_record.written, run_record.returned)

    # Checks. Each raises NotReplayableError with a reason.

    def _check_writes(self, run_record: _FunctionRun) -> None:
        """Raise NotReplayableError if an `autograd.Function` wrote, by a kernel that the recorder does not see, to a
        tensor that no operator of the block has computed or that autograd has saved. After another write, the storage
        gets a new version (rule R6)."""
        before = run_record.before
        inside = self.operators[before.num_operators :]
        if any(self._is_outer(before, old) for operator in inside for old, _ in operator.mutations):
            raise NotReplayableError(WRITES)
        saved = {self._storages[slot.value] for slot in self.slots[: before.num_slots]}
        for tensor in run_record.written:
            key = storage_key(tensor.untyped_storage())
            value = before.state["_current"].get(key)
            if value is None or self.values[value].source is not None or key in saved:
                raise NotReplayableError(WRITES)

    def _foreign_reads(self, run_record: _FunctionRun) -> set[int]:
        """Return the keys of the storages of unknown origin that operators inside an `autograd.Function` read. Raise
        NotReplayableError for a collective, or a read of a tensor of known origin that is neither an argument nor a
        result inside."""
        mark = run_record.before
        argument_keys = {storage_key(t.untyped_storage()) for t in _argument_tensors(run_record.args)}
        foreign: set[int] = set()
        for operator in self.operators[mark.num_operators :]:
            if operator.is_collective:
                raise NotReplayableError("runs collective operators")
            for value in operator.inputs():
                source = self.values[value].source
                if not self._is_outer(mark, value) or self._storages[value] in argument_keys:
                    continue
                if source is None or source.place != "unknown":
                    raise NotReplayableError(f"reads {source or 'a tensor'} that is not among its arguments")
                foreign.add(self._storages[value])
        return foreign

    def _check_run_again(self, target: FunctionTarget, run_record: _FunctionRun, foreign: set[int]) -> None:
        """Run the forward of an `autograd.Function` again. Raise NotReplayableError if it changes Python values, saves
        other tensors, makes another layout or other bits, or reads a storage in `foreign`. Bits are not compared if it
        wrote into an argument."""
        surroundings = Surroundings(run_record.function)
        if surroundings.has_tensors:
            raise NotReplayableError("can reach tensors that are not among its arguments, through globals or a closure")
        second_results, read_storages = self._run_forward_again(target, run_record)
        if not read_storages.isdisjoint(foreign):
            raise NotReplayableError("reads a tensor that is not among its arguments")
        changed = surroundings.changed(Surroundings(run_record.function))
        if changed is not None:
            raise NotReplayableError(f"changes {changed}, a value that outlives the call")
        returned = run_record.returned
        if not run_record.saved:  # called without gradients
            second_results = second_results[: len(returned)]
        if len(second_results) != len(returned):
            raise NotReplayableError("saves different tensors for backward when it runs again")
        for first, second in zip(returned, second_results, strict=True):
            if not isinstance(first, torch.Tensor) or not self._is_made_after(run_record.before, first):
                continue
            if not isinstance(second, torch.Tensor) or _layout_of(first) != _layout_of(second):
                raise NotReplayableError("makes tensors of a different layout when it runs again")
            if storage_key(first.untyped_storage()) == storage_key(second.untyped_storage()):
                raise NotReplayableError("returns the same storage when it runs again")
            with self.paused():
                has_same_bits = bool(run_record.written) or same_bits(first, second)
            if not has_same_bits:
                raise NotReplayableError("gives different bits when it runs again")

    def _run_forward_again(self, target: FunctionTarget, run_record: _FunctionRun) -> tuple[tuple[Any, ...], set[int]]:
        """Run the forward again. Return its results, and the keys of the storages that operators inside it read."""
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
        with self.paused(), torch.no_grad(), hooks, preserve_random_states([self._device]):
            copies = {storage_key(t.untyped_storage()): copy_with_storage(t.detach()) for t in run_record.written}
            args = on_copies(run_record.args, copies)
            read_storages: set[int] = set()
            self._read_inside = read_storages
            try:
                return target(*args, call=run_record.call), read_storages
            except torch.OutOfMemoryError:
                raise
            except NotReplayableError:
                raise
            except Exception as error:  # the user's code may raise anything
                raise NotReplayableError(f"cannot be run again ({type(error).__name__}: {error})") from None
            finally:
                self._read_inside = None

    def _note_paused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Collect the keys of the storages that an operator reads while the recorder is paused."""
        if self._read_inside is not None:
            self._read_inside |= {
                storage_key(t.untyped_storage()) for t in _argument_tensors((args, kwargs)) if has_storage(t)
            }

    # State of the recorder.

    def _is_made_after(self, before: _RecorderMark, tensor: torch.Tensor) -> bool:
        if not is_plain(tensor) or not has_storage(tensor):
            return False
        key = storage_key(tensor.untyped_storage())
        return key not in before.state["_current"] and key not in self._externals

    def _is_outer(self, before: _RecorderMark, value: int) -> bool:
        """Return True if `value` existed before the `autograd.Function` ran, or if no operator computed it."""
        return value < before.num_values or self.values[value].source is not None


def _argument_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves((tree,)) if isinstance(leaf, torch.Tensor)]


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return geometry_of(tensor), tensor.dtype, tensor.untyped_storage().nbytes()
