"""What tells the calls of a block apart, and what is known of each: shapes, data read, Python state (rule R8)."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from operator import is_
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from adacc_hf.artifacts.files import note_latest
from adacc_hf.tape.call_inputs import Args, Data, Given, Kwargs, StatePaths, call_key, data_at, state_layout
from adacc_hf.tape.family import TapeFamily
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.compat import PretrainedConfig
from adacc_hf.torch_glue.private import MODULES

MAX_SHAPES = 512
"""Shapes a block remembers; the least recently used one goes. A tape and a plan on it are some 130 KiB of Python
objects, and to record a shape anew takes as long as some ten steps: texts have hundreds of lengths."""


class CallKey(NamedTuple):
    """What the operators of a call depend on, as far as it is known."""

    shape: Hashable
    data: tuple[Data | None, ...]
    """Of the arguments that the block reads into Python."""
    state: int
    """The number of the state that the block's modules are in."""

    def given_to(self, block: nn.Module) -> Given:
        """What of it blocks of one kind have in common, each of which counts its states by itself, and their layout."""
        return self.shape, self.data, state_layout(block)


@dataclass(slots=True)
class KnownShape:
    """What a block's calls of one key have shown, whatever plan they ran under."""

    tape: Tape
    num_calls: int = 1
    varies: bool = False
    """Whether a call was seen that ran other operators than the tape's."""


class Follower(Protocol):
    """What keeps something of its own for each shape, as a plan does."""

    def forget(self, key: CallKey) -> None:
        """Let go of what is kept for `key`, if anything is."""


class KnownShapes(OrderedDict[CallKey, KnownShape]):
    """What a block's calls have shown, the latest last. All plans of a block share it, and forget what it forgets."""

    def __init__(self, watches_state: bool = True) -> None:
        super().__init__()
        self._watches_state = watches_state
        self.state: PythonState | None = None
        """Of the block, from its first call on."""
        self._reads: tuple[tuple[Any, ...], ...] = ()
        """Where the arguments are that any tape's Python reads."""
        self._paths: StatePaths | None = None
        self._unseen: OrderedDict[CallKey, None] = OrderedDict()
        """Calls of known shapes that were given other data, once each."""
        self.followers: WeakSet[Follower] = WeakSet()
        self.was_compared = False
        """Whether a call of the block was compared with a record, or recorded, in the run that it is in now."""
        self.of_families: WeakKeyDictionary[TapeFamily, KnownShape] = WeakKeyDictionary()
        """What calls at all sizes of a family have shown."""

    def key(self, block: nn.Module, args: Args, kwargs: Kwargs) -> CallKey:
        """The key of a call that is about to run; to be asked once per call."""
        if self._paths is None or not self._paths.are_current():
            self._paths = StatePaths(block)
            if self.state is not None:
                self.state.look_again()
        data = tuple(data_at(path, args, kwargs) for path in self._reads)
        return CallKey(call_key(self._paths, args, kwargs), data, self._state_of(block))

    def is_unseen(self, key: CallKey) -> bool:
        """Whether a call comes at a known shape with data that was never seen there.

        Recording takes memory, which is set aside where a shape is new, and time, which pays if the data comes again.
        """
        known_data = {known.data for known in self if known.shape == key.shape}
        if not known_data or key.data in known_data or key in self._unseen:
            return False
        self.acquaint(key)
        return True

    def acquaint(self, key: CallKey) -> None:
        """Take a call of `key` for no unseen one from now on."""
        note_latest(self._unseen, key, None, MAX_SHAPES)

    def add(self, key: CallKey, known: KnownShape) -> CallKey:
        """Note what a call showed; returns its key, which has the data that its tape is the first to read."""
        reads = known.tape.reads
        new = [path for path in reads if path not in self._reads]
        if new:
            self._reads = (*self._reads, *new)
            # What was recorded before does not tell data apart that may matter there too.
            self._forget(list(self))
            key = key._replace(data=(*key.data, *(reads[path] for path in new)))
        self[key] = known
        self.move_to_end(key)
        self._forget(list(self)[:-MAX_SHAPES])
        return key

    def of_family(self, family: TapeFamily) -> KnownShape:
        """What calls of this block at all sizes of `family` have shown; some were recorded, before there was one."""
        return self.of_families.setdefault(family, KnownShape(family.base, num_calls=2))

    def _forget(self, keys: list[CallKey]) -> None:
        for key in keys:
            del self[key]
            for follower in self.followers:
                follower.forget(key)

    def _state_of(self, block: nn.Module) -> int:
        """The number of the state that `block` is in; always the first one where states are not watched."""
        if not self._watches_state:
            return FIRST_STATE
        if self.state is None:
            self.state = PythonState(block)
        return self.state.number()


# The plain Python values that a block's modules hold: rates, scales, names, flags (rule R8).
#
# Replay gives operators the numbers that they were given when they were recorded. Training code changes such numbers
# now and then: a scale that grows, another active adapter, a dropout switched off. So each call asks here which state
# its block is in, and each state has tapes of its own.

FIRST_STATE = 0
"""The number of the state in which a block was seen first."""
INERT_AFTER = 3
"""Changes after which a value is looked at no more, if the block ran the same operators after each: a counter, say. A
scale that moves step by step has changed operators by then."""
SHORT_TEXT = 16
"""Calls in a state below which it was too short to be worth a tape: to record and verify takes as long as some ten."""
RESTLESS_AFTER = 4
"""Such states, one after the other, after which the block is left to torch's checkpoint, which needs no tape."""
MAX_STATES = 512
"""States a block remembers the numbers of; the least recently entered one goes, and is a new one when it comes again.
Blocks remember as many shapes."""

_SCALARS = frozenset({bool, int, float, str})
_MUTABLE = frozenset({dict, list, set})
_REGISTERS = frozenset(vars(nn.Module())) - {"training"}
"""What torch itself holds on a module: its children, parameters and hooks are looked at elsewhere."""


class PythonState:
    """The states that the modules of a block and their configurations were seen in, each with a number."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._ignored: set[str] = set()
        self._look()
        self._unused = count(FIRST_STATE)
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        """Of the states that it was in last, by digest: of the oldest no tape is left."""
        self._number = self._number_of(_digest(self._content))
        self._num_calls = 0
        self._is_new = self._follows_short_one = False
        self._num_short = 0
        self._num_inert: Counter[str] = Counter()
        self._effective: set[str] = set()
        self.changed: tuple[str, ...] = ()
        """Which values made the last state another one than that before."""

    @property
    def is_unstable(self) -> bool:
        """Whether one short state came after the other; what the block holds is looked at no more, then."""
        return self._num_short >= RESTLESS_AFTER

    def number(self) -> int:
        """The number of the state that the block is in, to be asked once per call."""
        self._num_calls += 1
        if not self.is_unstable and not self._seen.is_unchanged():
            self._enter()
        return self._number

    def look_again(self) -> None:
        """Take in modules that were put in the place of others."""
        if not self.is_unstable:
            self._enter()

    def learn(self, same_operators: bool) -> None:
        """Take in whether a call in this state ran the operators of a call in another one, given the same."""
        if not self._is_new:
            return
        self._is_new = False
        if not same_operators:
            self._num_short = self._num_short + 1 if self._follows_short_one else 0
            self._effective |= set(self.changed if len(self.changed) == 1 else ())
            return
        self._num_inert.update(self.changed)
        inert = {path for path in self.changed if self._num_inert[path] >= INERT_AFTER} - self._effective
        if inert:
            self._ignored |= inert
            self._look()
            self._numbers[_digest(self._content)] = self._number

    def _enter(self) -> None:
        before = self._content
        self._look()
        self.changed = tuple(path for path in before | self._content if before.get(path) != self._content.get(path))
        digest = _digest(self._content)
        if digest not in self._numbers:
            self._is_new, self._follows_short_one = True, self._num_calls < SHORT_TEXT
            self._num_calls = 0
        self._number = self._number_of(digest)

    def _number_of(self, digest: bytes) -> int:
        """The number of a state, which is the latest now."""
        number = self._numbers.get(digest)
        number = next(self._unused) if number is None else number
        note_latest(self._numbers, digest, number, MAX_STATES)
        return number

    def _look(self) -> None:
        self._content: dict[str, str] = {}
        self._seen = _Seen()
        for path, values in _holders(self._block):
            is_module = MODULES in values
            names = [name for name in values if not is_module or name not in _REGISTERS]
            names = [name for name in names if _is_plain(values[name]) and _join(path, name) not in self._ignored]
            self._content |= {_join(path, name): repr(values[name]) for name in names}
            # A configuration may name a thousand labels, which nobody changes one by one.
            self._seen.add(values, names, with_elements=is_module)


class _Seen:
    """Attributes as they were, to be compared with what they are, at some 0.1 microseconds for each."""

    def __init__(self) -> None:
        self._holders: list[dict[Any, Any]] = []
        self._names: list[Any] = []
        self._values: list[Any] = []
        self._containers: list[tuple[Any, tuple[Any, ...]]] = []

    def add(self, values: dict[Any, Any], names: Iterable[Any], with_elements: bool = False) -> None:
        for name in names:
            value = values[name]
            self._holders.append(values)
            self._names.append(name)
            self._values.append(value)
            if with_elements and type(value) in _MUTABLE:
                self._containers.append((value, tuple(value)))
            if with_elements and type(value) is dict:
                self.add(value, value)

    def is_unchanged(self) -> bool:
        """Whether they are the same objects: whoever changes one puts another in its place."""
        return all(map(is_, map(dict.get, self._holders, self._names), self._values)) and all(
            tuple(now) == before for now, before in self._containers
        )


def _holders(block: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each module of `block`, and each configuration on one, stands in it, and the attributes it has."""
    configurations: dict[int, tuple[str, dict[str, Any]]] = {}
    for path, module in block.named_modules():
        values = vars(module)
        yield path, values
        for name, value in values.items():
            if isinstance(value, PretrainedConfig):
                configurations.setdefault(id(value), (_join(path, name), vars(value)))
    yield from configurations.values()


def _is_plain(value: Any) -> bool:
    """Whether `value` is a scalar, or a container of nothing else."""
    if type(value) not in _MUTABLE and type(value) is not tuple:
        return type(value) in _SCALARS
    elements = (*value, *value.values()) if type(value) is dict else value
    return all(type(element) in _SCALARS for element in elements)


def _digest(content: dict[str, str]) -> bytes:
    """What tells contents apart: they are some 17 KiB, and a rate may move a thousand times in a run."""
    return hashlib.sha256(repr(sorted(content.items())).encode()).digest()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
