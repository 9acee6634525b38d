"""Strategy of one block under its plan: each call is recorded, validated or just run.

The rules are in the NOTE of policy_handle.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from adacc_hf.artifacts.errors import OTHER_CLASSES, PolicyMismatchError, TapeMismatchError
from adacc_hf.artifacts.policy import IDLE_KIND, Place, Plan
from adacc_hf.kernels.codecs import Codec, Coder
from adacc_hf.run.blocks import Checkpointed
from adacc_hf.run.call import Call, Recording
from adacc_hf.run.checkpointed_call import run_checkpointed
from adacc_hf.run.entries import (
    NEW_DATA,
    OTHER_OPERATORS,
    OTHER_RANKS,
    OUT_OF_PLACE,
    UNRECORDED,
    UNTRAINED,
    VARYING,
    Entry,
    PlanEntries,
)
from adacc_hf.run.validated_call import ValidatedCall
from adacc_hf.tape.call_key import CallKey, KnownShape, KnownShapes
from adacc_hf.tape.execution_plan import ExecutionPlan, codec_of
from adacc_hf.tape.inputs import argument_tensors, fetch, find_external
from adacc_hf.tape.tape import BITS, Tape
from adacc_hf.tape.tape_cache import TapeCache

log = logging.getLogger(__name__)

LEAVES_ALLOWED = 3
"""Times that calls of one key may leave their tape, and be recorded anew, before torch's checkpoint takes over."""


class Observer(Protocol):
    """An object that observes one call of a block."""

    def run(
        self,
        plan: BlockExecutor,
        block: nn.Module,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Remove itself from `plan`, let `plan` run the call, and return the result."""


class BlockExecutor:
    """The strategy that runs one block under its plan."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        library: TapeCache,
        known: KnownShapes | None = None,
        earlier: tuple[ExecutionPlan | None, ...] = (),
    ) -> None:
        self.name = name
        self.plan = plan
        self._is_plain = plan.is_plain
        self._input_codecs = {place: (value, codec_of(plan.choice(value))) for value, place in plan.places}
        """Of a checkpointed block, the codec of each input that it compresses, by its place."""
        self._must_be_checkpointed = plan.kind == IDLE_KIND or any(
            _is_checkpointed_on_all_ranks(shape.tape) for shape in (known or {}).values()
        )
        self.library = library
        self.known = KnownShapes(library.untraceable) if known is None else known
        """The block's shapes, shared by all its plans."""
        self.entries = PlanEntries(name, plan, library, self.known, earlier)
        self.wrap_codec: Callable[[int, Codec], Coder] | None = None
        """If set, the function that wraps each activation's codec."""
        self.observer: Observer | None = None
        """If set, the observer that gets the next call."""

    @property
    def tapes(self) -> dict[Any, Tape]:
        """The block's tapes by shape."""
        return {key: known.tape for key, known in self.known.items()}

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.observer is not None:
            return self.observer.run(self, block, fn, args, kwargs)
        if self.plan.is_checkpointed:
            return run_checkpointed(block, fn, args, kwargs, self._input_coders())
        if self._must_be_checkpointed:
            self.library.fallbacks[UNTRAINED if self.plan.kind == IDLE_KIND else OTHER_RANKS] += 1
            return Checkpointed().run(block, fn, args, kwargs)
        if self._is_plain and not self.entries.are_empty:
            return fn(*args)
        return self._run_as(self.known.key(block, fn, args, kwargs), block, fn, args, kwargs)

    def _run_as(self, key: CallKey, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of `key`: under the plan, or recorded if there is no tape for it."""
        entry = self.entries.find(key)
        if entry is None and self.known.is_unseen(key):
            self.library.fallbacks[NEW_DATA] += 1
            return self._run_untaped(any(t.has_collectives for t in self.tapes.values()), block, fn, args, kwargs)
        if entry is None:
            return self._first_call(key, block, fn, args, kwargs)
        self._count_fallback(entry)
        if entry.compiled is None:
            return self._run_untaped(entry.known.tape.has_collectives, block, fn, args, kwargs)
        externals = fetch(entry.program.externals, block, args, kwargs)
        if not entry.program.has_all(externals, partial(find_external, block=block, args=args, kwargs=kwargs)):
            return self._run_elsewhere(key, entry, block, fn, args, kwargs)
        if entry.family is None:
            self.known.move_to_end(key)
        entry.known.num_calls += 1
        self._learn_order(entry)
        if not self._is_due(entry):
            return self._call(entry, externals, block, fn, args)
        call = self._validated(entry, externals)
        result = call.run(block, fn, args, kwargs)
        self._refuse_replaced(entry.program, externals, block)
        self._learn(key, entry, call)
        return result

    def run_again(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call once more, to observe it. It is not counted, since the count decides which calls are validated."""
        if self.plan.is_checkpointed:
            return self.run(block, fn, args, kwargs)
        key = self.known.key(block, fn, args, kwargs)
        entry = self.entries.latest(key)
        if entry is None or entry.compiled is None or entry.compiled.is_plain:
            return self.run(block, fn, args, kwargs)
        externals = fetch(entry.program.externals, block, args, kwargs)
        if not entry.program.has_all(externals, partial(find_external, block=block, args=args, kwargs=kwargs)):
            return self.run(block, fn, args, kwargs)
        self._learn_order(entry)
        if entry.known.num_calls > 1 and self.known.untraced is None:
            return self._call(entry, externals, block, fn, args)
        return self._validated(entry, externals).run(block, fn, args, kwargs)

    def _is_due(self, entry: Entry) -> bool:
        """Return True if the call is due to be compared with its tape."""
        if entry.program.is_plain:
            return False
        is_known = entry.program.tape.due_check is None and self.known.untraced is None
        if is_known and not is_checked_call(entry.known.num_calls):
            return False
        if is_being_captured() and self.known.untraced is not None:
            raise PolicyMismatchError(
                f"block {self.name} is compared with its tape at each call, for which a CUDA graph cannot wait, since "
                f"Dynamo stops at: {self.known.untraced}; capture it under a policy that retains everything"
            )
        if is_being_captured():  # a CUDA graph cannot wait for a comparison: the next call is compared in its place
            entry.known.num_calls -= 1
            return False
        return True

    def _run_elsewhere(
        self, key: CallKey, entry: Entry, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call in which the block's own tensors are not as on its tape.

        If they have another layout, the call gets another key. If they are gone, as when an adapter was merged for this
        call, it runs without a tape.
        """
        moved = self.known.moved(key, block)
        if moved != key and not self.known.is_ever_moving:
            return self._run_as(moved, block, fn, args, kwargs)
        self.library.fallbacks[OUT_OF_PLACE] += 1
        return self._run_untaped(entry.known.tape.has_collectives, block, fn, args, kwargs)

    def _count_fallback(self, entry: Entry) -> None:
        if entry.fallback is not None:
            self.library.fallbacks[entry.fallback] += 1

    @staticmethod
    def _run_untaped(has_collectives: bool, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call that no tape fits. Other ranks may not know, so that no collective may run again (rule R13)."""
        return fn(*args) if has_collectives else Checkpointed().run(block, fn, args, kwargs)

    def _call(
        self, entry: Entry, externals: list[tuple[int, torch.Tensor]], block: nn.Module, fn: Any, args: tuple[Any, ...]
    ) -> Any:
        """Run one call under the plan."""
        compiled = entry.program
        if compiled.is_plain:  # nothing to compare: all that the call saves is kept
            return fn(*args)
        if compiled.draws and is_being_captured():
            raise PolicyMismatchError(
                f"block {self.name} draws its dropout masks again in backward, which a CUDA graph cannot: capture it "
                f"under a policy of AdaccConfig(actions=('retain', 'compress')), or without dropout"
            )
        call = Call(compiled, self.name, self._codecs(entry), externals)
        if len(compiled.tape.order or ()) < compiled.num_slots:
            entry.seen = call.seen = []
        result = call.run(fn, args)
        self._refuse_replaced(compiled, externals, block)
        return result

    def _validated(self, entry: Entry, externals: list[tuple[int, torch.Tensor]]) -> ValidatedCall:
        compares = entry.program.tape.due_check == BITS
        return ValidatedCall(self.name, entry.program, self._codecs(entry), externals, compares)

    def _learn(self, key: CallKey, entry: Entry, call: ValidatedCall) -> None:
        """Update an entry, its family and its key after a validated call."""
        tape, family = entry.program.tape, entry.family
        if call.why_left is None:
            entry.seen = call.seen
            tape.due_check = None
            if family is not None:
                self.library.extend(family, key)
            return
        self.library.fallbacks[VARYING] += 1
        if family is not None and call.unlike:
            self.library.refuse(family, call.unlike, self.name)
        elif family is not None:
            self.library.distrust(family, self.name, call.why_left)
        elif self.known.num_left(key) < LEAVES_ALLOWED:
            self.known.outdate(key)
            self.library.forget(self.plan.kind, key)
        else:
            self.library.warn_varying(self.name, tape, self.known.untraced or call.why_left)
            entry.compiled, entry.known.varies, entry.fallback = None, True, VARYING
        self.entries.sized.clear()

    def _refuse_replaced(
        self, plan: ExecutionPlan, externals: list[tuple[int, torch.Tensor]], block: nn.Module
    ) -> None:
        """Raise TapeMismatchError if the call has replaced a held tensor that replay looks up."""
        replaced = plan.replaced(externals, block) if plan.held else None
        if replaced is not None:
            raise TapeMismatchError(
                f"block {self.name} put another tensor in the place of {replaced} within a call, so that replay would "
                f"read an old one: make it a buffer; or, {OTHER_CLASSES}"
            )

    def _codecs(self, entry: Entry) -> Mapping[int, Coder]:
        if self.wrap_codec is None:
            return entry.codecs
        return {value: self.wrap_codec(value, codec) for value, codec in entry.codecs.items()}

    def _input_coders(self) -> dict[Place, tuple[Codec, Coder]]:
        wrap = self.wrap_codec
        return {
            place: (codec, codec if wrap is None else wrap(value, codec))
            for place, (value, codec) in self._input_codecs.items()
        }

    def _learn_order(self, entry: Entry) -> None:
        """Have the library learn the order of unpacks from the last backward."""
        if entry.seen:
            self.library.learn_order(entry.program.tape, entry.seen)
            entry.seen = None

    def _first_call(
        self, key: CallKey, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        key = self.known.moved(key, block)
        expected = self.entries.expected(key, args, kwargs)
        if expected is None and self._is_too_large_to_record(key):
            self.library.warn_unrecorded(self.plan.kind, self.name, argument_tensors(args, kwargs))
            self.library.fallbacks[UNRECORDED] += 1
            return Checkpointed().run(block, fn, args, kwargs)
        self.known.was_compared = True
        if expected is not None and expected.compiled is None:  # torch's checkpoint is right whatever the call runs
            self._must_be_checkpointed = _is_checkpointed_on_all_ranks(expected.known.tape)
            self.entries.keep(key, expected)
            self._count_fallback(expected)
            is_plain = self._is_plain and not self._must_be_checkpointed
            return fn(*args) if is_plain else Checkpointed().run(block, fn, args, kwargs)
        if expected is not None:
            externals = fetch(expected.program.externals, block, args, kwargs)
            if expected.program.has_all(externals, partial(find_external, block=block, args=args, kwargs=kwargs)):
                self._count_fallback(expected)
                call = self._validated(expected, externals)
                result = call.run(block, fn, args, kwargs)
                self._refuse_replaced(expected.program, externals, block)
                self._end_expected_call(key, expected, call)
                return result
        recording = Recording(self.name, block, args, kwargs)
        result = recording.run(fn)
        tape = self.library.verified(recording.recorder)
        if tape.structure in self.library.preliminary:  # a table was made; the next call is recorded
            self.library.fallbacks[OTHER_OPERATORS] += 1
            recording.close()
            return result
        self._must_be_checkpointed = _is_checkpointed_on_all_ranks(tape)
        self.library.compare_with_family(tape, key, self.name)
        self.library.remember(tape, key, self.name)
        entry = self.entries.add(key, KnownShape(tape))
        self._count_fallback(entry)
        if entry.compiled is not None and not entry.compiled.is_plain:
            entry.seen = recording.hand_over(entry.compiled, self._codecs(entry))
        recording.close()
        return result

    def _is_too_large_to_record(self, key: CallKey) -> bool:
        """Return True if the budget has no room to record a call, which keeps every intermediate of the block alive.

        Some calls are recorded nevertheless: those of a block without any record, whose plan could never be followed,
        those at a size at which a family is compared (rule R7), and those that other ranks take part in (rule R13).
        """
        tapes = self.tapes.values()
        if not tapes or any(tape.has_collectives for tape in tapes) or self.library.family_at(key, self.name):
            return False
        return not self.library.may_record()

    def _end_expected_call(self, key: CallKey, expected: Entry, call: ValidatedCall) -> None:
        if call.why_left is None:
            expected.seen = call.seen
            self.library.remember(expected.known.tape, key, self.name)
            self.entries.keep(key, expected)
        else:  # the next call is recorded, and so are those of other blocks
            self.entries.was_surprised = True
            self.library.fallbacks[OTHER_OPERATORS] += 1
            self.library.forget(self.plan.kind, key)


def _is_checkpointed_on_all_ranks(tape: Tape) -> bool:
    """Return True if torch's checkpoint runs the block under every plan, since ranks' plans may differ (rule R13)."""
    return tape.untrusted is not None and tape.has_collectives


def is_being_captured() -> bool:
    """Return True if a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_checked_call(num_calls: int) -> bool:
    """Return True if the n-th call of a key is validated again, to find operators that vary (rule R8).

    These are the second call, and then the 24th, 48th, 96th and so on. Powers of two are left out: outliers are tracked
    in these steps, and validation takes time too.
    """
    thirds, rest = divmod(num_calls, 3)
    return num_calls == 2 or (rest == 0 and thirds >= 8 and thirds & (thirds - 1) == 0)
