"""Templates of tapes. A template is a tape with placeholders for its integers, such as tensor sizes and strides.

The tape of another batch size results from filling the placeholders with the integers of that size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adacc_hf.tape.tape import Blank, Geometry, Tape, TapeOperator, TapeValue, TensorRef


class TapeNumbers:
    """The integers on a tape, in order, and a digest of everything else.

    A symbolic tape (one tape for all sizes) is fitted to the integers. Integers and digest together are used to compare
    tapes.
    """

    def __init__(self, tape: Tape) -> None:
        self.numbers: list[int] = []
        parts: list[Any] = [tape.structure]
        for value in tape.values:
            self.numbers.append(value.nbytes)
            parts.append((self._geometry(value.ref), value.device, value.overwritten))
        for operator in tape.operators:
            parts.append((self._without_numbers(operator.args), self._without_numbers(operator.kwargs)))
        parts += [(slot.value, self._geometry(slot)) for slot in tape.slots]
        self.digest_without_numbers: str = hashlib.sha256(repr(parts).encode()).hexdigest()
        """Digest of the tape without its integers. It is equal for tapes that differ only in sizes."""

    def _geometry(self, ref: TensorRef | Blank) -> tuple[int, torch.dtype]:
        size, stride, offset = ref.geometry
        self.numbers += (*size, *stride, offset)
        return len(size), ref.dtype

    def _without_numbers(self, tree: Any) -> Any:
        """Return `tree`, a part of the tape, without its integers. The integers are appended to `numbers`."""
        if isinstance(tree, TensorRef):
            return tree.value, self._geometry(tree)
        if isinstance(tree, Blank):
            return tree.device, self._geometry(tree)
        if type(tree) is int:
            self.numbers.append(tree)
            return int
        if isinstance(tree, (tuple, list)):
            return [self._without_numbers(item) for item in tree]
        if isinstance(tree, dict):
            return [(name, self._without_numbers(item)) for name, item in tree.items()]
        return tree


@dataclass(frozen=True, slots=True)
class _NumberPlaceholder:
    """Placeholder in a template for an integer. `place` is the integer's index in the list that fills the template."""

    place: int


@dataclass(frozen=True, slots=True)
class _RefPlaceholder:
    """Placeholder in a template for a tensor reference. `place` is its index in the list of the template's
    references."""

    place: int


@dataclass(frozen=True, slots=True)
class _BlankLike:
    """Placeholder in a template for a `Blank`, the layout of an argument whose elements the operator does not read.

    `place` is the index of a tensor reference with the same geometry.
    """

    place: int
    device: torch.device


class TapeTemplate:
    """A tape with placeholders for its integers, such as tensor sizes.

    Tapes made by `fill` share with each other everything that does not depend on sizes. `places` contains one index for
    each integer of the tape, in order. The index says where the integer is in the list that is passed to `fill`.
    """

    def __init__(self, tape: Tape, places: list[int]) -> None:
        self._numbers = iter(places)
        self._refs: dict[tuple[Any, ...], int] = {}
        """Index of each distinct tensor reference. The keys are (value, dtype, places of the sizes, of the strides and
        of the offset)."""
        self._values = [(next(self._numbers), self._ref(value.ref).place) for value in tape.values]
        self._operators = [(self._tree(op.args), self._tree(op.kwargs)) for op in tape.operators]
        self._slots = [self._ref(slot).place for slot in tape.slots]
        tape.consumers(0)  # computed once, for the tapes of all sizes

    def fill(self, base: Tape, numbers: list[int], digest: str) -> Tape:
        """Return a tape in which the integers `numbers` replace the placeholders. Everything else is shared with the
        tape `base`."""
        at = numbers.__getitem__
        geometries: dict[Any, Geometry] = {}
        refs = []
        for value, dtype, *places in self._refs:
            size, stride, offset = key = tuple(places)
            geometry = geometries.get(key)
            if geometry is None:
                geometry = geometries[key] = tuple(map(at, size)), tuple(map(at, stride)), at(offset)
            refs.append(TensorRef(value, geometry, dtype))
        values = [
            TapeValue(
                v.index, at(nbytes), refs[ref], v.device, v.source, v.producer, v.name, v.overwritten
            )  # positional for speed: a hundred values at every new size
            for v, (nbytes, ref) in zip(base.values, self._values, strict=True)
        ]
        operators = [
            TapeOperator(
                op.index, op.target, _filled_template(args, at, refs), _filled_template(kwargs, at, refs), op.outputs,
                op.mutations, op.random, op.module, op.generator, op.is_collective, op._inputs,
            )
            for op, (args, kwargs) in zip(base.operators, self._operators, strict=True)
        ]  # fmt: skip
        return Tape(
            block_class=base.block_class,
            values=values,
            operators=operators,
            slots=[refs[ref] for ref in self._slots],
            function_slots=base.function_slots,
            identity=base.identity,
            structure=base.structure,
            digest=digest,
            recomputable=base.recomputable,
            equal=base.equal,
            is_unchecked=True,
            _consumers=base._consumers,
        )

    def _ref(self, ref: TensorRef) -> _RefPlaceholder:
        size, stride, _ = ref.geometry
        places = tuple(next(self._numbers) for _ in size), tuple(next(self._numbers) for _ in stride)
        key = ref.value, ref.dtype, *places, next(self._numbers)
        return _RefPlaceholder(self._refs.setdefault(key, len(self._refs)))

    def _tree(self, tree: Any) -> Any:
        """Return a copy of `tree`, a part of the tape, with placeholders for integers, tensor references and `Blank`s.

        A `Blank` is the layout of an argument whose elements the operator does not read.
        """
        if isinstance(tree, TensorRef):
            return self._ref(tree)
        if isinstance(tree, Blank):
            return _BlankLike(self._ref(TensorRef(-1, tree.geometry, tree.dtype)).place, tree.device)
        if type(tree) is int:
            return _NumberPlaceholder(next(self._numbers))
        if isinstance(tree, tuple):
            items = [self._tree(item) for item in tree]
            return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
        if isinstance(tree, list):
            return [self._tree(item) for item in tree]
        if isinstance(tree, dict):
            return {name: self._tree(item) for name, item in tree.items()}
        return tree


def _filled_template(tree: Any, at: Callable[[int], int], refs: list[TensorRef]) -> Any:
    """Return a copy of `tree` with its placeholders replaced: by the integers `at(place)`, or by the tensor references
    in `refs`."""
    kind = type(tree)
    if kind is _RefPlaceholder:
        return refs[tree.place]
    if kind is _NumberPlaceholder:
        return at(tree.place)
    if kind is _BlankLike:
        return Blank(refs[tree.place].geometry, refs[tree.place].dtype, tree.device)
    if kind is tuple:
        return tuple([_filled_template(item, at, refs) for item in tree])
    if kind is list:
        return [_filled_template(item, at, refs) for item in tree]
    if kind is dict:
        return {name: _filled_template(item, at, refs) for name, item in tree.items()} if tree else tree
    if isinstance(tree, tuple):
        return kind(*[_filled_template(item, at, refs) for item in tree])
    return tree
