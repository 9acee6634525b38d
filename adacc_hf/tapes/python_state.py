"""The plain Python values that a block's modules hold: rates, scales, names, flags (rule R8).

Replay gives operators the numbers that they were given when they were recorded. Training code changes such numbers now
and then: a scale that grows, another active adapter, a dropout switched off. So each call asks here which state its
block is in, and each state has tapes of its own.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import count
from operator import is_
from typing import Any

from torch import nn

from adacc_hf.compat import PretrainedConfig
from adacc_hf.latest import note_latest

FIRST_STATE = 0
"""The number of the state in which a block was seen first."""
INERT_AFTER = 3
"""Changes after which a value is looked at no more, if the block ran the same operators after each: a counter, say. A
scale that moves step by step has changed operators by then."""
SHORT = 16
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
    def is_restless(self) -> bool:
        """Whether one short state came after the other; what the block holds is looked at no more, then."""
        return self._num_short >= RESTLESS_AFTER

    def number(self) -> int:
        """The number of the state that the block is in, to be asked once per call."""
        self._num_calls += 1
        if not self.is_restless and not self._seen.is_unchanged():
            self._enter()
        return self._number

    def look_again(self) -> None:
        """Take in modules that were put in the place of others."""
        if not self.is_restless:
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
            self._is_new, self._follows_short_one = True, self._num_calls < SHORT
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
            is_module = "_modules" in values
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
