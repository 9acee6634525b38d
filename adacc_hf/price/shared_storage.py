"""Tensors that a block shares with others: which it is given, which it makes and others keep, and who counts them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.artifacts.profile import Shared
from adacc_hf.price.codec_gradient_error import GradientErrors
from adacc_hf.tape.call_key import KnownShapes
from adacc_hf.tape.tape import Source, Tape
from adacc_hf.torch_glue.private import storage_key
from adacc_hf.torch_glue.tensors import storage_of


@dataclass
class RecordedBlock:
    """What one block's recorded call tells."""

    name: str
    known: KnownShapes
    """What its call has shown."""
    tape: Tape
    arguments: dict[int, torch.Tensor]
    """The recorded argument of each input value; holds the storage so that its address stays its own."""
    given: dict[Source, torch.Tensor]
    """All tensors among the arguments, one per storage, read or not."""
    outputs: dict[int, torch.Tensor]
    """Saved values that the block made and gave away, with a tensor on their storage."""
    casts: dict[int, torch.Tensor]
    """Saved values that are made of parameters alone, such as autocast's, which other calls may find in its cache."""
    packed: list[weakref.ref[Any]]
    """For each slot what autograd holds for it; dead once autograd has let go of it."""
    made: dict[int, StorageWeakRef]
    """Saved values that the block made and did not give away."""
    outliers: dict[int, int]
    errors: GradientErrors
    follows_on: bool = False
    """Whether it is given what the call before it returned."""
    dead: frozenset[int] = frozenset()
    """Slots that autograd let go of before the forward's end, since no loss depends on their operator's result."""
    held_besides: frozenset[int] = frozenset()
    """Saved values that live on without being saved: an autograd function has them in an attribute, or a module has."""
    kind: int = -1

    def look_back(self) -> None:
        """Note, at the forward's end, which slots autograd has let go of, and what lives without any."""
        self.dead = frozenset(slot for slot, packed in enumerate(self.packed) if packed() is None)
        self.held_besides = frozenset(value for value, storage in self.made.items() if not storage.expired())

    def saved(self) -> list[int]:
        """Values that autograd holds for backward."""
        return list(dict.fromkeys(ref.value for slot, ref in enumerate(self.tape.slots) if slot not in self.dead))

    def held(self) -> Iterable[torch.Tensor]:
        """The inputs that a plan for the block may hold: torch's checkpoint holds all of them."""
        return (tensor for _, tensor in self.inputs())

    def inputs(self) -> Iterable[tuple[Source, torch.Tensor]]:
        """Those inputs, with where each call finds them."""
        if self.tape.untrusted:
            return self.given.items()
        sources = ((self.tape.values[value].source, tensor) for value, tensor in self.arguments.items())
        return [(source, tensor) for source, tensor in sources if source is not None]


class Sharing:
    """What blocks share with each other and with the rest of the model; each tensor is counted once.

    An output that its maker saves and another block reads counts as the maker's, which retains it. Any other input that
    several blocks read, or that the rest of the model holds, is a record of its own.
    """

    def __init__(self, blocks: list[RecordedBlock], outside: Set[int], state: Set[int], batch: Set[int]) -> None:
        """`outside`, `state` and `batch` are addresses: what the rest of the model saves, what it consists of, what it
        was given."""
        readers: dict[int, set[str]] = {}
        for block in blocks:
            for tensor in block.held():
                readers.setdefault(address_of(tensor), set()).add(block.name)
        made = {address_of(t) for b in blocks for v, t in b.outputs.items() if v in set(b.saved())}
        self._kept = made & (readers.keys() | outside)
        saved = {address_of(b.arguments[v]) for b in blocks for v in b.saved() if v in b.arguments} | outside
        self._casts: dict[int, list[str]] = {}
        for block in blocks:
            for tensor in block.casts.values():
                outsider = ["the rest of the model"] if address_of(tensor) in outside else []
                self._casts.setdefault(address_of(tensor), outsider).append(block.name)
        self._index: dict[int, int] = {}
        self.records: list[Shared] = []
        for block in blocks:
            for tensor in block.held():
                address = address_of(tensor)
                if address in self._index:
                    continue
                if address in self._kept:
                    self._index[address] = self._index_of_kept()
                elif len(readers[address]) > 1 or address in outside or address in state or address in batch:
                    nbytes = 0 if address in state or address in batch else storage_of(tensor).nbytes()
                    self._add(address, Shared(name=f"{block.name} input", nbytes=nbytes, saved=address in saved))
        for block in blocks:
            for tensor in block.given.values():
                address = address_of(tensor)
                if address not in self._index and address not in readers:  # only torch's checkpoint holds it
                    nbytes = 0 if address in state or address in batch else storage_of(tensor).nbytes()
                    self._add(address, Shared(name=f"{block.name} unread", nbytes=nbytes, saved=address in outside))

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The record of an input, or None for one that belongs to a single block."""
        return self._index.get(address_of(tensor))

    def sources(self, block: RecordedBlock, wanted: Set[int]) -> list[Source]:
        """Where `block` finds those of the `wanted` records that nothing else is sure to hold."""
        counted = {index for index in wanted if self.records[index].nbytes}
        return [source for source, tensor in block.inputs() if self.index_of(tensor) in counted]

    def is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether others hold this output of a block too."""
        return address_of(tensor) in self._kept

    def is_cached(self, cast: torch.Tensor) -> bool:
        """Whether other calls, or the rest of the model, save this cast of a parameter too, from autocast's cache."""
        return len(self._casts[address_of(cast)]) > 1

    def is_owner(self, block: RecordedBlock, cast: torch.Tensor) -> bool:
        """Whether a cast counts as that of `block`: the first to save it, if the rest of the model does not."""
        return self._casts[address_of(cast)][0] == block.name

    def _add(self, address: int, record: Shared) -> None:
        self._index[address] = len(self.records)
        self.records.append(record)

    def _index_of_kept(self) -> int:
        """One record for all of them: a record each would make every block a kind of its own."""
        kept = Shared(name="what the blocks that made it retain", nbytes=0, saved=True)
        if kept not in self.records:
            self.records.append(kept)
        return self.records.index(kept)


def address_of(tensor: torch.Tensor) -> int:
    """What tells storages apart as long as they live."""
    return storage_key(storage_of(tensor))
