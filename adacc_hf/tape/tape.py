"""The tape: the record of one block's operators, storages and saved slots.

A *value* is one storage at one version: an in-place operator reads a value and makes the next one. Views need no
operator, since a tensor is recorded as its value with size, stride and offset. Everything is static, so a tape
recorded once can be replayed at any later call with the same shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from math import prod
from typing import Any

import torch

from adacc_hf.kernels._layout import is_dense
from adacc_hf.torch_glue.private import OpOverload, op_name

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, stride and storage offset, in elements."""

COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
)
"""Namespaces of operators that other ranks take part in."""

OPERATORS, BITS = "operators", "bits"
"""Comparisons of a call with its tape: of each operator, and of the bits of its replay too (rule R7)."""


@dataclass(frozen=True, slots=True, repr=False)
class TensorRef:
    """A tensor of the recorded call: a value and the way it is viewed."""

    value: int
    geometry: Geometry
    dtype: torch.dtype

    def __repr__(self) -> str:
        """As a dataclass has it, which digests are made of, without its guard against references to itself."""
        return f"TensorRef(value={self.value!r}, geometry={self.geometry!r}, dtype={self.dtype!r})"


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor of which an operator reads no element: replay gives it another one that lies alike."""

    geometry: Geometry
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes that its elements reach over."""
        size, stride, _ = self.geometry
        return self.dtype.itemsize * (1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)))


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value that the block did not make is found anew at each call (rule R12)."""

    place: str
    """"argument", "parameter", "buffer", "attached" or "module" for what else hangs on a parameter or a module
    (inputs.py), "generator" for the state of the default generator at a moment of the call, or "unknown" for a
    tensor reached from elsewhere."""
    path: tuple[Any, ...]
    """Argument: position or keyword, then indices into nested containers. Parameter, buffer: its name in the block.
    Attached, module: the parameter's or module's name, then attributes and indices. Generator: how many tensors
    autograd had saved by then."""

    def __str__(self) -> str:
        return f"{self.place} {'.'.join(str(part) for part in self.path)}".strip()


@dataclass(slots=True)
class TapeValue:
    """One storage at one version, with the tensor it was first seen as."""

    index: int
    nbytes: int
    """Bytes of the whole storage."""
    ref: TensorRef
    """The tensor that the operator returned, or that was passed in; replay calls it the value's base."""
    device: torch.device
    source: Source | None
    """None for a value that an operator of the block makes."""
    producer: int | None = None
    name: str = ""
    overwritten: bool = False
    """Whether a later operator of the block changed the storage in place, so that this version is gone."""

    @property
    def is_encodable(self) -> bool:
        """Whether encoding the base stores the value whole: it is dense, all of its storage, and never overwritten."""
        size, stride, offset = self.ref.geometry
        return (
            not self.overwritten
            and offset == 0
            and is_dense(size, stride)
            and prod(size) * self.ref.dtype.itemsize == self.nbytes
        )


@dataclass(slots=True)
class TapeOperator:
    """One ATen call that made or changed storages."""

    index: int
    target: Any
    """An `OpOverload`, or a `FunctionTarget` (function_operators.py)."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, int], ...]
    """(position among the flattened results, value made) for results in fresh storages."""
    mutations: tuple[tuple[int, int], ...]
    """(value read, value made) for storages changed in place."""
    random: bool
    """Whether it drew random numbers."""
    module: str
    generator: int | None = None
    """The value that holds the state of the generator that it drew from, if replay may draw again (rule R5)."""
    _inputs: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    prepared: Any = field(default=None, init=False, repr=False, compare=False)
    """The `PreparedOperator` of its first replay (tape/replay.py)."""

    @property
    def name(self) -> str:
        return str(self.target)

    @property
    def short_name(self) -> str:
        """What it does, whichever overload of it does so, in place or not: "softmax" of aten::_softmax.out."""
        name = op_name(self.target) if isinstance(self.target, OpOverload) else self.target.__name__
        return name.strip("_")

    @property
    def is_attention(self) -> bool:
        """Whether it is fused attention: what that drops follows from its sizes alone, whatever it reads."""
        return self.short_name.startswith("scaled_dot_product")

    @property
    def is_function(self) -> bool:
        """Whether it is an `autograd.Function`, whose own operators are not on the tape."""
        return not isinstance(self.target, OpOverload)

    @property
    def allocates(self) -> bool:
        """Whether all that it does is to take memory, whose content nobody knows."""
        return self.short_name.startswith(("empty", "new_empty"))

    @property
    def is_collective(self) -> bool:
        """Whether other ranks take part in it."""
        return self.target.namespace in COLLECTIVES

    @property
    def may_run_again(self) -> bool:
        """Whether replay may run it: what it drew can be drawn again, and no other rank took part in it (rules R5,
        R13)."""
        return (not self.random or self.generator is not None) and not self.is_collective

    def inputs(self) -> tuple[int, ...]:
        """Values it reads, each once, in the order of its arguments; the generator's state comes last."""
        if self._inputs is None:
            read = dict.fromkeys(ref.value for ref in tensor_refs((self.args, self.kwargs)))
            self._inputs = tuple(read if self.generator is None else [*read, self.generator])
        return self._inputs

    def blanks(self) -> list[Blank]:
        """The tensors among its arguments that it reads no element of."""
        return [leaf for leaf in leaves(self.args, self.kwargs) if isinstance(leaf, Blank)]

    def made(self) -> list[int]:
        """Values it makes: fresh storages and new versions."""
        return [value for _, value in self.outputs] + [value for _, value in self.mutations]

    def signature(self) -> tuple[Any, ...]:
        """What it does, but for which values it does it to."""
        positions = tuple(position for position, _ in self.outputs)
        return self.name, len(self.inputs()), positions, len(self.mutations), self.random


@dataclass
class Tape:
    """The record of one block at one shape."""

    block_class: str
    values: list[TapeValue]
    operators: list[TapeOperator]
    slots: list[TensorRef]
    """The tensors autograd saved, in order."""
    function_slots: frozenset[int] = frozenset()
    """Slots that autograd Functions written in Python have saved, whose backward may write into them (rule R6)."""
    untrusted: str | None = None
    """Why the tape must not be used (data read into Python), or None."""
    reads: dict[tuple[Any, ...], bytes | tuple[int, ...]] = field(default_factory=dict)
    """The data of the arguments that the block read into Python, by their paths: only calls with the same fit."""
    sharing: tuple[tuple[int, Source, Geometry], ...] = ()
    """(value, source, geometry) of further tensors on the storage of a value: flattened or tied weights."""
    identity: str = ""
    """Digest of the block's class, parameters and settings: equal for all calls of a block."""
    structure: str = ""
    """Digest of the operators and how they hang together, without sizes and constants."""
    digest: str = ""
    """Digest with sizes and constants: tapes with equal digests replay alike."""
    recomputable: frozenset[int] = frozenset()
    """Values that replay was verified to recompute bit for bit (rule R7)."""
    equal: dict[int, int] = field(default_factory=dict)
    """Values that an earlier saved one can stand for, mapped to it: see `equal_values`."""
    order: tuple[int, ...] | None = None
    """Order in which backward asks for the slots, each once, as far as it was seen."""
    due_check: str | None = None
    """The comparison that the next call has to pass: OPERATORS, or BITS. None for a recorded tape, and for one that was
    evaluated for a size where a call has passed, or calls of enough other sizes have."""
    _consumers: dict[int, list[int]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What policies name: equal for blocks that may share one plan, sizes included.

        Digests joined by "-": structure, sizes, identity, and what the block was given.
        """
        sizes = _digest([value.nbytes for value in self.values])
        given = [value for value in self.values if self.is_block_input(value.index)]
        read = sorted((repr(path), data) for path, data in self.reads.items())
        call = _digest([(str(value.source), value.ref) for value in given] + read)
        return f"{self.structure[:24]}-{sizes[:8]}-{self.identity[:8]}-{call[:8]}"

    @property
    def has_collectives(self) -> bool:
        return any(operator.is_collective for operator in self.operators)

    def is_block_input(self, value: int) -> bool:
        source = self.values[value].source
        return source is not None and source.place == "argument"

    def is_module_state(self, value: int) -> bool:
        source = self.values[value].source
        return source is not None and source.place in ("parameter", "buffer", "attached", "module")

    def is_generator_state(self, value: int) -> bool:
        source = self.values[value].source
        return source is not None and source.place == "generator"

    def is_held_elsewhere(self, value: int) -> bool:
        """Whether a value is neither made by the block nor given to it: parameter, buffer, a tensor in an attribute."""
        source = self.values[value].source
        return source is not None and source.place not in ("argument", "generator")

    def drawing(self) -> list[tuple[int, int, torch.device]]:
        """(tensors saved by then, value, device of the generator) of each state that something recomputable is drawn
        from."""
        found = []
        for operator in self.operators:
            made = operator.made()
            if operator.generator is not None and not self.recomputable.isdisjoint(made):
                source = self.values[operator.generator].source
                assert source is not None  # it says when the state was taken
                found.append((source.path[0], operator.generator, self.values[made[0]].device))
        return found

    def saved_values(self) -> list[int]:
        """Values that slots hold, each once, in the order they were saved."""
        return list(dict.fromkeys(slot.value for slot in self.slots))

    def consumers(self, value: int) -> list[int]:
        """Operators that read `value`."""
        if not self._consumers:
            for operator in self.operators:
                for read in operator.inputs():
                    self._consumers.setdefault(read, []).append(operator.index)
        return self._consumers.get(value, [])

    def seal(self, identity: list[Any]) -> None:
        """Compute the digests; `identity` is what tells the block from others besides its class."""
        self.identity = _digest([self.block_class, *identity])
        self.structure = _digest([self.identity, self._wiring()])
        constants = [repr((operator.args, operator.kwargs)) for operator in self.operators]
        slots, reads = [repr(slot) for slot in self.slots], sorted(map(repr, self.reads))
        outside = [repr(value.ref) for value in self.values if value.source is not None and value.source.path]
        sharing = [(value, str(source), geometry) for value, source, geometry in self.sharing]
        self.digest = _digest([self.structure, constants, slots, outside, sharing, *reads])

    def with_reads(self, reads: dict[tuple[Any, ...], bytes | tuple[int, ...]]) -> Tape:
        """The tape of a call of the same operators that read other data."""
        return self if self.reads == reads else replace(self, reads=reads)

    def values_in(self, other: Tape) -> tuple[dict[int, int], bool]:
        """(for each value of operators that `other` runs too, the one of `other` that is the same; whether all are).

        What autograd saves may differ, and with it the order in which values were first seen. A value is the same only
        if the operator that made it is: a product with a mask is no product with a sigmoid.
        """
        same: dict[int, int] = {}
        matched: dict[int | None, int | None] = {None: None}
        own_of: dict[int, int] = {}
        calls, others = ([(op.module, *op.signature()) for op in tape.operators] for tape in (self, other))
        is_whole = calls == others
        for begin, other_begin, number in SequenceMatcher(None, calls, others, autojunk=False).get_matching_blocks():
            for place in range(number):
                matched[begin + place] = other_begin + place
                own, theirs = self.operators[begin + place], other.operators[other_begin + place]
                for value, found in zip([*own.inputs(), *own.made()], [*theirs.inputs(), *theirs.made()], strict=True):
                    is_made_alike = matched.get(self.values[value].producer, -1) == other.values[found].producer
                    is_free = value not in same and found not in own_of
                    is_new = is_free and is_made_alike and self._has_source_of(value, other, found)
                    if is_new:
                        same[value], own_of[found] = found, value
                    is_whole &= is_new or same.get(value) == found
        return same, is_whole

    def _has_source_of(self, value: int, other: Tape, found: int) -> bool:
        if self.is_generator_state(value):  # taken after other slots, where autograd saves others
            return other.is_generator_state(found)
        return str(self.values[value].source) == str(other.values[found].source)

    def _wiring(self) -> list[Any]:
        operators = [(op.name, list(op.inputs()), op.outputs, op.mutations, op.random) for op in self.operators]
        sources = [str(value.source) for value in self.values if value.source is not None]
        return [operators, sources, [slot.value for slot in self.slots]]


def tensor_refs(tree: Any) -> Iterator[TensorRef]:
    """The tensor references in nested tuples, lists and dicts."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, TensorRef))


def leaves(*trees: Any) -> list[Any]:
    """What nested tuples, lists and dicts hold, in order; all that operators take and give.

    It is asked for at each operator of a recorded call: torch's `tree_leaves` looks up each container in a registry.
    """
    found: list[Any] = []
    _collect(trees, found)
    return found


def _collect(trees: Iterable[Any], found: list[Any]) -> None:
    for tree in trees:
        if isinstance(tree, (tuple, list)):
            _collect(tree, found)
        elif isinstance(tree, dict):
            _collect(tree.values(), found)
        else:
            found.append(tree)


def map_tensors(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`tree` with every instance of `kind` in nested tuples, lists and dicts replaced by `change(instance)`."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, tuple):
        items = [map_tensors(item, kind, change) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [map_tensors(item, kind, change) for item in tree]
    if isinstance(tree, dict):
        return {key: map_tensors(item, kind, change) for key, item in tree.items()}
    return tree


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of one storage that shows all of it: sparse ones are not, nor those with scales."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def geometry_of(tensor: torch.Tensor) -> Geometry:
    # torch declares SymInt too, which comes to no record.
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
