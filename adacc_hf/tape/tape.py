"""Tape: the record of one block's operators, storages and saved tensors.

A *value* is one storage at one version: an in-place operator reads a value and makes the next version. Views are not
operators, because a tensor is recorded as its value with size, stride and offset. A tape has no control flow, so a tape
that was recorded once can be replayed at any later call with the same shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from math import prod
from typing import Any

import torch

from adacc_hf.artifacts.exact_recompute_rules import decisions, is_index
from adacc_hf.kernels._layout import is_dense
from adacc_hf.torch_glue.private import OpOverload, op_name
from adacc_hf.torch_glue.tensors import Checksum

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, stride and storage offset of a tensor, counted in elements."""


@dataclass(frozen=True, slots=True, repr=False)
class TensorRef:
    """Reference to a tensor of the recorded call: a view of a value (one storage at one version)."""

    value: int
    geometry: Geometry
    dtype: torch.dtype

    @property
    def is_index(self) -> bool:
        return is_index(str(self.dtype).removeprefix("torch."), self.geometry[0])

    def __repr__(self) -> str:
        """Return the text of `dataclass`, which digests of tapes contain, faster: without a check for recursion."""
        return f"TensorRef(value={self.value!r}, geometry={self.geometry!r}, dtype={self.dtype!r})"


@dataclass(frozen=True, slots=True)
class Blank:
    """Layout of a tensor argument whose elements the operator does not read. Replay passes another tensor."""

    geometry: Geometry
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes from the first element of the argument to the last, including both."""
        size, stride, _ = self.geometry
        return self.dtype.itemsize * (1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)))


@dataclass(frozen=True, slots=True)
class Source:
    """Place where a call finds a tensor that no operator on the tape computes (rule R12)."""

    place: str
    """Kind of the place: "argument", "parameter" or "buffer"; "attached" or "module" for a tensor that is stored on a
    parameter or module without being registered (inputs.py); "generator" for the default random generator's state at a
    moment of the call; "unknown" for any other tensor."""
    path: tuple[Any, ...]
    """Path at the place. For an argument: position or keyword, then indices into nested containers. For a parameter or
    buffer: its name in the block. For an attached tensor: the parameter's or module's name, then attributes and
    indices. For a generator's state: number of tensors that autograd had saved before."""

    def __str__(self) -> str:
        return f"{self.place} {'.'.join(str(part) for part in self.path)}".strip()


@dataclass(slots=True)
class TapeValue:
    """Value on a tape: one storage at one version, with the first tensor that was recorded on the storage."""

    index: int
    nbytes: int
    """Bytes of the whole storage."""
    ref: TensorRef
    """The first recorded tensor on the storage. Replay represents the value by a tensor of this layout, its base."""
    device: torch.device
    source: Source | None
    """Where a call finds a value that existed before it. None for a value that an operator of the block computes."""
    producer: int | None = None
    """Index of the operator that computes the value, or None."""
    name: str = ""
    overwritten: bool = False
    """True if a later operator of the block changed the storage in place, so that this version no longer exists."""

    @property
    def place(self) -> str | None:
        """Kind of the place where a call finds the value (`Source.place`). None if an operator computes it."""
        return None if self.source is None else self.source.place

    def is_freed(self, base: torch.Tensor) -> bool:
        """Return True if the memory of the recorded tensor `base` was freed: its storage is smaller than recorded."""
        return base.untyped_storage().nbytes() < self.nbytes

    @property
    def is_encodable(self) -> bool:
        """True if the value's first recorded tensor is dense, fills its storage, and is never overwritten."""
        size, stride, offset = self.ref.geometry
        return (
            not self.overwritten
            and offset == 0
            and is_dense(size, stride)
            and prod(size) * self.ref.dtype.itemsize == self.nbytes
        )


@dataclass(slots=True)
class TapeOperator:
    """Operator on a tape: one ATen call, or one `autograd.Function`, that created or changed storages."""

    index: int
    target: Any
    """The function to call: an `OpOverload`, or a `FunctionTarget` (function_operators.py)."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, int], ...]
    """(position among the flattened results, value index) of each result in a new storage."""
    mutations: tuple[tuple[int, int], ...]
    """(old value, new value) of each storage that the operator changed in place."""
    random: bool
    """True if the operator drew random numbers."""
    module: str
    """Path of the submodule that ran the operator, or "" for the block itself."""
    generator: int | None = None
    """Index of the value that is the random generator's state before the draw. None if the operator draws no random
    numbers, or if replay cannot draw the same numbers again, for example numbers from a user's own generator (rule
    R5)."""
    is_collective: bool = False
    """True if the operator involves other ranks. The arguments on the tape are then only the tensors, without process
    groups."""
    _inputs: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    prepared: Any = field(default=None, init=False, repr=False, compare=False)
    """The `PreparedOperator` of this operator, made at the operator's first replay (tape/replay.py)."""

    @property
    def name(self) -> str:
        return str(self.target)

    @property
    def short_name(self) -> str:
        """Name of the ATen operator without overload and underscores: "softmax" for aten::_softmax.out."""
        return short_name(self.target)

    @property
    def is_attention(self) -> bool:
        """True for fused attention. Its random draws for dropout depend only on sizes, not on data."""
        return self.short_name.startswith("scaled_dot_product")

    @property
    def is_function(self) -> bool:
        """True for an `autograd.Function`, whose inner operators are not on the tape."""
        return not isinstance(self.target, OpOverload)

    @property
    def allocates(self) -> bool:
        """True if the operator only allocates memory and leaves it uninitialized, as `aten.empty` does."""
        return self.short_name.startswith(("empty", "new_empty"))

    @property
    def may_run_again(self) -> bool:
        """True if replay may run the operator. False if the same random numbers cannot be drawn again (rule R5), for a
        collective, because other ranks might not take part (rule R13), and for a module that runs in tiles (groups of
        rows)."""
        if self.is_function and not self.target.may_run_again:
            return False
        return (not self.random or self.generator is not None) and not self.is_collective

    def inputs(self) -> tuple[int, ...]:
        """Return the values that the operator reads, each once, in argument order, the generator's state last."""
        if self._inputs is None:
            read = dict.fromkeys(ref.value for ref in tensor_refs((self.args, self.kwargs)))
            self._inputs = tuple(read if self.generator is None else [*read, self.generator])
        return self._inputs

    def blanks(self) -> list[Blank]:
        """Return the tensor arguments whose elements the operator does not read."""
        return [leaf for leaf in leaves(self.args, self.kwargs) if isinstance(leaf, Blank)]

    def results(self) -> list[int]:
        """Return the values that the operator creates: first new storages, then new versions of changed ones."""
        return [value for _, value in self.outputs] + [value for _, value in self.mutations]

    def signature(self) -> tuple[Any, ...]:
        """Return a description of the operator that does not depend on value indices."""
        positions = tuple(position for position, _ in self.outputs)
        return self.name, len(self.inputs()), positions, len(self.mutations), self.random


@dataclass
class Tape:
    """Record of one call of a block: its operators, its values, and the tensors saved for backward."""

    block_class: str
    values: list[TapeValue]
    operators: list[TapeOperator]
    slots: list[TensorRef]
    """Tensors that autograd saved for backward, in the order of saving."""
    function_slots: frozenset[int] = frozenset()
    """Indices of the tensors that `autograd.Function`s saved. The Python backward of such a Function may write into its
    tensors, and therefore gets copies of tensors that replay reads (rule R6)."""
    untrusted: str | None = None
    """The reason why the tape must not be used (such as data read into Python), or None."""
    sharing: tuple[tuple[int, Source, Geometry], ...] = ()
    """(value, source, geometry) of each further existing tensor on the storage of a value, for example flattened or
    tied weights. The source says where a call finds the tensor."""
    identity: str = ""
    """Digest of the block's class, parameters and settings, equal for all tapes of a block."""
    structure: str = ""
    """Digest of the operators, and of which results they read, without sizes and constants."""
    digest: str = ""
    """Digest of `structure`, sizes and constants. Tapes with equal digests are interchangeable in replay."""
    checksums: dict[int, Checksum] = field(default_factory=dict)
    """Checksums of values whose recorded tensors are freed, until replay is verified."""
    verified: frozenset[int] = frozenset()
    """Values for which replay gave the recorded bits."""
    recomputable: frozenset[int] = frozenset()
    """Values that replay may recompute in training (rules R7 and R14)."""
    equal: dict[int, int] = field(default_factory=dict)
    """Dict from each value that duplicates an earlier saved value to the saved value (`equal_values`)."""
    order: tuple[int, ...] | None = None
    """Order in which backward unpacks the saved tensors, as indices into `slots`. None if no backward was observed."""
    is_unchecked: bool = False
    """True if the next call is checked (rule R7): the tape was evaluated from a symbolic tape, at a size that is not
    covered by checks at other sizes."""
    _consumers: dict[int, list[int]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Key by which a policy finds the plan of a block: digests of structure, sizes, identity, and inputs."""
        sizes = _tape_digest([value.nbytes for value in self.values])
        input_values = [value for value in self.values if self.is_block_input(value.index)]
        inputs = _tape_digest([(str(value.source), value.ref) for value in input_values])
        return f"{self.structure[:24]}-{sizes[:8]}-{self.identity[:8]}-{inputs[:8]}"

    @property
    def has_collectives(self) -> bool:
        return any(operator.is_collective for operator in self.operators)

    def is_block_input(self, value: int) -> bool:
        return self.values[value].place == "argument"

    def is_module_state(self, value: int) -> bool:
        return self.values[value].place in ("parameter", "buffer", "attached", "module")

    def is_generator_state(self, value: int) -> bool:
        return self.values[value].place == "generator"

    def is_held_elsewhere(self, value: int) -> bool:
        """Return True if the tensor of `value` exists independently of the call, such as a parameter."""
        return self.values[value].place not in (None, "argument", "generator")

    def generator_states(self) -> list[tuple[int, int, torch.device]]:
        """Return (num_saved, value, device) of each state of a random generator from which replay draws random numbers.

        A call must capture the state of `device` after autograd has saved `num_saved` tensors.
        """
        states = []
        for operator in self.operators:
            produced = operator.results()
            if operator.generator is not None and not self.recomputable.isdisjoint(produced):
                source = self.values[operator.generator].source
                assert source is not None  # it has the moment of the state
                states.append((source.path[0], operator.generator, self.values[produced[0]].device))
        return states

    def decisions(self) -> set[int]:
        """Return the results of operators that choose indices from data (rule R14)."""
        return decisions(
            ((operator.inputs(), operator.results()) for operator in self.operators),
            [v.index for v in self.values if v.source is not None and v.ref.dtype.is_floating_point],
            lambda value: self.values[value].ref.is_index,
        )

    def saved_values(self) -> list[int]:
        """Return the values of the saved tensors, each once, in the order in which the tensors were saved."""
        return list(dict.fromkeys(slot.value for slot in self.slots))

    def consumers(self, value: int) -> list[int]:
        """Return the indices of the operators that read `value`."""
        if not self._consumers:
            for operator in self.operators:
                for read in operator.inputs():
                    self._consumers.setdefault(read, []).append(operator.index)
        return self._consumers.get(value, [])

    def seal(self, identity: list[Any]) -> None:
        """Compute the digests of a complete tape. `identity` describes the block in addition to its class name."""
        self.identity = _tape_digest([self.block_class, *identity])
        operators = [(op.name, list(op.inputs()), op.outputs, op.mutations, op.random) for op in self.operators]
        sources = [str(value.source) for value in self.values if value.source is not None]
        wiring = [operators, sources, [slot.value for slot in self.slots]]
        self.structure = _tape_digest([self.identity, wiring])
        constants = [repr((operator.args, operator.kwargs)) for operator in self.operators]
        slots = [repr(slot) for slot in self.slots]
        outside = [repr(value.ref) for value in self.values if value.source is not None and value.source.path]
        sharing = [(value, str(source), geometry) for value, source, geometry in self.sharing]
        self.digest = _tape_digest([self.structure, constants, slots, outside, sharing])

    def values_in(self, other: Tape) -> tuple[dict[int, int], bool]:
        """Return (dict from this tape's values to the matching values of `other`, True if all operators match).

        Two values match only if the operators that computed them match: a product with a mask does not match a product
        with a sigmoid. The saved tensors, and the order in which values were first recorded, may differ.
        """
        matching: dict[int, int] = {}
        matching_operators: dict[int | None, int | None] = {None: None}
        own_values: dict[int, int] = {}
        calls, others = ([(op.module, *op.signature()) for op in tape.operators] for tape in (self, other))
        is_complete = calls == others
        for begin, other_begin, number in SequenceMatcher(None, calls, others, autojunk=False).get_matching_blocks():
            for place in range(number):
                matching_operators[begin + place] = other_begin + place
                own, theirs = self.operators[begin + place], other.operators[other_begin + place]
                for value, other_value in zip(
                    [*own.inputs(), *own.results()], [*theirs.inputs(), *theirs.results()], strict=True
                ):
                    has_matching_producer = (
                        matching_operators.get(self.values[value].producer, -1) == other.values[other_value].producer
                    )
                    is_unmatched = value not in matching and other_value not in own_values
                    is_match = is_unmatched and has_matching_producer and self._has_source_of(value, other, other_value)
                    if is_match:
                        matching[value], own_values[other_value] = other_value, value
                    is_complete &= is_match or matching.get(value) == other_value
        return matching, is_complete

    def _has_source_of(self, value: int, other: Tape, other_value: int) -> bool:
        if self.is_generator_state(value):  # the path differs if autograd saves other tensors before
            return other.is_generator_state(other_value)
        return str(self.values[value].source) == str(other.values[other_value].source)


def short_name(target: Any) -> str:
    """Return the name of an ATen operator without overload and underscores, or of an `autograd.Function`."""
    name: str = op_name(target) if isinstance(target, OpOverload) else target.__name__
    return name.strip("_")


def tensor_refs(tree: Any) -> Iterator[TensorRef]:
    """Return an iterator over the `TensorRef`s in nested tuples, lists and dicts."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, TensorRef))


def leaves(*trees: Any) -> list[Any]:
    """Return the items of nested tuples, lists and dicts in order, faster than torch's `tree_leaves`."""
    items: list[Any] = []
    _collect_leaves(trees, items)
    return items


def _collect_leaves(trees: Iterable[Any], items: list[Any]) -> None:
    for tree in trees:
        if isinstance(tree, (tuple, list)):
            _collect_leaves(tree, items)
        elif isinstance(tree, dict):
            _collect_leaves(tree.values(), items)
        else:
            items.append(tree)


def map_tensors(tree: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy of `tree`, nested tuples, lists and dicts, with every instance of the class `kind`, or of one of
    several classes, replaced by `change(instance)`."""
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
    """Return True if one storage holds all data of the tensor: it is neither sparse nor quantized."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return size, stride and offset of a tensor, in the form in which a tape records them."""
    # torch's annotations include SymInt, which never appears here.
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]


def _tape_digest(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
