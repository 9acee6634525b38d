"""Keys of a block's calls, and the shapes that they have shown: the tape of each key and its counts (rule R8)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from adacc_hf.artifacts.files import note_latest
from adacc_hf.tape.data_reads import Data, data_at
from adacc_hf.tape.guards import BlockPrograms, Untraceable, settings_of_torch
from adacc_hf.tape.inputs import Args, Kwargs, argument_layout, held_layout
from adacc_hf.tape.symbolic_tape import SymbolicTape
from adacc_hf.tape.tape import Tape

MAX_LAYOUTS = 64
"""Layouts of a block's own tensors that are remembered. The least recent one is dropped."""
MANY_LAYOUTS, CALLS_PER_LAYOUT = 8, 16
"""A block with this many layouts or more, and fewer calls for each, has a new layout at nearly every call."""
MAX_SHAPES = 512
"""Shapes that a block remembers. The least recently used one is dropped. Texts have hundreds of lengths, a tape and a
plan on it are some 130 KiB of Python objects, and recording a shape anew takes as long as some ten steps."""


class CallKey(NamedTuple):
    """Key of a call: two calls of one kind of block with equal keys run the same operators.

    For a block that cannot be traced this is a guess, which is compared (run/validation.py).
    """

    shape: Hashable
    """(layout of the tensor arguments, numbers that are inputs of the program, its number, settings of torch)."""
    data: tuple[Data | None, ...]
    """Data of the arguments that the block reads into Python."""
    layout: int
    """Hash of the layout of the block's own tensors (`held_layout`). A plan compares the tensors that it reads one by
    one (`ExecutionPlan.has_all`)."""


@dataclass(slots=True)
class KnownShape:
    """Tape and counts of a block's calls of one key, whatever plan they ran under."""

    tape: Tape
    num_calls: int = 1
    varies: bool = False
    """Whether calls ran other operators than the tape's, again and again."""


class Follower(Protocol):
    """An object that keeps an entry of its own for each key, such as a plan."""

    def forget(self, key: CallKey) -> None:
        """Drop the entry of `key`, if there is one."""


class KnownShapes(OrderedDict[CallKey, KnownShape]):
    """The shapes of a block by the keys of its calls, the latest last.

    All plans of a block share one object, and forget the keys that it forgets.
    """

    def __init__(self, untraceable: Untraceable | None = None) -> None:
        super().__init__()
        self._untraceable = untraceable
        """Paths of the model's blocks that cannot be traced. None if the block is alone."""
        self._programs: BlockPrograms | None = None
        """Those of the block. None before its first call."""
        self._layouts: OrderedDict[int, None] = OrderedDict()
        """Hashes of the layouts of the block's own tensors, the latest last."""
        self._layout = 0
        """The latest one."""
        self._num_layouts = self._num_calls = 0
        self._left: OrderedDict[CallKey, int] = OrderedDict()
        """Times that calls have left the tape of their key."""
        self._reads: tuple[tuple[Any, ...], ...] = ()
        """Paths of the arguments that the block reads into Python."""
        self._unseen: OrderedDict[CallKey, None] = OrderedDict()
        """Keys of calls with a known shape and new data that came once."""
        self.followers: WeakSet[Follower] = WeakSet()
        self.was_compared = False
        """Whether a call of the block was compared with a record, or recorded, in the run that it is in now."""
        self.of_families: WeakKeyDictionary[SymbolicTape, KnownShape] = WeakKeyDictionary()
        """Counts of calls at all sizes of a family."""

    @property
    def untraced(self) -> str | None:
        """The reason why the latest call has to be compared with its tape. None if guards vouch for the call."""
        return None if self._programs is None else self._programs.untraced

    def key(self, block: nn.Module, fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> CallKey:
        """Return the key of a call that is about to run. Ask once per call, before it runs."""
        if self._programs is None:
            self._programs = BlockPrograms(block, self._untraceable)
            self._note_layout(block)
        self._num_calls += 1
        program, numbers = self._programs.key(fn, args)
        data = tuple([data_at(path, args, kwargs) for path in self._reads])
        return CallKey((argument_layout(args, kwargs), numbers, program, settings_of_torch()), data, self._layout)

    def moved(self, key: CallKey, block: nn.Module) -> CallKey:
        """Return `key` with the present layout of the block's own tensors.

        It differs if weights were put into one storage, say, or if a table has grown.
        """
        self._note_layout(block)
        return key._replace(layout=self._layout)

    def _note_layout(self, block: nn.Module) -> None:
        self._layout = hash(held_layout(block))
        self._num_layouts += self._layout not in self._layouts
        note_latest(self._layouts, self._layout, None, MAX_LAYOUTS)

    @property
    def is_ever_moving(self) -> bool:
        """Return True if the block's own tensors have a new layout at nearly every call."""
        return self._num_layouts >= MANY_LAYOUTS and self._num_calls < CALLS_PER_LAYOUT * self._num_layouts

    def outdate(self, key: CallKey) -> None:
        """Forget the tape of `key`, which a call has left. The next call is recorded anew."""
        note_latest(self._left, key, self.num_left(key) + 1, MAX_SHAPES)
        self._forget([key])

    def num_left(self, key: CallKey) -> int:
        """Return how often calls of `key` have left their tapes."""
        return self._left.get(key, 0)

    def is_unseen(self, key: CallKey) -> bool:
        """Return True if a call has a known shape and data that comes for the first time.

        Recording takes memory, which no budget expects at a known shape, and time, which pays if the data comes again.
        """
        known_data = {known.data for known in self if known.shape == key.shape}
        if not known_data or key.data in known_data or key in self._unseen:
            return False
        note_latest(self._unseen, key, None, MAX_SHAPES)
        return True

    def add(self, key: CallKey, known: KnownShape) -> CallKey:
        """Add a recorded call. Return its key, with the data that its tape is the first to read."""
        reads = known.tape.reads
        new = [path for path in reads if path not in self._reads]
        if new:
            self._reads = (*self._reads, *new)
            # The keys of earlier records lack this data, on which their operators may depend too.
            self._forget(list(self))
            key = key._replace(data=(*key.data, *(reads[path] for path in new)))
        self[key] = known
        self.move_to_end(key)
        self._forget(list(self)[:-MAX_SHAPES])
        return key

    def of_family(self, family: SymbolicTape) -> KnownShape:
        """Return the counts of calls at all sizes of `family`. Records were made of some before there was a family."""
        return self.of_families.setdefault(family, KnownShape(family.base, num_calls=2))

    def _forget(self, keys: list[CallKey]) -> None:
        for key in keys:
            del self[key]
            for follower in self.followers:
                follower.forget(key)
