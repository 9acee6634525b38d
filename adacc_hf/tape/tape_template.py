"""Templates of tapes. A template is a tape with placeholders for its integers, such as tensor sizes and strides.

The tape of another batch size results from filling the placeholders with the integers of that size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adacc_hf.tape.tape import Blank, Geometry, Tape, TapeOperator, TapeValue, TensorRef, map_tensors


@dataclass(frozen=True, slots=True)
class _NumberPlaceholder:
    """Placeholder for an integer. `place` is the integer's index in the list that fills the template."""

    place: int


@dataclass(frozen=True, slots=True)
class _RefPlaceholder:
    """Placeholder for a tensor reference. `place` is its index in the list of the template's references."""

    place: int


@dataclass(frozen=True, slots=True)
class _BlankLike:
    """Placeholder for a `Blank`. `place` is the index of a tensor reference with the same geometry."""

    place: int
    device: torch.device


class TapeTemplate:
    """A tape with placeholders for its integers, such as tensor sizes.

    Tapes made by `fill` share with each other everything that does not depend on sizes. `places` contains one index for
    each integer of the tape, in order: where it is in the list that is passed to `fill`. By default, this list contains
    all integers.
    """

    def __init__(self, tape: Tape, places: list[int] | None = None) -> None:
        self.numbers: list[int] = []
        """The integers on the tape, in order."""
        self._places = places
        self._refs: dict[tuple[Any, ...], int] = {}
        """Index of each distinct tensor reference. The keys are (value, dtype, places of the sizes, of the strides and
        of the offset)."""
        self._values = [(self._number(value.nbytes), self._ref(value.ref).place) for value in tape.values]
        self._operators = [(self._tree(op.args), self._tree(op.kwargs)) for op in tape.operators]
        self._slots = [self._ref(slot).place for slot in tape.slots]
        self._rest = tape.structure, [(value.device, value.overwritten) for value in tape.values]
        tape.consumers(0)  # computed once, for the tapes of all sizes

    def digest(self) -> str:
        """Return a digest of the template. It is equal for tapes that differ only in integers, such as sizes."""
        parts = self._rest, self._values, self._operators, self._slots, list(self._refs)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

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
            sharing=base.sharing,
            identity=base.identity,
            structure=base.structure,
            digest=digest,
            recomputable=base.recomputable,
            equal=base.equal,
            is_unchecked=True,
            _consumers=base._consumers,
        )

    def _number(self, number: int) -> int:
        self.numbers.append(number)
        index = len(self.numbers) - 1
        return index if self._places is None else self._places[index]

    def _ref(self, ref: TensorRef) -> _RefPlaceholder:
        size, stride, offset = ref.geometry
        places = tuple(map(self._number, size)), tuple(map(self._number, stride)), self._number(offset)
        return _RefPlaceholder(self._refs.setdefault((ref.value, ref.dtype, *places), len(self._refs)))

    def _tree(self, tree: Any) -> Any:
        """Return a copy of `tree`, a part of the tape, with placeholders for its numbers and tensors."""
        return map_tensors(tree, (TensorRef, Blank, int), self._placeholder)

    def _placeholder(self, leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return self._ref(leaf)
        if isinstance(leaf, Blank):
            return _BlankLike(self._ref(TensorRef(-1, leaf.geometry, leaf.dtype)).place, leaf.device)
        return _NumberPlaceholder(self._number(leaf)) if type(leaf) is int else leaf


def _filled_template(tree: Any, at: Callable[[int], int], refs: list[TensorRef]) -> Any:
    """Return a copy of `tree` with its placeholders replaced: by the integers `at(place)`, or by the tensor references
    in `refs`."""

    def filled(placeholder: Any) -> Any:
        if isinstance(placeholder, _NumberPlaceholder):
            return at(placeholder.place)
        ref = refs[placeholder.place]
        is_blank = isinstance(placeholder, _BlankLike)
        return Blank(ref.geometry, ref.dtype, placeholder.device) if is_blank else ref

    return map_tensors(tree, (_RefPlaceholder, _NumberPlaceholder, _BlankLike), filled)
