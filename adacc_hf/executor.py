"""Running a model's blocks under a policy.

A block whose plan retains everything is called plainly. Any other call runs inside one pair of saved-tensor hooks,
which carries all actions. The first call at a new shape is recorded, verified and compiled; after it there is no
dispatch mode.

NOTE [Rules of the executor]. Code and tests say "rule R3".
R1  Exact: without a lossy codec, loss and every gradient are bit-equal to plain training, dropout included.
R2  A restored tensor has the dtype, size, stride and storage offset of the saved one.
R3  One storage, one payload, however many operators save it.
R4  Parameters and casts of parameters are never compressed. A cast may be recomputed.
R5  Random operators are never replayed: their result is retained or stored losslessly. Of dropout only the mask
    is random.
R6  An in-place operator makes a new version of a storage; replay never changes a version that something else needs.
    Nor does the backward of an autograd function written in Python: what replay reads again, it gets as a copy.
R7  Nothing is replayed that was not compared with the original, bit for bit, when its tape was recorded.
R8  Each call checks what autograd saves against the tape. A new input shape gets a tape of its own, and so do other
    data in an argument that the block reads into Python, and every state of the Python values that a block's modules
    hold. Where operators depend on any other data, torch's checkpoint takes over.
R9  Without gradients, in generate(), after an exception, with retain_graph or create_graph, and with several forwards
    before one backward: right, or refused, and nothing is left behind. Each call of a block has a plan of its own, and
    is right under that of any other call too.
R10 A normal step never waits for the device.
R11 A packed object never holds the tensor object itself, and all state lives in packed objects and calls.
R12 Inputs, parameters, buffers and what else hangs on the block are looked up anew at each call. What is reached in
    any other way cannot be replayed from.
R13 Operators that other ranks take part in are never replayed, so that no rank waits for one whose plan differs: their
    result is retained or compressed. Where torch's checkpoint must run such a block, it does so under every plan.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from adacc_hf.blocks import Checkpointed, Installation
from adacc_hf.call import Call
from adacc_hf.call_inputs import fetch
from adacc_hf.calls import block_of_call, call_name, num_calls
from adacc_hf.compiled import CompiledPlan
from adacc_hf.config import AdaccConfig
from adacc_hf.errors import ChunkedHeadError, PolicyMismatchError, TapeMismatchError
from adacc_hf.head import ChunkedHead
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.known_shapes import MAX_SHAPES, Key, KnownShape, KnownShapes
from adacc_hf.policy import RECOMPUTE, RETAIN, Action, Choice, Plan, Policy
from adacc_hf.recording import Recording
from adacc_hf.tape import Tape
from adacc_hf.tape_library import TapeLibrary

if TYPE_CHECKING:
    from adacc_hf.profile import Profile

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Entry:
    """How a block runs at one shape: under a compiled plan, or by torch's checkpoint where its tape is not trusted."""

    known: KnownShape
    compiled: CompiledPlan | None
    codecs: dict[int, Codec]
    seen: list[int] | None = None


class Observer(Protocol):
    """What may look at a call that a strategy runs."""

    def run(
        self, plan: FollowPlan, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Take itself off `plan`, have it run the call, and return the result."""


class FollowPlan:
    """The strategy that runs one block under its plan."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        library: TapeLibrary,
        known: KnownShapes | None = None,
        earlier: tuple[CompiledPlan | None, ...] = (),
    ) -> None:
        self.name = name
        self.plan = plan
        self._is_plain = plan.is_plain
        self._is_checkpointed = any(_is_checkpointed_on_all_ranks(shape.tape) for shape in (known or {}).values())
        self.library = library
        self.known = KnownShapes() if known is None else known
        """The block's shapes; all its plans share what is known of them."""
        self._earlier = earlier
        """What the block ran under before, kept until its first call so that a plan of the same actions shares it."""
        self.entries: OrderedDict[Key, Entry] = OrderedDict()
        self.wrap_codec: Callable[[int, Codec], Codec] | None = None
        """If set, what stands around each activation's codec for the time being."""
        self.observer: Observer | None = None
        """If set, what runs the next call in place of this strategy."""

    @property
    def tapes(self) -> dict[Any, Tape]:
        """The block's tapes by shape."""
        return {key: known.tape for key, known in self.known.items()}

    def programs(self) -> tuple[CompiledPlan | None, ...]:
        """What the block runs under, or ran under last if it was not called yet."""
        return tuple(entry.compiled for entry in self.entries.values()) or self._earlier

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.observer is not None:
            return self.observer.run(self, block, fn, args, kwargs)
        if self._is_checkpointed:
            return Checkpointed().run(block, fn, args, kwargs)
        if self._is_plain and self.entries:
            return fn(*args)
        key = self.known.key(block, args, kwargs)
        entry = self.entries.get(key) or self._known_entry(key)
        if entry is None and self.known.is_strange(key):
            return self._run_untaped(any(t.has_collectives for t in self.tapes.values()), block, fn, args, kwargs)
        if entry is None:
            return self._first_call(key, block, fn, args, kwargs)
        self.entries.move_to_end(key)
        if entry.compiled is None:
            return self._run_untaped(entry.known.tape.has_collectives, block, fn, args, kwargs)
        entry.known.num_calls += 1
        self._learn_order(entry)
        if is_checked_call(entry.known.num_calls) and not entry.compiled.is_plain:
            return self._checked_call(entry, block, fn, args, kwargs)
        return self._call(entry, block, fn, args, kwargs)

    def run_again(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that was run before, to look at it. It is not counted: calls are recorded by their number."""
        entry = self.entries.get(self.known.key(block, args, kwargs))
        if entry is None or entry.compiled is None or entry.compiled.is_plain:
            return self.run(block, fn, args, kwargs)
        self._learn_order(entry)
        is_checked = entry.known.num_calls > 1
        return (self._call if is_checked else self._checked_call)(entry, block, fn, args, kwargs)

    @staticmethod
    def _run_untaped(has_collectives: bool, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call that no tape fits. This rank alone may know: no collective may run again (rule R13)."""
        return fn(*args) if has_collectives else Checkpointed().run(block, fn, args, kwargs)

    def _call(self, entry: Entry, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call under the plan."""
        externals = fetch(entry.compiled.externals, block, args, kwargs)
        if not entry.compiled.has_all(externals):  # a layer that merged its adapter has its scales elsewhere for a call
            return self._run_untaped(entry.known.tape.has_collectives, block, fn, args, kwargs)
        call = Call(entry.compiled, self.name, self._codecs(entry), externals)
        if len(entry.compiled.tape.order or ()) < entry.compiled.num_slots:
            entry.seen = call.seen = []
        with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
            result = fn(*args)
        call.finish()
        replaced = entry.compiled.replaced(externals, block)
        if replaced is not None:
            raise TapeMismatchError(
                f"block {self.name} put another tensor in the place of {replaced} within a call, so that replay would "
                f"read an old one: make it a buffer, or leave its class out with AdaccConfig(block_classes=...)"
            )
        return result

    def _codecs(self, entry: Entry) -> dict[int, Codec]:
        if self.wrap_codec is None:
            return entry.codecs
        return {value: self.wrap_codec(value, codec) for value, codec in entry.codecs.items()}

    def _known_entry(self, key: Key) -> Entry | None:
        """The entry for a shape that was recorded under another plan."""
        known = self.known.get(key)
        if known is not None:
            self.entries[key] = self._entry(known)
            self._earlier = ()
        return self.entries.get(key)

    def _learn_order(self, entry: Entry) -> None:
        """Learn the order of unpacks from the backward that asked for most slots, whichever came first."""
        if entry.seen:
            tape, asked = entry.compiled.tape, dict.fromkeys(entry.seen)
            if len(asked) > len(tape.order or ()):
                self.library.learn_order(tape, asked)
            entry.seen = None

    def _first_call(self, key: Key, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recording = Recording(self.name, block, args, kwargs)
        result = recording.run(fn)
        tape = self.library.verified(recording.recorder)
        known = KnownShape(tape, varies=self._is_restless(key, tape))
        self._is_checkpointed = _is_checkpointed_on_all_ranks(tape)
        key = self.known.add(key, known)
        entry = self.entries[key] = self._entry(known)
        if len(self.entries) > MAX_SHAPES:
            oldest, _ = self.entries.popitem(last=False)
            self.known.pop(oldest, None)
        if entry.compiled is not None and not entry.compiled.is_plain:
            entry.seen = recording.hand_over(entry.compiled, self._codecs(entry))
        recording.close()
        return result

    def _is_restless(self, key: Key, tape: Tape) -> bool:
        """Whether the block is given other Python values again and again, and runs other operators with each."""
        state = self.known.state
        if state is None:
            return False
        others = {known.tape.digest for other, known in self.known.items() if key == other._replace(state=key.state)}
        if others:
            state.learn(same_operators=tape.digest in others)
        if state.is_restless:
            self.library.warn_restless(self.name, tape, state.changed)
        return state.is_restless

    def _checked_call(self, entry: Entry, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Record the call once more; if it ran other operators, torch's checkpoint takes over at this shape."""
        recording = Recording(self.name, block, args, kwargs)
        result = recording.run(fn)
        tape = recording.recorder.tape()
        if tape.digest == entry.compiled.tape.digest:
            entry.seen = recording.hand_over(entry.compiled, self._codecs(entry))
        else:
            self.library.warn_varying(self.name, tape)
            entry.compiled, entry.known.varies = None, True
        recording.close()
        return result

    def _entry(self, known: KnownShape) -> Entry:
        tape = known.tape
        if tape.untrusted is not None:
            self.library.warn_untrusted(self.name, tape)
        if tape.untrusted is not None or known.varies:
            return Entry(known, None, {})
        choices = self.choices(tape)
        shared = frozenset(
            value.index for value in tape.values if tape.is_block_input(value.index) and value.index not in choices
        )
        compiled = self.library.compiled(tape, choices, shared)
        codecs = {
            value: get_codec(choice.codec, **dict(choice.options))
            for value, choice in choices.items()
            if choice.action is Action.COMPRESS
        }
        return Entry(known, compiled, codecs)

    def choices(self, tape: Tape) -> dict[int, Choice]:
        """The plan's choices as far as they can be followed on this tape.

        Raises PolicyMismatchError if the same call ran other operators when it was profiled, or another block did. Once
        the block has fitted its plan, other operators are a change in mid-training: weights frozen or set free, say.
        """
        structure, _, identity, call = (self.plan.kind.split("-") + [""] * 3)[:4]
        own_structure, _, own_identity, own_call = tape.kind.split("-")
        if structure != own_structure:
            planned = next((known for known in self.tapes.values() if known.kind.startswith(f"{structure}-")), None)
            same = planned.values_in(tape) if planned is not None else None
            if same is not None:
                return self._choices_by_value(tape, same)
            if planned is None and (identity != own_identity or call == own_call):
                raise PolicyMismatchError(
                    f"block {self.name} ({tape.block_class}: {len(tape.operators)} operators, {len(tape.slots)} saved "
                    f"tensors) has tape {tape.kind}, the policy was made for tape {self.plan.kind}: the model, its "
                    f"attention, dropout or precision differ; profile this model and solve a policy for it"
                )
            return self._careful_choices(tape)
        choices = dict(self.plan.choices)
        unfit = [value for value, choice in choices.items() if not can_follow(choice, tape, value)]
        if unfit:
            names = ", ".join(tape.values[value].name for value in unfit)
            log.warning(
                "Adacc: block %s retains %s: it can be neither replayed nor encoded as planned", self.name, names
            )
        return choices | dict.fromkeys(unfit, RETAIN)

    def _choices_by_value(self, tape: Tape, same: dict[int, int]) -> dict[int, Choice]:
        """The plan's choices for a call of the planned operators of which autograd saves other results.

        `same` maps the values that the plan was made for to those of `tape`.
        """
        planned = {same[value]: choice for value, choice in self.plan.choices if value in same}
        inputs = [value.index for value in tape.values if tape.is_block_input(value.index) and value.index in planned]
        made = [value for value in tape.saved_values() if tape.values[value].source is None]
        follow = {v: v in planned and can_follow(planned[v], tape, v) for v in [*inputs, *made]}
        return {v: planned[v] if followed else _least_memory(tape, v) for v, followed in follow.items()}

    def _careful_choices(self, tape: Tape) -> dict[int, Choice]:
        """Least memory for a call with other operators than the profiled one: a batch of one, say, or no padding."""
        if self._is_plain:
            return {}
        self.library.warn_unplanned(self.name, tape)
        return least_memory_choices(tape)


def _is_checkpointed_on_all_ranks(tape: Tape) -> bool:
    """Whether torch's checkpoint runs the block whatever its plan says: the ranks' plans may differ (rule R13)."""
    return tape.untrusted is not None and tape.has_collectives


def is_checked_call(num_calls: int) -> bool:
    """Whether the n-th call of a block at one shape is recorded again, to find operators that vary (rule R8).

    The second is, before the first replay of an old record, and then the 24th, 48th, 96th and so on. Powers of two are
    left alone: tracking, which measures a policy that a recorded call may not run under, has these.
    """
    thirds, rest = divmod(num_calls, 3)
    return num_calls == 2 or (rest == 0 and thirds >= 8 and thirds & (thirds - 1) == 0)


def can_follow(choice: Choice, tape: Tape, value: int) -> bool:
    """Whether `choice` can be carried out for `value` of `tape`, which may not be the tape that it was made for."""
    if choice.action is Action.RECOMPUTE:
        return value in tape.recomputable
    if choice.action is Action.COMPRESS:
        record, codec = tape.values[value], get_codec(choice.codec, **dict(choice.options))
        return record.is_encodable and codec.supports(record.ref.geometry[0], record.ref.dtype)
    return True


def least_memory_choices(tape: Tape) -> dict[int, Choice]:
    """The lossless choices that store least."""
    inputs = [value.index for value in tape.values if tape.is_block_input(value.index)]
    made = [value for value in tape.saved_values() if tape.values[value].source is None]
    return dict.fromkeys(inputs, RETAIN) | {value: _least_memory(tape, value) for value in made}


def _least_memory(tape: Tape, value: int) -> Choice:
    """The lossless choice that stores least for a value that the block made."""
    record = tape.values[value]
    if value in tape.recomputable:
        return RECOMPUTE
    is_mask = record.ref.dtype is torch.bool and record.is_encodable
    return Choice(action=Action.COMPRESS, codec="bitmask") if is_mask else RETAIN


@dataclass(frozen=True, slots=True)
class BlockPlans:
    """A policy made ready to run: a strategy for every block, by name."""

    policy: Policy
    strategies: dict[str, FollowPlan]


class PolicyHandle:
    """A policy applied to a model. `remove()`, or leaving it as a context manager, takes it off without a trace."""

    def __init__(self, model: nn.Module, policy: Policy, block_classes: tuple[str, ...] | None = None) -> None:
        self.installation = Installation(model, block_classes)
        self._block_classes = block_classes
        self.library = TapeLibrary()
        self.policy = policy
        self.plans: BlockPlans | None = None
        """The strategies that were followed last."""
        self._head: ChunkedHead | None = None
        try:
            self.replace(policy)
        except BaseException:
            self.remove()
            raise

    def replace(self, policy: Policy) -> None:
        """Follow another policy from the next forward on."""
        self.follow(self.prepare(policy, self.plans))

    def prepare(self, policy: Policy, earlier: BlockPlans | None = None) -> BlockPlans:
        """The strategies of `policy`, to be followed at any time; they know the shapes that `earlier` has seen."""
        _check_blocks(policy, list(self.installation.blocks), type(self.installation.model).__name__)
        known = {} if earlier is None else earlier.strategies
        strategies = {}
        for name, index in policy.blocks:
            before = (known[name].known, known[name].programs()) if name in known else ()
            strategies[name] = FollowPlan(name, policy.plans[index], self.library, *before)
        return BlockPlans(policy, strategies)

    def prepare_recording(self, profile: Profile, plans: BlockPlans) -> BlockPlans:
        """Strategies under which a new shape is recorded for `plans`: everything recomputed, so that there is room."""
        recompute = Policy.uniform(profile.with_head(plans.policy.head), Action.RECOMPUTE)
        return self.prepare(recompute, plans)

    def follow(self, plans: BlockPlans | None) -> None:
        """Run the blocks under `plans` from the next forward on; under torch's own checkpoint if None."""
        self.installation.expect(self.installation.functions if plans is None else plans.strategies)
        for name, function in self.installation.functions.items():
            function.strategy = Checkpointed() if plans is None else plans.strategies[name]
        if plans is not None:  # else the head stays: no size of batch is safer with a plain one
            self._chunk_head(plans.policy.head == "chunked")
            self.plans, self.policy = plans, plans.policy

    def _chunk_head(self, is_on: bool) -> None:
        if self._head is None and is_on:
            try:
                self._head = ChunkedHead(self.installation.model)
            except ChunkedHeadError as error:
                raise PolicyMismatchError(f"the policy has a chunked head, and {error}") from error
        if self._head is not None:
            self._head.is_on = is_on

    def wrap_codecs(self, block: str, wrap: Callable[[int, Codec], Codec] | None) -> None:
        """Put `wrap(value, codec)` in place of the codecs of `block`; None takes it away again."""
        self.plans.strategies[block].wrap_codec = wrap

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """The model without this handle, for a profile in the middle of a run; afterwards all is as before."""
        before, head = self.installation, self._head
        self.remove()
        self._head = None
        try:
            yield
        finally:
            self.installation = Installation(before.model, self._block_classes)
            self.installation.expect(before.functions)
            self._chunk_head(head is not None and head.is_on)
            for name, function in self.installation.functions.items():
                function.strategy = before.functions[name].strategy
            for name, block in self.installation.blocks.items():
                block.num_calls = before.blocks[name].num_calls

    def remove(self) -> None:
        self.installation.remove()
        if self._head is not None:
            self._head.remove()

    def uncalled(self) -> list[str]:
        """Blocks whose function was never called with gradients on: something replaced their forward."""
        return self.installation.uncalled()

    def __enter__(self) -> PolicyHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def apply_policy(model: nn.Module, policy: Policy, config: AdaccConfig | None = None) -> PolicyHandle:
    """Run the blocks of `model` under `policy` from the next forward with gradients on.

    Each block is recorded once more on its first call, which raises PolicyMismatchError if its operators are not
    those it was profiled with. Raises the same if the policy has other blocks, NoBlocksError and NestedHooksError as
    `Installation`.
    """
    return PolicyHandle(model, policy, config.block_classes if config else None)


def _check_blocks(policy: Policy, blocks: list[str], model_class: str) -> None:
    """Compare names, not their order: blocks are called in forward order and installed in module order (CLIP)."""
    named = [name for name, _ in policy.blocks]
    calls = num_calls(named)
    expected = sorted(call_name(block, i + 1) for block, number in calls.items() for i in range(number))
    if expected == sorted(named) and calls.keys() == set(blocks):
        return
    missing = [name for name in (*blocks, *expected) if name not in named]
    foreign = [name for name in named if block_of_call(name) not in blocks]
    raise PolicyMismatchError(
        f"the policy is for {len(calls)} blocks, {model_class} has {len(blocks)}"
        + (f"; it has no plan for {missing[0]}" if missing else "")
        + (f"; the model has no {foreign[0]}" if foreign else "")
        + ": profile this model and solve a policy for it"
    )
