"""Tensors held by several blocks, or by a block and the rest of the model. Each counts once, for one owner."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.artifacts.profile import Shared
from adacc_hf.price.codec_gradient_error import GradientErrors
from adacc_hf.price.tile_memory import TileMemory
from adacc_hf.tape.tape import Source, Tape
from adacc_hf.torch_glue.private import storage_key
from adacc_hf.torch_glue.tensors import storage_of


@dataclass(frozen=True)
class TensorNote:
    """Facts that a profile needs of a recorded tensor, without the tensor's memory."""

    key: int
    """Key of the tensor's storage (`storage_key_of`). No other storage gets this key while the note exists."""
    nbytes: int
    """Bytes of the whole storage."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage: StorageWeakRef

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorNote:
        """Return the note on `tensor`."""
        storage = storage_of(tensor)
        shape, key = tuple(tensor.shape), storage_key(storage)
        return TensorNote(key, storage.nbytes(), shape, tensor.dtype, tensor.device, StorageWeakRef(storage))


@dataclass
class RecordedBlock:
    """One recorded block call: its tape, arguments, outputs and saved tensors."""

    name: str
    tape: Tape
    input_tensors: dict[int, TensorNote]
    """Each argument that the block reads, by value index."""
    argument_tensors: dict[Source, TensorNote]
    """All tensors among the arguments, one per storage, read by the block or not."""
    outputs: dict[int, TensorNote]
    """Saved values that the block computed and returned."""
    casts: dict[int, TensorNote]
    """Saved values computed from parameters alone. Other calls may reuse them from autocast's cache."""
    tile_memory: Mapping[str, TileMemory]
    """Memory of one tile of each row-wise module that ran in tiles, by the module's path."""
    slot_refs: list[weakref.ref[Any]]
    """Weak reference to the packed object of each saved tensor, dead once autograd has freed it."""
    internal_storages: dict[int, StorageWeakRef]
    """Storages of saved values that the block computed and did not return."""
    outliers: dict[int, int]
    errors: GradientErrors
    uses_previous_result: bool = False
    """True if an argument of this call is a result of the previous call."""
    kept_values: frozenset[int] = frozenset()
    """Values that the call itself keeps until its backward."""
    is_checkpointed: bool = False
    """True if the call trained under torch's checkpoint."""
    changes_state: bool = False
    """True if the block must not run twice, because its calls change Python state (`changes_in_place`)."""
    dead_slots: frozenset[int] = frozenset()
    """Slots that autograd freed before the forward's end, because no loss depends on the operator that saved them."""
    externally_held: frozenset[int] = frozenset()
    """Saved values that an autograd function's attribute or a module keeps alive."""
    kind: int = -1

    @property
    def is_retained(self) -> bool:
        """True if the call keeps all its saved tensors, because its operators cannot be replayed."""
        return self.tape.untrusted is not None and not self.is_checkpointed

    def note_liveness(self) -> None:
        """Record, at the end of the model's forward, `dead_slots` and `externally_held`."""
        self.dead_slots = frozenset(slot for slot, reference in enumerate(self.slot_refs) if reference() is None)
        self.externally_held = frozenset(
            v for v, storage in self.internal_storages.items() if v not in self.kept_values and not storage.expired()
        )

    def saved_values(self) -> list[int]:
        """Return the values that autograd holds for backward."""
        return list(dict.fromkeys(ref.value for slot, ref in enumerate(self.tape.slots) if slot not in self.dead_slots))

    def holdable_inputs(self) -> list[TensorNote]:
        """Return the inputs that a plan for the block may keep for backward. Torch's checkpoint keeps all."""
        return [*(self.argument_tensors.values() if self.tape.untrusted else self.input_tensors.values())]


class SharedTensors:
    """Tensors that blocks share with each other or with the rest of the model, each counted once.

    An output that its block saves and another block reads counts for the first block. Any other input that several
    blocks read, or that the rest of the model holds, has a record in `records`.
    """

    def __init__(self, blocks: list[RecordedBlock], outside: Set[int], state: Set[int], batch: Set[int]) -> None:
        """Assign each tensor that the recorded `blocks` share to an owner. `outside`, `state` and `batch` are storages
        that the rest of the model saves, and those of the model's state and input."""
        readers: dict[int, set[str]] = {}
        for block in blocks:
            for tensor in block.holdable_inputs():
                readers.setdefault(tensor.key, set()).add(block.name)
        # Outputs that their block saves and another block or the rest of the model holds.
        saved_outputs = {t.key for b in blocks for v, t in b.outputs.items() if v in set(b.saved_values())}
        self._shared_outputs = saved_outputs & (readers.keys() | outside)
        saved_inputs = {
            block.input_tensors[value].key
            for block in blocks
            for value in block.saved_values()
            if value in block.input_tensors
        }
        saved = saved_inputs | outside
        # The owners of each cast of a parameter, the first of which counts the cast.
        self._cast_owners: dict[int, list[str]] = {}
        for block in blocks:
            for tensor in block.casts.values():
                first_owners = ["the rest of the model"] if tensor.key in outside else []
                self._cast_owners.setdefault(tensor.key, first_owners).append(block.name)
        # One record per storage that several blocks or the rest of the model hold.
        self._index: dict[int, int] = {}
        self.records: list[Shared] = []
        for block in blocks:
            for tensor in block.holdable_inputs():
                address = tensor.key
                if address in self._index:
                    continue
                if address in self._shared_outputs:
                    self._index[address] = self._output_record()
                elif len(readers[address]) > 1 or address in outside or address in state or address in batch:
                    nbytes = 0 if address in state or address in batch else tensor.nbytes
                    self._add(address, Shared(name=f"{block.name} input", nbytes=nbytes, saved=address in saved))
        for block in blocks:
            for tensor in block.argument_tensors.values():
                address = tensor.key
                if address not in self._index and address not in readers:  # only torch's checkpoint holds the tensor
                    nbytes = 0 if address in state or address in batch else tensor.nbytes
                    self._add(address, Shared(name=f"{block.name} unread", nbytes=nbytes, saved=address in outside))
        other_keys = outside | state | batch
        self.freed = frozenset(self._index[key] for key in readers if key in self._index and key not in other_keys)
        """Indices in `records` of the tensors that only replays keep alive when the head runs."""

    def record_index(self, tensor: TensorNote) -> int | None:
        """Return the index in `records` of the tensor's storage, or None if only one block holds it."""
        return self._index.get(tensor.key)

    def is_shared_output(self, tensor: TensorNote) -> bool:
        """Return True if other blocks or the rest of the model also hold `tensor`, an output of a block."""
        return tensor.key in self._shared_outputs

    def is_shared_cast(self, cast: TensorNote) -> bool:
        """Return True if other calls or the rest of the model also save `cast`, from autocast's cache."""
        return len(self._cast_owners[cast.key]) > 1

    def owns_cast(self, block: RecordedBlock, cast: TensorNote) -> bool:
        """Return True if the bytes of `cast` count for `block`: the first to save it, of the rest and the calls."""
        return self._cast_owners[cast.key][0] == block.name

    def _add(self, address: int, record: Shared) -> None:
        self._index[address] = len(self.records)
        self.records.append(record)

    def _output_record(self) -> int:
        """Return the index of the one record of all shared outputs, so that blocks can be equal."""
        record = Shared(name="what the blocks that made it retain", nbytes=0, saved=True)
        if record not in self.records:
            self.records.append(record)
        return self.records.index(record)


def storage_key_of(tensor: torch.Tensor) -> int:
    """Return the key of the tensor's storage, unique while the storage is alive."""
    return storage_key(storage_of(tensor))
