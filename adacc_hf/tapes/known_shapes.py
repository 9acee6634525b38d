"""What is known of a block's calls: a tape for each shape, data that the block reads into Python, and state of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from adacc_hf.latest import note_latest
from adacc_hf.tapes.call_inputs import Args, Kwargs, StatePaths, call_key, data_at, state_layout
from adacc_hf.tapes.data_reads import Data
from adacc_hf.tapes.family import TapeFamily
from adacc_hf.tapes.python_state import FIRST_STATE, PythonState
from adacc_hf.tapes.tape import Tape

MAX_SHAPES = 512
"""Shapes a block remembers; the least recently used one goes. A tape and a plan on it are some 130 KiB of Python
objects, and to record a shape anew takes as long as some ten steps: texts have hundreds of lengths."""


class Key(NamedTuple):
    """What the operators of a call depend on, as far as it is known."""

    shape: Hashable
    data: tuple[Data | None, ...]
    """Of the arguments that the block reads into Python."""
    state: int
    """The number of the state that the block's modules are in."""

    def given_to(self, block: nn.Module) -> Hashable:
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

    def forget(self, key: Key) -> None:
        """Let go of what is kept for `key`, if anything is."""


class KnownShapes(OrderedDict[Key, KnownShape]):
    """What a block's calls have shown, the latest last. All plans of a block share it, and forget what it forgets."""

    def __init__(self, watches_state: bool = True) -> None:
        super().__init__()
        self._watches_state = watches_state
        self.state: PythonState | None = None
        """Of the block, from its first call on."""
        self._reads: tuple[tuple[Any, ...], ...] = ()
        """Where the arguments are that any tape's Python reads."""
        self._paths: StatePaths | None = None
        self._strange: OrderedDict[Key, None] = OrderedDict()
        """Calls of known shapes that were given other data, once each."""
        self.followers: WeakSet[Follower] = WeakSet()
        self.was_compared = False
        """Whether a call of the block was compared with a record, or recorded, in the run that it is in now."""
        self.of_families: WeakKeyDictionary[TapeFamily, KnownShape] = WeakKeyDictionary()
        """What calls at all sizes of a family have shown."""

    def key(self, block: nn.Module, args: Args, kwargs: Kwargs) -> Key:
        """The key of a call that is about to run; to be asked once per call."""
        if self._paths is None or not self._paths.are_current():
            self._paths = StatePaths(block)
            if self.state is not None:
                self.state.look_again()
        data = tuple(data_at(path, args, kwargs) for path in self._reads)
        return Key(call_key(self._paths, args, kwargs), data, self._state_of(block))

    def is_strange(self, key: Key) -> bool:
        """Whether a call comes at a known shape with data that was never seen there.

        Recording takes memory, which is set aside where a shape is new, and time, which pays if the data comes again.
        """
        known_data = {known.data for known in self if known.shape == key.shape}
        if not known_data or key.data in known_data or key in self._strange:
            return False
        self.acquaint(key)
        return True

    def acquaint(self, key: Key) -> None:
        """Take a call of `key` for no strange one from now on."""
        note_latest(self._strange, key, None, MAX_SHAPES)

    def add(self, key: Key, known: KnownShape) -> Key:
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

    def _forget(self, keys: list[Key]) -> None:
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
