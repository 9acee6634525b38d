"""Symbolic tapes: one tape for all sizes, whose numbers are polynomials of the sizes of a call's arguments.

NOTE [Which sizes a symbolic tape serves] A block's Python may compare a size with 1, or with another number, such as
the length of a window. Dynamo's guards distinguish these sizes (`guards.py`): the sizes have different paths, and so
different symbolic tapes. No guard shows how an operator uses a size internally. On a GPU, attention's kernels depend on
whether a mask's last dimension is a multiple of 16, so a separate symbolic tape is used for multiples of 16 there.

The polynomials are fitted to recorded tapes. The first call at a new size is checked: backward compares the bits of
each tensor that it recomputes with the forward's (rule R7), because a number may follow no polynomial, and a library
may select another kernel for the size. Checked are the first AGREED new sizes, the 32nd, 64th ... new size, and any
size outside the range of the earlier sizes. Blocks with a common symbolic tape share this work: one of them is checked.
Every call also compares the layout of the tensors that autograd saves with the tape (rule R8). If records of one path
have different operators, each size is recorded.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adacc_hf.artifacts.polynomials import Basis, Column, Polynomial, independent_sizes
from adacc_hf.tape.replay_check import obtainable_values
from adacc_hf.tape.tape import Tape
from adacc_hf.tape.tape_template import TapeNumbers, TapeTemplate

ENOUGH_RECORDS = 3
"""Number of recorded tapes needed to fit the polynomials of a symbolic tape. Two sizes determine a polynomial, and a
third size checks it."""
MOST_RECORDS = 8
"""Maximum number of recorded tapes that polynomials are fitted to. If a number still has no fit, it follows no
polynomial, such as a length rounded up to a multiple of a window."""
AGREED = 16
"""Number of new sizes at which calls of a symbolic tape are checked. A number on the tape is a polynomial of the
sizes: a sum of at most three products of sizes. If the polynomial is right at AGREED sizes, it is assumed to be right
at all sizes between the smallest and the largest. A step function, such as rounding lengths up, would differ at one of
AGREED sizes."""
MOST_SIZES = 32
"""Maximum number of sizes whose tapes are cached for one symbolic tape (a tape for all sizes). Evaluating the symbolic
tape at a size again takes less than a millisecond."""


@dataclass(frozen=True, slots=True)
class CallSizes:
    """The key of a block's call, split into sizes and everything else."""

    size_class: Hashable
    """The key without sizes. Calls with an equal `size_class` may share a symbolic tape, which is one tape for all
    sizes."""
    dimensions: tuple[int, ...]
    """Sizes of tensors, and integers among the arguments."""
    layout: tuple[int, ...]
    """Strides and offsets of the tensors, which are polynomials of the sizes."""

    @classmethod
    def of(cls, key: Any, alignment: int) -> CallSizes:
        """Split `key`, a `CallKey`, into sizes and everything else.

        If `alignment` is not 1, multiples of `alignment` and all other sizes are in different size classes, so that
        their calls share no symbolic tape. The first dimension of a tensor with several dimensions does not count for
        this.
        """
        (tensors, plain, *settings), block_layout = key
        dimensions: list[int] = []
        layout: list[int] = []
        described = []
        for path, shape, place, dtype, requires_grad, alias in tensors:
            dimensions += shape
            is_strided = isinstance(place, tuple)
            if is_strided:
                layout += (*place[0], place[1])
            first = [_alignment_class(shape[0], 1)] if len(shape) > 1 else []
            sizes = (*first, *[_alignment_class(n, alignment) for n in shape[len(first) :]])
            described.append((path, sizes, None if is_strided else place, dtype, requires_grad, alias))
        rest = _without_numbers(plain, dimensions)
        return cls((tuple(described), rest, tuple(settings), block_layout), tuple(dimensions), tuple(layout))


def _alignment_class(size: int, alignment: int) -> int | str:
    """Return the class of a size: 0, 1, "aligned" (a multiple of `alignment`) or "odd".

    Calls share a symbolic tape only if the classes of their sizes are equal.
    """
    if size < 2:
        return size
    return "odd" if size % alignment else "aligned"  # strings, because True and False equal 1 and 0


def _without_numbers(tree: Any, numbers: list[int]) -> Any:
    """Replace the numbers above 1 in `tree`, a part of a call's key, by one text. Append them to `numbers`."""
    if isinstance(tree, tuple):
        return tuple([_without_numbers(item, numbers) for item in tree])
    if type(tree) is int and tree > 1:
        numbers.append(tree)
        return "number"
    return tree


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """Sizes and tape of one recorded call, a data point to which the polynomials of symbolic tapes are fitted."""

    sizes: CallSizes
    tape: Tape


class SymbolicTape:
    """One tape for all sizes of a size class: the numbers on the tape are polynomials of the sizes of a call's
    arguments.

    Use `SymbolicTape.of` to create a symbolic tape.
    """

    def __init__(self, records: Sequence[RecordedCall], expressions: _TapePolynomials, template: TapeTemplate) -> None:
        self._expressions, self._template = expressions, template
        self.tapes_by_size: OrderedDict[tuple[int, ...], Tape] = OrderedDict()
        """Tapes evaluated from this symbolic tape, by `CallSizes.dimensions`, the latest last. At most MOST_SIZES."""
        tapes = [record.tape for record in records]
        recomputable = frozenset.intersection(*(tape.recomputable for tape in tapes))
        equal = {v: e for v, e in tapes[0].equal.items() if all(tape.equal.get(v) == e for tape in tapes)}
        self.base = replace(tapes[0], recomputable=recomputable, equal=_recomputable_pairs(equal, recomputable))
        """The tape that plans are built for. The tapes of all sizes have the same values, operators and saved
        tensors."""
        self.is_active = True
        """True while calls at new sizes may run on tapes evaluated from this symbolic tape."""
        self._identity = hashlib.sha256(repr(identity_of(records)).encode()).hexdigest()
        """Digest of the recorded calls that the polynomials were fitted to. The digest of each evaluated tape contains
        it."""
        self._recorded = frozenset(record.sizes.dimensions for record in records)
        self._least = self._most = records[0].sizes.dimensions
        """For each dimension, the smallest size at which a call ran the operators of this symbolic tape. `_most`
        contains the largest size."""
        for record in records:
            self.extend(record.sizes)
        self.num_new = 0
        """Number of sizes at which a tape was evaluated so far, not counting the recorded sizes."""

    @classmethod
    def of(cls, records: Sequence[RecordedCall]) -> SymbolicTape | None:
        """Fit a symbolic tape to recorded calls that ran the same operators.

        Return None if a number on the tapes is not a polynomial of the sizes.
        """
        tapes = [record.tape for record in records]
        calls = [record.sizes.dimensions for record in records]
        symbols = independent_sizes(calls)
        if symbols is None:
            return None
        tape_numbers = [TapeNumbers(tape) for tape in tapes]
        size_numbers = [record.sizes.dimensions + record.sizes.layout for record in records]
        expressions = _TapePolynomials.of(symbols, calls, size_numbers, [numbers.numbers for numbers in tape_numbers])
        return None if expressions is None else cls(records, expressions, TapeTemplate(tapes[0], expressions.places))

    def forget_sizes(self) -> None:
        """Drop the cached tapes of all sizes. The tapes are evaluated again when needed."""
        self.tapes_by_size.clear()

    def tape_at(self, sizes: CallSizes, order: tuple[int, ...] | None) -> Tape | None:
        """Return the tape evaluated at `sizes`, or None if the polynomials are not valid at `sizes`.

        A new tape gets `order`, the order in which backward unpacks its saved tensors (`Tape.order`).
        """
        tape = self.tapes_by_size.get(sizes.dimensions)
        if tape is None:
            numbers = self._expressions.at(sizes)
            if numbers is None:
                return None
            tape = self.tapes_by_size[sizes.dimensions] = self._filled(numbers, sizes)
            tape.order = order
            if sizes.dimensions not in self._recorded:
                self._note_new(tape, sizes)
            if len(self.tapes_by_size) > MOST_SIZES:
                self.tapes_by_size.popitem(last=False)
        elif not self.covers(sizes):
            return None
        return tape

    def extend(self, sizes: CallSizes) -> None:
        """Extend the range of confirmed sizes: a call at `sizes` ran the operators of this symbolic tape."""
        self._least = tuple(map(min, self._least, sizes.dimensions))
        self._most = tuple(map(max, self._most, sizes.dimensions))

    def _spans(self, sizes: CallSizes) -> bool:
        return all(low <= n <= high for low, n, high in zip(self._least, sizes.dimensions, self._most, strict=True))

    def _note_new(self, tape: Tape, sizes: CallSizes) -> None:
        """Count a new size, and set whether the first call of this size is checked."""
        self.num_new += 1
        is_power_of_two = self.num_new & (self.num_new - 1) == 0
        tape.is_unchecked = is_power_of_two or self.num_new <= AGREED or not self._spans(sizes)

    def agrees(self, tape: Tape, sizes: CallSizes) -> bool:
        """Return True if `tape`, the record of a call of these `sizes`, equals the tape that is evaluated for the same
        sizes.

        The operators and all numbers, such as shapes and bytes, are compared. Return False if the polynomials are not
        valid at `sizes`.
        """
        numbers = self._expressions.at(sizes)
        if numbers is None:
            return False
        own, recorded = TapeNumbers(self._filled(numbers, sizes)), TapeNumbers(tape)
        return own.numbers == recorded.numbers and own.digest_without_numbers == recorded.digest_without_numbers

    def covers(self, sizes: CallSizes) -> bool:
        """Return True if a tape can be evaluated for a call of `sizes`. The polynomials then give exactly the
        dimensions and strides of this call."""
        return self._expressions.cover(sizes)

    def _filled(self, numbers: list[int], sizes: CallSizes) -> Tape:
        digest = f"{self._identity}@{'x'.join(map(str, sizes.dimensions))}"
        return self._template.fill(self.base, numbers, digest)

    def refuse(self, values: Collection[int]) -> None:
        """Exclude `values` from replay at all sizes, because replay does not recompute them exactly.

        Values that replay could compute only from `values` are excluded too.
        """
        recomputable = without_values(self.base, self.base.recomputable, values)
        self.base = replace(
            self.base, recomputable=recomputable, equal=_recomputable_pairs(self.base.equal, recomputable)
        )
        self.forget_sizes()


class _TapePolynomials:
    """The polynomials of a symbolic tape: one for each dimension and stride of a call, and one for each number on the
    tape.

    The variables of the polynomials, the symbols, are a few of the call's dimensions, which determine the other
    dimensions.
    """

    def __init__(
        self,
        symbols: tuple[int, ...],
        basis: Basis,
        size_polynomials: list[Polynomial],
        distinct: list[Polynomial],
        places: list[int],
    ) -> None:
        self._symbols, self._basis, self._size_polynomials, self._distinct = symbols, basis, size_polynomials, distinct
        self.places = places
        """For each number on the tape, the index of its polynomial. Numbers that are equal at all recorded sizes share
        a polynomial."""

    @classmethod
    def of(
        cls,
        symbols: tuple[int, ...],
        calls: Sequence[tuple[int, ...]],
        size_numbers: Sequence[tuple[int, ...]],
        numbers: Sequence[list[int]],
    ) -> _TapePolynomials | None:
        basis = Basis([tuple(call[p] for p in symbols) for call in calls])
        fitted: dict[Column, Polynomial] = {}
        size_columns = list(zip(*size_numbers, strict=True))
        columns = list(zip(*numbers, strict=True))
        distinct = list(dict.fromkeys(columns))
        for column in dict.fromkeys((*size_columns, *distinct)):
            polynomial = basis.fit(column)
            if polynomial is None:  # return early, because a failed fit is slow
                return None
            fitted[column] = polynomial
        size_fits, number_fits = ([fitted[column] for column in each] for each in (size_columns, distinct))
        index = {column: place for place, column in enumerate(distinct)}
        return cls(symbols, basis, size_fits, number_fits, [index[column] for column in columns])

    def at(self, sizes: CallSizes) -> list[int] | None:
        """Return the value of each distinct polynomial at the sizes of a call.

        Return None if the polynomials are not valid at these sizes (`cover`).
        """
        products = self._products(sizes)
        if not self._are_valid(sizes, products):
            return None
        numbers = [n for polynomial in self._distinct if (n := polynomial(products)) is not None]
        return numbers if len(numbers) == len(self._distinct) else None

    def cover(self, sizes: CallSizes) -> bool:
        """Return True if the polynomials are valid for a call of `sizes`: they give exactly the dimensions and strides
        of this call."""
        return self._are_valid(sizes, self._products(sizes))

    def _products(self, sizes: CallSizes) -> list[int]:
        return self._basis.products(tuple([sizes.dimensions[p] for p in self._symbols]))

    def _are_valid(self, sizes: CallSizes, products: list[int]) -> bool:
        numbers = sizes.dimensions + sizes.layout
        return all(
            polynomial(products) == number for polynomial, number in zip(self._size_polynomials, numbers, strict=True)
        )


class SizeClassRecords:
    """Recorded calls of one block in one size class, and the symbolic tape fitted to these calls.

    Calls that may share a symbolic tape, which is one tape for all sizes, are in the same size class.
    """

    def __init__(self) -> None:
        self.records: list[RecordedCall] = []
        """Recorded calls of different sizes. A call is left out if its tape is the one that `symbolic_tape` predicts
        for its sizes."""
        self._digest_without_numbers: str | None = None
        """`TapeNumbers.digest_without_numbers` of the tape recorded last. The recorded tapes must agree in this
        digest."""
        self.symbolic_tape: SymbolicTape | None = None
        self.has_failed = False
        """True if no symbolic tape will be fitted any more, because operators vary with the size or numbers follow no
        polynomial."""
        self.untrusted: Tape | None = None
        """One of the recorded tapes if at least two sizes were recorded and no recorded tape can be trusted. None
        otherwise."""
        self._num_untrusted = 0

    def add(self, record: RecordedCall, fit: Callable[[Sequence[RecordedCall]], SymbolicTape | None]) -> None:
        """Add a recorded call to this size class, and fit the symbolic tape again if the call adds information.

        `fit(records)` fits a symbolic tape (one tape for all sizes) to recorded calls. It returns None if no
        polynomials fit.
        """
        if record.tape.untrusted is not None:
            self._num_untrusted += 1
            is_first = not self.records and not self.has_failed
            self.untrusted = record.tape if self._num_untrusted >= ENOUGH_RECORDS - 1 and is_first else None
            return
        self.untrusted = None
        if self.has_failed:
            return
        digest, before = TapeNumbers(record.tape).digest_without_numbers, self._digest_without_numbers
        self._digest_without_numbers = digest
        if before not in (None, digest):
            self.symbolic_tape = None  # other blocks may still use it
            self._give_up()
        elif not self._is_redundant(record):
            self.records.append(record)
            self._set_symbolic_tape(fit(self.records) if len(self.records) >= ENOUGH_RECORDS else None)
            if self.symbolic_tape is None and len(self.records) >= MOST_RECORDS:
                self._give_up()

    def take(self, other: SizeClassRecords, fit: Callable[[Sequence[RecordedCall]], SymbolicTape | None]) -> None:
        """Add the recorded calls of `other` to this size class.

        `fit(records)` fits a symbolic tape (one tape for all sizes) to recorded calls. It returns None if no
        polynomials fit.
        """
        for record in other.records:
            self.add(record, fit)
        if other.has_failed:
            self._give_up()
        if not self.records:
            self.untrusted, self._num_untrusted = other.untrusted, other._num_untrusted

    def active_symbolic_tape(self) -> SymbolicTape | None:
        """Return the symbolic tape (one tape for all sizes), or None if calls at new sizes must not use it."""
        return self.symbolic_tape if self.symbolic_tape is not None and self.symbolic_tape.is_active else None

    def distrust(self, symbolic_tape: SymbolicTape) -> None:
        """Discard `symbolic_tape`, the tape for all sizes, because a call ran operators that are not on it.

        From now on, calls of each new size are recorded.
        """
        if self.symbolic_tape is symbolic_tape:
            self._give_up()

    def _is_redundant(self, record: RecordedCall) -> bool:
        """Return True if the recorded call `record` adds nothing: its sizes were recorded before, or the symbolic tape
        predicts its tape."""
        if any(earlier.sizes.dimensions == record.sizes.dimensions for earlier in self.records):
            return True
        symbolic_tape = self.active_symbolic_tape()
        return symbolic_tape is not None and symbolic_tape.agrees(record.tape, record.sizes)

    def _give_up(self) -> None:
        self._set_symbolic_tape(None)
        self.records, self.has_failed = [], True

    def _set_symbolic_tape(self, symbolic_tape: SymbolicTape | None) -> None:
        if self.symbolic_tape is not None and self.symbolic_tape is not symbolic_tape:
            self.symbolic_tape.is_active = False
        self.symbolic_tape = symbolic_tape


def without_values(tape: Tape, recomputable: frozenset[int], values: Collection[int]) -> frozenset[int]:
    """Return the values in `recomputable` that replay of `tape` can recompute although it never recomputes `values`."""
    excluded = recomputable.intersection(values)
    return obtainable_values(tape, recomputable - excluded, tape.saved_values()) if excluded else recomputable


def _recomputable_pairs(equal: dict[int, int], recomputable: frozenset[int]) -> dict[int, int]:
    return {v: other for v, other in equal.items() if v in recomputable and other in recomputable}


def identity_of(records: Sequence[RecordedCall]) -> Hashable:
    """Return a key of the recorded calls `records`, made of digests and sizes.

    If the records of several blocks have equal keys, these blocks share a symbolic tape (one tape for all sizes).
    """
    return tuple((record.tape.digest, record.sizes) for record in records)
