"""Tape families: one tape for all sizes, whose numbers are expressions of the sizes of a call's arguments.

NOTE [Which sizes a family serves]
A block's Python may compare a size with 1, or with a number of its own, such as the length of a window. Dynamo's guards
tell such sizes apart (`guards.py`): they belong to different programs, and so to different families. No guard tells
what an operator does inside with a size. On a GPU attention's kernels depend on whether a mask's last dimension is a
multiple of 16, so that such sizes have a family of their own there.

The numbers of a tape are polynomials of the sizes, fitted to records. Calls are compared with their tape operator by
operator (run/validation.py) if they are the first at one of AGREED new sizes, at a few sizes after these, or at a size
beyond those seen so far, on one of the blocks that share the family. Every call compares the tensors that autograd
saves (rule R8). If records of one program have different operators, each size is recorded. Replay is compared bit for
bit at the 1st, 2nd, 4th, 8th ... new size (rule R7).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adacc_hf.artifacts.size_model import Basis, Column, Polynomial, independent
from adacc_hf.tape.replay_check import obtainable
from adacc_hf.tape.tape import BITS, Tape
from adacc_hf.tape.tape_template import TapeNumbers, TapeTemplate

ENOUGH_RECORDS = 3
"""Records that a family needs. Two sizes give the expression of a number, the third one checks it."""
MOST_RECORDS = 8
"""Most records that expressions are fitted to. Numbers that no expression fits by then follow no polynomial, such as a
length that is rounded up to a window's."""
AGREED = 16
"""New sizes at which a call is compared with the tape. An expression is a sum of at most three products of sizes. If it
is right at so many sizes, it is right at all sizes between the smallest and largest of them: a rule with a step in it,
as for lengths that are rounded up, has shown by then."""
MOST_SIZES = 32
"""Sizes whose tapes are cached. Evaluating one anew takes less than a millisecond."""


@dataclass(frozen=True, slots=True)
class CallSizes:
    """Sizes in a call's key, and the rest of the key."""

    outline: Hashable
    """The rest of the key. Calls of one family have equal outlines."""
    dimensions: tuple[int, ...]
    """Sizes of tensors, whole numbers among the arguments, and whole numbers that the block reads into Python."""
    layout: tuple[int, ...]
    """Strides and offsets of the tensors. In a family they follow from the sizes."""

    @classmethod
    def of(cls, key: Any, alignment: int) -> CallSizes:
        """Split a `CallKey`. Unless `alignment` is 1, the outline tells its multiples from other sizes, except for the
        first of several dimensions of a tensor."""
        (tensors, plain, *settings), data, layout_of_held = key
        dimensions: list[int] = []
        layout: list[int] = []
        described = []
        for path, shape, place, dtype, requires_grad, alias in tensors:
            dimensions += shape
            is_strided = isinstance(place, tuple)
            if is_strided:
                layout += (*place[0], place[1])
            first = [_class_of(shape[0], 1)] if len(shape) > 1 else []
            sizes = (*first, *[_class_of(n, alignment) for n in shape[len(first) :]])
            described.append((path, sizes, None if is_strided else place, dtype, requires_grad, alias))
        rest = _without_numbers(plain, dimensions, 1)
        data = _without_numbers(data, dimensions, alignment)
        return cls((tuple(described), rest, tuple(settings), data, layout_of_held), tuple(dimensions), tuple(layout))


def _class_of(size: int, alignment: int) -> int | str:
    if size < 2:
        return size
    return "odd" if size % alignment else "aligned"  # no truth values: these are equal to 0 and 1


def _without_numbers(tree: Any, numbers: list[int], alignment: int) -> Any:
    if isinstance(tree, tuple):
        return tuple([_without_numbers(item, numbers, alignment) for item in tree])
    if type(tree) is int and tree > 1:
        numbers.append(tree)
        return _class_of(tree, alignment)
    return tree


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One recorded call."""

    sizes: CallSizes
    tape: Tape


class SymbolicTape:
    """The tapes of a block's calls at all sizes of one outline. Make one with `SymbolicTape.of`."""

    def __init__(self, records: Sequence[RecordedCall], expressions: _Expressions, template: TapeTemplate) -> None:
        self._expressions, self._template = expressions, template
        self._sized: OrderedDict[tuple[int, ...], Tape] = OrderedDict()
        tapes = [record.tape for record in records]
        recomputable = frozenset.intersection(*(tape.recomputable for tape in tapes))
        equal = {v: e for v, e in tapes[0].equal.items() if all(tape.equal.get(v) == e for tape in tapes)}
        self.base = replace(tapes[0], recomputable=recomputable, equal=_kept(equal, recomputable))
        """The tape that plans are made for. The tapes of all sizes have its values, operators and slots."""
        self.is_in_force = True
        """Whether calls at new sizes may still run on tapes of this family."""
        self._identity = hashlib.sha256(repr(identity_of(records)).encode()).hexdigest()
        """Part of its tapes' digests, which tells them from tapes of a family that was made of fewer records."""
        self._recorded = frozenset(record.sizes.dimensions for record in records)
        self._least = self._most = records[0].sizes.dimensions
        """The least and the greatest sizes, in each dimension, at which calls ran as their tape says."""
        for record in records:
            self.extend(record.sizes)
        self._num_new = 0
        """Number of sizes so far that were not recorded."""

    @classmethod
    def of(cls, records: Sequence[RecordedCall]) -> SymbolicTape | None:
        """Return the family of calls that ran the same operators; None if no expressions fit their numbers."""
        tapes = [record.tape for record in records]
        calls = [record.sizes.dimensions for record in records]
        symbols = independent(calls)
        if symbols is None:
            return None
        columns = [TapeNumbers(tape) for tape in tapes]
        given = [record.sizes.dimensions + record.sizes.layout for record in records]
        expressions = _Expressions.of(symbols, calls, given, [column.numbers for column in columns])
        return None if expressions is None else cls(records, expressions, TapeTemplate(tapes[0], expressions.places))

    def forget_sizes(self) -> None:
        """Drop the cached tapes, so that those of all sizes are evaluated anew."""
        self._sized.clear()

    def tape_at(self, sizes: CallSizes, order: tuple[int, ...] | None) -> Tape | None:
        """Return the tape of a call of these sizes, with `Tape.order`; None if the family does not cover them."""
        known = self._sized.get(sizes.dimensions)
        if known is None:
            numbers = self._expressions.at(sizes)
            if numbers is None:
                return None
            known = self._sized[sizes.dimensions] = self._filled(numbers, sizes)
            known.order = order
            if sizes.dimensions not in self._recorded:
                self._note_new(known, sizes)
            if len(self._sized) > MOST_SIZES:
                self._sized.popitem(last=False)
        elif not self.covers(sizes):
            return None
        return known

    def extend(self, sizes: CallSizes) -> None:
        """Note sizes at which a call ran as its tape says."""
        self._least = tuple(map(min, self._least, sizes.dimensions))
        self._most = tuple(map(max, self._most, sizes.dimensions))

    def _spans(self, sizes: CallSizes) -> bool:
        return all(low <= n <= high for low, n, high in zip(self._least, sizes.dimensions, self._most, strict=True))

    def _note_new(self, tape: Tape, sizes: CallSizes) -> None:
        """Count a new size. Replay is compared at the 1st, 2nd, 4th, 8th ... one (rule R7)."""
        self._num_new += 1
        if self._num_new & (self._num_new - 1) == 0:
            tape.due_check = BITS
        elif self._num_new > AGREED and self._spans(sizes):
            tape.due_check = None

    def agrees(self, tape: Tape, sizes: CallSizes) -> bool:
        """Return True if the tape of a recorded call of these sizes is the one that the family evaluates."""
        numbers = self._expressions.at(sizes)
        if numbers is None:
            return False
        own, recorded = TapeNumbers(self._filled(numbers, sizes)), TapeNumbers(tape)
        return own.numbers == recorded.numbers and own.outline == recorded.outline

    def covers(self, sizes: CallSizes) -> bool:
        """Return True if dimensions and layout follow from the symbols as in the family's records."""
        return self._expressions.cover(sizes)

    def _filled(self, numbers: list[int], sizes: CallSizes) -> Tape:
        digest = f"{self._identity}@{'x'.join(map(str, sizes.dimensions))}"
        return self._template.fill(self.base, numbers, digest)

    def refuse(self, values: Collection[int]) -> None:
        """Never replay `values` again, at any size, nor values that could only be replayed from them."""
        recomputable = without_values(self.base, self.base.recomputable, values)
        self.base = replace(self.base, recomputable=recomputable, equal=_kept(self.base.equal, recomputable))
        self.forget_sizes()


class _Expressions:
    """The polynomials of a family: for the sizes of a call, and for the numbers of a tape.

    Their variables, the symbols, are a few of the dimensions. The others follow from these.
    """

    def __init__(
        self,
        symbols: tuple[int, ...],
        basis: Basis,
        given: list[Polynomial],
        distinct: list[Polynomial],
        places: list[int],
    ) -> None:
        self._symbols, self._basis, self._given, self._distinct = symbols, basis, given, distinct
        self.places = places
        """For each of the tape's numbers, its index among the distinct ones."""

    @classmethod
    def of(
        cls,
        symbols: tuple[int, ...],
        calls: Sequence[tuple[int, ...]],
        given: Sequence[tuple[int, ...]],
        numbers: Sequence[list[int]],
    ) -> _Expressions | None:
        basis = Basis([tuple(call[p] for p in symbols) for call in calls])
        fitted: dict[Column, Polynomial] = {}
        given_columns = list(zip(*given, strict=True))
        columns = list(zip(*numbers, strict=True))
        distinct = list(dict.fromkeys(columns))
        for column in dict.fromkeys((*given_columns, *distinct)):
            polynomial = basis.fit(column)
            if polynomial is None:  # stop here, since it takes long to find out that none fits
                return None
            fitted[column] = polynomial
        given_fits, number_fits = ([fitted[column] for column in each] for each in (given_columns, distinct))
        index = {column: place for place, column in enumerate(distinct)}
        return cls(symbols, basis, given_fits, number_fits, [index[column] for column in columns])

    def at(self, sizes: CallSizes) -> list[int] | None:
        """Return the distinct numbers of a tape of these sizes; None if the polynomials do not cover the sizes."""
        products = self._products(sizes)
        if not self._is_given(sizes, products):
            return None
        numbers = [n for polynomial in self._distinct if (n := polynomial(products)) is not None]
        return numbers if len(numbers) == len(self._distinct) else None

    def cover(self, sizes: CallSizes) -> bool:
        """Return True if dimensions and layout follow from the symbols."""
        return self._is_given(sizes, self._products(sizes))

    def _products(self, sizes: CallSizes) -> list[int]:
        return self._basis.products(tuple([sizes.dimensions[p] for p in self._symbols]))

    def _is_given(self, sizes: CallSizes, products: list[int]) -> bool:
        numbers = sizes.dimensions + sizes.layout
        return all(polynomial(products) == number for polynomial, number in zip(self._given, numbers, strict=True))


class SeenSizes:
    """Recorded calls of one block at the sizes of one outline, and the family that they make."""

    def __init__(self) -> None:
        self.records: list[RecordedCall] = []
        """Recorded calls of different sizes, without those that ran as the family said."""
        self._outline: str | None = None
        """Outline of their tapes (`TapeNumbers.outline`)."""
        self.family: SymbolicTape | None = None
        self.is_given_up = False
        """Whether no family is looked for: operators differ from size to size, or their numbers follow no rule."""
        self.untrusted: Tape | None = None
        """A tape that must not be used, if every size so far had such a tape."""
        self._num_untrusted = 0

    def add(self, record: RecordedCall, make: Callable[[Sequence[RecordedCall]], SymbolicTape | None]) -> None:
        """Add a recorded call; `make` returns the family of calls that ran the same operators."""
        if record.tape.untrusted is not None:
            self._num_untrusted += 1
            is_first = not self.records and not self.is_given_up
            self.untrusted = record.tape if self._num_untrusted >= ENOUGH_RECORDS - 1 and is_first else None
            return
        self.untrusted = None
        if self.is_given_up:
            return
        outline, before = TapeNumbers(record.tape).outline, self._outline
        self._outline = outline
        if before not in (None, outline):
            self.family = None  # other blocks may follow it still
            self._give_up()
        elif not self._has_foreseen(record):
            self.records.append(record)
            self._follow(make(self.records) if len(self.records) >= ENOUGH_RECORDS else None)
            if self.family is None and len(self.records) >= MOST_RECORDS:
                self._give_up()

    def take(self, other: SeenSizes, make: Callable[[Sequence[RecordedCall]], SymbolicTape | None]) -> None:
        """Add the calls that `other` has recorded."""
        for record in other.records:
            self.add(record, make)
        if other.is_given_up:
            self._give_up()
        if not self.records:
            self.untrusted, self._num_untrusted = other.untrusted, other._num_untrusted

    def family_in_force(self) -> SymbolicTape | None:
        """Return the family that serves calls at new sizes, if there is one."""
        return self.family if self.family is not None and self.family.is_in_force else None

    def distrust(self, family: SymbolicTape) -> None:
        """Have each size of `family` recorded from now on: a call did not run as its expressions say."""
        if self.family is family:
            self._give_up()

    def _has_foreseen(self, record: RecordedCall) -> bool:
        """Return True if a record tells nothing new: its sizes were recorded, or the family agrees with it."""
        if any(known.sizes.dimensions == record.sizes.dimensions for known in self.records):
            return True
        family = self.family_in_force()
        return family is not None and family.agrees(record.tape, record.sizes)

    def _give_up(self) -> None:
        self._follow(None)
        self.records, self.is_given_up = [], True

    def _follow(self, family: SymbolicTape | None) -> None:
        if self.family is not None and self.family is not family:
            self.family.is_in_force = False
        self.family = family


def without_values(tape: Tape, recomputable: frozenset[int], values: Collection[int]) -> frozenset[int]:
    """Return `recomputable` without `values`, and without values that could only be replayed from them."""
    gone = recomputable.intersection(values)
    return obtainable(tape, recomputable - gone, tape.saved_values()) if gone else recomputable


def _kept(equal: dict[int, int], recomputable: frozenset[int]) -> dict[int, int]:
    """Return the pairs of `equal` whose values can both be replayed still."""
    return {v: other for v, other in equal.items() if v in recomputable and other in recomputable}


def identity_of(records: Sequence[RecordedCall]) -> Hashable:
    """Return the key by which blocks share a family: the same tapes at the same sizes."""
    return tuple((record.tape.digest, record.sizes) for record in records)
