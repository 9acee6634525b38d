"""The key of a block's call, and what is known of the calls of each key: their tape, how often they ran (rule R8)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from adacc_hf.artifacts.files import note_latest
from adacc_hf.tape.call_inputs import Args, Data, Given, Kwargs, argument_layout, data_at, held_layout
from adacc_hf.tape.family import TapeFamily
from adacc_hf.tape.guards import RESTLESS_AFTER, SHORT_LIFE, BlockPrograms, settings_of_torch
from adacc_hf.tape.tape import Tape

MAX_LAYOUTS = 64
"""Layouts of a block's own tensors that are told apart. The least recently seen one goes."""
MAX_SHAPES = 512
"""Shapes a block remembers; the least recently used one goes. A tape and a plan on it are some 130 KiB of Python
objects, and to record a shape anew takes as long as some ten steps: texts have hundreds of lengths."""


class CallKey(NamedTuple):
    """What the operators of a call depend on, as far as it is known."""

    shape: Hashable
    """(layout of the tensor arguments, numbers that the program is given, the program, settings of torch)."""
    data: tuple[Data | None, ...]
    """Data of the arguments that the block reads into Python."""
    layout: int = 0
    """The number of the layout that the block's own tensors have (`KnownShapes.given_to`)."""


@dataclass(slots=True)
class KnownShape:
    """What a block's calls of one key have shown, whatever plan they ran under."""

    tape: Tape
    num_calls: int = 1
    varies: bool = False
    """Whether calls ran other operators than the tape's, again and again."""
    num_left: int = 0
    """Times that a call left the tape that it had then."""


class Follower(Protocol):
    """What keeps something of its own for each shape, as a plan does."""

    def forget(self, key: CallKey) -> None:
        """Let go of what is kept for `key`, if anything is."""


class KnownShapes(OrderedDict[CallKey, KnownShape]):
    """What a block's calls have shown, the latest last. All plans of a block share it, and forget what it forgets."""

    def __init__(self) -> None:
        super().__init__()
        self._programs: BlockPrograms | None = None
        """Of the block, from its first call on."""
        self._layouts: OrderedDict[Hashable, int] = OrderedDict()
        """Numbers of the layouts that the block's own tensors had, the latest last."""
        self._layout: Hashable = None
        """The latest of them."""
        self._number = self._num_layouts = 0
        self._num_calls = 0
        self._left: OrderedDict[CallKey, int] = OrderedDict()
        self._reads: tuple[tuple[Any, ...], ...] = ()
        """Where the arguments are that any tape's Python reads."""
        self._unseen: OrderedDict[CallKey, None] = OrderedDict()
        """Calls of known shapes that were given other data, once each."""
        self.followers: WeakSet[Follower] = WeakSet()
        self.was_compared = False
        """Whether a call of the block was compared with a record, or recorded, in the run that it is in now."""
        self.of_families: WeakKeyDictionary[TapeFamily, KnownShape] = WeakKeyDictionary()
        """What calls at all sizes of a family have shown."""

    @property
    def untraced(self) -> str | None:
        """Why the latest call has to be compared with its tape operator by operator; None if guards vouch for it."""
        return None if self._programs is None else self._programs.untraced

    def key(self, block: nn.Module, fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> CallKey:
        """Return the key of a call that is about to run; to be asked once per call, before it runs."""
        if self._programs is None:
            self._programs = BlockPrograms(block)
        self._num_calls += 1
        program, numbers = self._programs.key(fn, args)
        data = tuple([data_at(path, args, kwargs) for path in self._reads])
        return CallKey((argument_layout(args, kwargs), numbers, program, settings_of_torch()), data, self._number)

    def given_to(self, key: CallKey, block: nn.Module) -> Given:
        """Return what of `key` blocks of one kind have in common: each of them counts its layouts by itself."""
        if self._layout is None:
            self.moved(key, block)
        return key.shape, key.data, self._layout

    def moved(self, key: CallKey, block: nn.Module) -> CallKey:
        """Return the key of the call with the layout that the block's own tensors have now.

        Weights may have been put into one storage, and tables may have grown. `key` if they lie as they did.
        """
        # Its hash is enough: a plan compares each tensor that it reads (`CompiledPlan.has_all`).
        self._layout = layout = hash(held_layout(block))
        number = self._layouts.get(layout)
        if number is None:
            number, self._num_layouts = self._num_layouts, self._num_layouts + 1
        note_latest(self._layouts, layout, number, MAX_LAYOUTS)
        self._number = number
        return key._replace(layout=number)

    @property
    def is_restless(self) -> bool:
        """Return True if what hangs on the block lies elsewhere at nearly every call."""
        return self._num_layouts >= RESTLESS_AFTER and self._num_calls < SHORT_LIFE * self._num_layouts

    def outdate(self, key: CallKey) -> None:
        """Forget the tape of `key`, which a call has left, so that the next call is recorded anew."""
        note_latest(self._left, key, self[key].num_left, MAX_SHAPES)
        self._forget([key])

    def num_left(self, key: CallKey) -> int:
        """Return how often calls of `key` have left their tapes."""
        return self._left.get(key, 0)

    def is_unseen(self, key: CallKey) -> bool:
        """Whether a call comes at a known shape with data that was never seen there.

        Recording takes memory, which is set aside where a shape is new, and time, which pays if the data comes again.
        """
        known_data = {known.data for known in self if known.shape == key.shape}
        if not known_data or key.data in known_data or key in self._unseen:
            return False
        note_latest(self._unseen, key, None, MAX_SHAPES)
        return True

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
