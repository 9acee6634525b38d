"""Symbolic tapes: one tape for all sizes, whose numbers are polynomials of the sizes of a call's arguments.

NOTE [Which sizes a symbolic tape serves] A block's Python may compare a size with 1, or with another number, such as
the length of a window. Dynamo's guards distinguish these sizes (`guards.py`): the sizes have different paths, and so
different symbolic tapes. No guard shows how an operator uses a size internally. On a GPU, attention's kernels depend on
whether a mask's last dimension is a multiple of 16, so a separate symbolic tape is used for multiples of 16 there.

A symbolic tape is one tape for all sizes. Its polynomials are fitted to recorded tapes. The first call at a new size is
checked: backward compares the bits of each tensor that it recomputes with the forward's (rule R7), because a number may
follow no polynomial, and a library may select another kernel for the size. Checked are the first AGREED new sizes, the
8th, 16th ... new size, and any size outside the range of the earlier sizes. Blocks with a common symbolic tape share
this work: one of them is checked. Every call also compares the layout of the tensors that autograd saves with the tape
(rule R8). If records of one path have different operators, each size is recorded.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.polynomials import Basis, Column, Polynomial, independent_sizes
from adacc_hf.tape.tape import Blank, Tape, TensorRef, map_tensors

ENOUGH_RECORDS = 3
"""Number of recorded tapes needed for a fit. Two sizes determine a polynomial, and a third checks it."""
MOST_RECORDS = 8
"""Maximum number of recorded tapes for a fit. If no fit succeeds with them, a number on the tapes is no polynomial of
the sizes, such as a length rounded up to a multiple of a window."""
AGREED = 4
"""Number of new sizes that are all checked. A polynomial, a sum of at most three products of sizes, that is right there
and at the recorded sizes is assumed to be right at most sizes in between. Each check takes tens of milliseconds."""
MOST_SIZES = 32
"""Maximum number of sizes whose tapes are cached for one symbolic tape. Making another one takes a few milliseconds."""


@dataclass(frozen=True, slots=True)
class CallSizes:
    """The key of a block's call, split into sizes and everything else."""

    size_class: Hashable
    """The key without sizes. Calls with an equal `size_class` may share a symbolic tape."""
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
    """One tape for all sizes of a size class: its numbers are polynomials of the sizes of a call's arguments."""

    def __init__(self, records: Sequence[RecordedCall], expressions: _TapePolynomials) -> None:
        self._expressions, (self._digest, _) = expressions, describe_numbers(records[0].tape)
        self.tapes_by_size: OrderedDict[CallSizes, Tape] = OrderedDict()
        """Tapes evaluated from this symbolic tape, the latest last. At most MOST_SIZES."""
        tapes = [record.tape for record in records]
        recomputable = frozenset.intersection(*(tape.recomputable for tape in tapes))
        common = set.intersection(*(set(tape.equal.items()) for tape in tapes))
        equal = {v: e for v, e in tapes[0].equal.items() if (v, e) in common and recomputable.issuperset((v, e))}
        self.base = replace(tapes[0], recomputable=recomputable, equal=equal)
        """The tape that plans are built for. The tapes of all sizes have its values, operators and saved tensors."""
        self.is_active = True
        """True while calls at new sizes may run on tapes evaluated from this symbolic tape."""
        self._identity = hashlib.sha256(repr(identity_of(records)).encode()).hexdigest()
        """Digest of the recorded calls, a part of the digest of each evaluated tape."""
        self._recorded = frozenset(record.sizes.dimensions for record in records)
        self._least = self._most = records[0].sizes.dimensions
        """For each dimension, the smallest and largest size at which a call ran the operators of this tape."""
        for record in records:
            self.extend(record.sizes)
        self.num_new = 0
        """Number of sizes at which a tape was evaluated so far, not counting the recorded sizes."""

    @classmethod
    def of(cls, records: Sequence[RecordedCall]) -> SymbolicTape | None:
        """Fit a symbolic tape to recorded calls that ran the same operators. Return None if a number on the tapes is
        not a polynomial of the sizes."""
        expressions = _TapePolynomials.of(records)
        return None if expressions is None else cls(records, expressions)

    def tape_at(self, sizes: CallSizes, order: tuple[int, ...] | None) -> Tape | None:
        """Return the tape evaluated at `sizes`, or None if the polynomials are not valid at `sizes`.

        A new tape gets `order`, the order in which backward unpacks its saved tensors (`Tape.order`).
        """
        tape = self.tapes_by_size.get(sizes)
        if tape is None:
            numbers = self._expressions.at(sizes)
            if numbers is None:
                return None
            digest = f"{self._identity}@{'x'.join(map(str, sizes.dimensions))}"
            in_order = iter(numbers)
            tape = _renumbered(self.base, lambda _: next(in_order))
            tape.digest, tape.order, tape.is_unchecked = digest, order, True
            put_latest(self.tapes_by_size, sizes, tape, MOST_SIZES)
            if sizes.dimensions not in self._recorded:
                self._note_new(tape, sizes)
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

    def agrees(self, tape: Tape, sizes: CallSizes) -> bool | None:
        """Return True if `tape`, the record of a call of these `sizes`, equals the tape that is evaluated for the same
        sizes, in its operators and all numbers. Return None if the polynomials are not valid at `sizes`."""
        numbers = self._expressions.at(sizes)
        return None if numbers is None else describe_numbers(tape) == (self._digest, numbers)


@dataclass(frozen=True, slots=True)
class _TapePolynomials:
    """The polynomials of a symbolic tape: of each dimension and stride of a call, and of each number on the tape."""

    symbols: tuple[int, ...]
    """Variables of the polynomials: indices of a few dimensions of the call that determine the others."""
    basis: Basis
    of_sizes: list[Polynomial]
    distinct: list[Polynomial]
    places: list[int]
    """For each number on the tape, the index of its polynomial. Numbers that are equal at all recorded sizes share a
    polynomial."""

    @classmethod
    def of(cls, records: Sequence[RecordedCall]) -> _TapePolynomials | None:
        calls = [record.sizes.dimensions for record in records]
        symbols = independent_sizes(calls)
        if symbols is None:
            return None
        basis = Basis([tuple(call[p] for p in symbols) for call in calls])
        fitted: dict[Column, Polynomial] = {}
        size_columns = list(zip(*(each.sizes.dimensions + each.sizes.layout for each in records), strict=True))
        columns = list(zip(*(describe_numbers(each.tape)[1] for each in records), strict=True))
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
        """Return the numbers on the tape at the sizes of a call, in order. Return None if the polynomials do not give
        exactly the dimensions and strides of this call."""
        products = self.basis.products(tuple([sizes.dimensions[p] for p in self.symbols]))
        pairs = zip(self.of_sizes, sizes.dimensions + sizes.layout, strict=True)
        if not all(polynomial(products) == number for polynomial, number in pairs):
            return None
        numbers = [n for polynomial in self.distinct if (n := polynomial(products)) is not None]
        return [numbers[place] for place in self.places] if len(numbers) == len(self.distinct) else None


Fit = Callable[[Sequence[RecordedCall]], SymbolicTape | None]
"""Function that fits a symbolic tape to recorded calls. It returns None if no polynomials fit."""


class SizeClassRecords:
    """Recorded calls of one block in one size class, and the symbolic tape that `fit` made of these calls."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self.records: list[RecordedCall] = []
        """Recorded calls of different sizes, without those whose tape `symbolic_tape` predicts."""
        self._digest: str | None = None
        """Digest (`describe_numbers`) of the tape recorded last, in which all recorded tapes must agree."""
        self.symbolic_tape: SymbolicTape | None = None
        self.has_failed = False
        """True if no symbolic tape will be fitted any more, because operators vary with the size or numbers follow no
        polynomial."""
        self.untrusted: Tape | None = None
        """A recorded tape if at least two sizes were recorded and no recorded tape can be trusted. None otherwise."""
        self._num_untrusted = 0

    def add(self, record: RecordedCall) -> None:
        """Add a recorded call, and fit the symbolic tape again if the call adds information."""
        if record.tape.untrusted is not None:
            self._num_untrusted += 1
            is_first = not self.records and not self.has_failed
            self.untrusted = record.tape if self._num_untrusted >= ENOUGH_RECORDS - 1 and is_first else None
            return
        self.untrusted = None
        if self.has_failed:
            return
        (digest, _), before = describe_numbers(record.tape), self._digest
        self._digest = digest
        if before not in (None, digest):
            self.symbolic_tape = None  # other blocks may still use it
            self._give_up()
        elif not self._is_redundant(record):
            self.records.append(record)
            self._set_symbolic_tape(self._fit(self.records) if len(self.records) >= ENOUGH_RECORDS else None)
            if self.symbolic_tape is None and len(self.records) >= MOST_RECORDS:
                self._give_up()

    def take(self, other: SizeClassRecords) -> None:
        """Merge `other` into this size class."""
        for record in other.records:
            self.add(record)
        if other.has_failed:
            self._give_up()
        if not self.records:
            self.untrusted, self._num_untrusted = other.untrusted, other._num_untrusted

    def active_symbolic_tape(self) -> SymbolicTape | None:
        """Return the symbolic tape, or None if calls at new sizes must not use it."""
        return self.symbolic_tape if self.symbolic_tape is not None and self.symbolic_tape.is_active else None

    def distrust(self, symbolic_tape: SymbolicTape) -> None:
        """Discard `symbolic_tape`, because a call ran operators that are not on it. Each new size is then recorded."""
        if self.symbolic_tape is symbolic_tape:
            self._give_up()

    def _is_redundant(self, record: RecordedCall) -> bool:
        """Return True if the sizes of `record` were recorded before, or the symbolic tape predicts its tape."""
        if any(earlier.sizes.dimensions == record.sizes.dimensions for earlier in self.records):
            return True
        symbolic_tape = self.active_symbolic_tape()
        return symbolic_tape is not None and bool(symbolic_tape.agrees(record.tape, record.sizes))

    def _give_up(self) -> None:
        self._set_symbolic_tape(None)
        self.records, self.has_failed = [], True

    def _set_symbolic_tape(self, symbolic_tape: SymbolicTape | None) -> None:
        if self.symbolic_tape is not None and self.symbolic_tape is not symbolic_tape:
            self.symbolic_tape.is_active = False
        self.symbolic_tape = symbolic_tape


def describe_numbers(tape: Tape) -> tuple[str, list[int]]:
    """Return (digest, integers) of a tape. Tapes that differ only in integers, such as sizes, have equal digests. The
    order of the integers is that of `_renumbered`."""
    numbers: list[int] = []

    def take(number: int) -> int:
        numbers.append(number)
        return 0

    rest = _renumbered(tape, take)
    values = [(value.ref, value.device, value.overwritten) for value in rest.values]
    parts = rest.structure, values, [(op.args, op.kwargs) for op in rest.operators], rest.slots
    return hashlib.sha256(repr(parts).encode()).hexdigest(), numbers


def _renumbered(tape: Tape, number: Callable[[int], int]) -> Tape:
    """Return a copy of `tape` with `number(n)` in place of each integer n. `number` is called in a fixed order."""

    def with_ref(ref: TensorRef) -> TensorRef:
        size, stride, offset = ref.geometry
        return TensorRef(ref.value, (tuple(map(number, size)), tuple(map(number, stride)), number(offset)), ref.dtype)

    def with_leaf(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return with_ref(leaf)
        if isinstance(leaf, Blank):
            return replace(leaf, geometry=with_ref(TensorRef(-1, leaf.geometry, leaf.dtype)).geometry)
        return number(leaf) if type(leaf) is int else leaf

    values = [replace(value, nbytes=number(value.nbytes), ref=with_ref(value.ref)) for value in tape.values]
    operators = []
    for operator in tape.operators:
        args, kwargs = map_tensors((operator.args, operator.kwargs), (TensorRef, Blank, int), with_leaf)
        operators.append(replace(operator, args=args, kwargs=kwargs))
    return replace(tape, values=values, operators=operators, slots=[with_ref(slot) for slot in tape.slots])


def identity_of(records: Sequence[RecordedCall]) -> Hashable:
    """Return a key of the recorded calls `records`. Blocks whose records have equal keys share a symbolic tape."""
    return tuple((record.tape.digest, record.sizes) for record in records)
