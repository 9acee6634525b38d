"""A profile: the tensors that a model's blocks save for backward, and the cost of each action, without torch.

`profile_model` measures a profile (paper, section 3.1). The solver and the memory simulator use the profile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import fields_of, from_labelled, labelled, read_json, write_json
from adacc_hf.artifacts.kind_profile import KindProfile, Value
from adacc_hf.artifacts.policy import Plan
from adacc_hf.artifacts.size_model import Shapes, SizeModel, sizes_of
from adacc_hf.artifacts.tables import profile_tables
from adacc_hf.artifacts.units import format_bytes

FORMAT_VERSION = 12


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block call in the profiled step: its kind, and the live bytes when its forward and backward start."""

    name: str
    """Module path of the block. The second call in the step is "path#2", and so on."""
    kind: int
    """Index into `Profile.kinds`."""
    forward_base_bytes: int
    """Bytes live at the start of this block's forward, its input included, without what earlier blocks store."""
    backward_base_bytes: int
    """Bytes live at the start of this block's backward, without the bytes that blocks store: parameters, accumulated
    gradients, tensors stored by the rest of the model, the incoming gradient, and shared tensors that are saved or in
    `KindProfile.held`."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A tensor that several blocks read, or that the rest of the model also holds. The bytes count once."""

    name: str
    nbytes: int
    saved: bool
    """True if plain training keeps the tensor for backward."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """One way to run the output layer and the loss: its time, and the fields of a profile that depend on it."""

    name: str
    """ "plain": with whole logits. "chunked": a loss without whole logits (chunked_loss.py)."""
    ms: float
    """Time of the head's forward and backward. 0 if the profile has only one head, because nothing is compared."""
    outside_stored_bytes: int
    outside_peak_bytes: int
    loss_peak_bytes: int


P = TypeVar("P", "Profile", Head)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Tapes and costs of a model's blocks for one batch, and the memory of the rest of the step."""

    model_class: str
    kinds: tuple[KindProfile, ...]
    blocks: tuple[BlockProfile, ...]
    shared: tuple[Shared, ...]
    outside_stored_bytes: int
    """Bytes that the model outside the blocks keeps for backward. Each storage counts once."""
    static_bytes: int
    """Bytes live before a forward: parameters, buffers, optimizer state, the step's batches, and, with gradient
    accumulation, the gradients of earlier micro-batches."""
    outside_peak_bytes: int
    """Peak in the forward of head and loss, with casts in autocast's cache, without the bytes that blocks store."""
    loss_peak_bytes: int
    """Peak in the backward of head and loss, without the bytes that blocks store."""
    tail_peak_bytes: int
    """Peak while no block stores anything: after the backward of all blocks (the embedding's gradient), and before
    their forward (a teacher model)."""
    available_bytes: int
    """Bytes available to this process on the device when profiled: its live bytes and the free bytes."""
    step_ms: float
    """Time of one forward and backward under full recomputation."""
    device: str
    head: str = "plain"
    """Name of the head under which memory was measured. `with_head` returns the profile for another one."""
    head_ms: float = 0.0
    """`Head.ms` of the measured head."""
    other_heads: tuple[Head, ...] = ()
    """Heads that a policy may choose besides the measured head."""
    outside_live_bytes: int = 0
    """Bytes by which `outside_peak_bytes` is lower if no replay reads any of the tensors in `KindProfile.held`."""
    host_free_bytes: int = 0
    """Bytes of host memory free for this rank when profiled. 0 if payloads must stay on the device."""
    optimizer_peak_bytes: int = 0
    """Peak in bytes of gradient clipping and the optimizer step. 0 if profiled without an optimizer."""
    measured: tuple[tuple[Shapes, tuple[int, ...]], ...] = ()
    """(shapes, numbers) of the batch, then of other measured sizes: the numbers of a profile that depend on shapes, in
    a fixed order. Without other sizes, the only entry has no numbers. See size_model.py."""

    @property
    def sizes(self) -> SizeModel | None:
        """Size model that predicts this profile at other sizes of a batch. None if no other size was measured."""
        return sizes_of(self.measured) if len(self.measured) > 1 else None

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the heads that a policy may choose, the measured head first."""
        return (self.head, *(head.name for head in self.other_heads))

    def with_head(self, name: str) -> Profile:
        """Return a copy for the head `name`. Raises ValueError if this head was not profiled."""
        if name == self.head:
            return self
        new_head = next((head for head in self.other_heads if head.name == name), None)
        if new_head is None:
            raise ValueError(
                f"head={name!r} is not in this profile, which has {' and '.join(self.heads)}: profile again with "
                f"AdaccConfig(head={name!r}), on a model whose output layer can be chunked"
            )
        own_head = Head(
            name=self.head,
            ms=self.head_ms,
            outside_stored_bytes=self.outside_stored_bytes,
            outside_peak_bytes=self.outside_peak_bytes,
            loss_peak_bytes=self.loss_peak_bytes,
        )
        return replace(
            self,
            head=name,
            head_ms=new_head.ms,
            other_heads=(own_head, *(head for head in self.other_heads if head is not new_head)),
            outside_stored_bytes=new_head.outside_stored_bytes,
            outside_peak_bytes=new_head.outside_peak_bytes,
            loss_peak_bytes=new_head.loss_peak_bytes,
        )

    def without_codecs_below(self, nbytes: int) -> Profile:
        """Return a copy without codecs for activations of fewer than `nbytes` bytes."""

        def limited(value: Value) -> Value:
            has_codecs = bool(value.codecs) or value.is_movable
            return replace(value, codecs=(), is_movable=False) if has_codecs and value.nbytes < nbytes else value

        return replace(self, kinds=tuple(replace(k, values=tuple(map(limited, k.values))) for k in self.kinds))

    def with_extra_live_bytes(self, forward: int, head: int, blocks: Sequence[int], after: int) -> Profile:
        """Return a copy with more live bytes, or fewer, for both heads.

        `forward` bytes are live in the forward of the blocks, `head` in the forward and backward of the head and loss,
        `blocks[i]` in the backward of the i-th block, and `after` once the backward of all blocks has ended.
        `static_bytes` and the optimizer's peak do not change.
        """
        return replace(
            self.with_extra_head_bytes(head, head),
            blocks=tuple(
                replace(
                    block,
                    forward_base_bytes=block.forward_base_bytes + forward,
                    backward_base_bytes=block.backward_base_bytes + backward,
                )
                for block, backward in zip(self.blocks, blocks, strict=True)
            ),
            tail_peak_bytes=self.tail_peak_bytes + after,
        )

    def with_extra_head_bytes(self, forward: int, backward: int) -> Profile:
        """Return a copy with more live bytes, or fewer, in the forward and backward of all heads."""

        def shifted(peaks: P) -> P:
            return replace(
                peaks,
                outside_peak_bytes=peaks.outside_peak_bytes + forward,
                loss_peak_bytes=peaks.loss_peak_bytes + backward,
            )

        return replace(shifted(self), other_heads=tuple(map(shifted, self.other_heads)))

    def with_tiles(self, num_tiles: Sequence[int]) -> Profile:
        """Return a copy in which the row-wise modules of the i-th block run in `num_tiles[i]` tiles, or without tiles
        if 0.

        The copy lists only kinds that blocks have. Raises ValueError for a block that was not profiled in tiles.
        """
        if not any(num_tiles) and all(kind.tiles is None for kind in self.kinds):
            return self
        kinds: dict[tuple[int, int], KindProfile] = {}
        keys = []
        for block, number in zip(self.blocks, num_tiles, strict=True):
            kind = self.kinds[block.kind]
            index = block.kind if not number or kind.tiles is not None else kind.tiled
            if index is None or (kind.tiles is not None and not number):
                raise ValueError(
                    f"block {block.name} was not profiled with {number} tiles: profile it again, with "
                    f'AdaccConfig(actions=(..., "tile"))'
                )
            key = (index, number)
            if key not in kinds:
                kinds[key] = (
                    replace(self.kinds[index], tiled=None) if not number else self.kinds[index].in_tiles(number)
                )
            keys.append(key)
        order = list(kinds)
        return replace(
            self,
            kinds=tuple(kinds.values()),
            blocks=tuple(replace(block, kind=order.index(key)) for block, key in zip(self.blocks, keys, strict=True)),
        )

    @property
    def untiled(self) -> Profile:
        """Copy of the profile without tiles."""
        return self.with_tiles([0] * len(self.blocks))

    def under(self, plans: Iterable[Plan]) -> Profile:
        """Return a copy in which the i-th block runs in the tiles of the i-th plan, or without tiles."""
        return self.with_tiles([0 if plan.tiling is None else plan.tiling.num_tiles for plan in plans])

    def kind_index(self, block: BlockProfile, plan: Plan) -> int:
        """Return the index, in `kinds`, of the kind that `block` has under `plan`: another one in tiles."""
        tiled = self.kinds[block.kind].tiled
        return block.kind if plan.tiling is None or tiled is None else tiled

    def kinds_of(self, block: BlockProfile) -> tuple[int, ...]:
        """Return the indices, in `kinds`, of the kinds that `block` may have: without and with tiles."""
        tiled = self.kinds[block.kind].tiled
        return (block.kind,) if tiled is None else (block.kind, tiled)

    @property
    def head_overhead_ms(self) -> float:
        """Time of the head minus the time of the plain head. 0 if the plain head was not profiled."""
        plain_ms = next((head.ms for head in self.other_heads if head.name == "plain"), self.head_ms)
        return self.head_ms - plain_ms

    def kind_of(self, block: BlockProfile) -> KindProfile:
        return self.kinds[block.kind]

    @cached_property
    def base_shared(self) -> tuple[frozenset[int], ...]:
        """Shared tensors that each block's `backward_base_bytes` includes, because replays of this block or earlier
        ones read them under full recomputation. The last entry also applies to the loss's backward."""
        return tuple(accumulate((frozenset(self.kind_of(block).held) for block in self.blocks), frozenset.union))

    def unsaved_bytes(self, shared: Set[int]) -> int:
        """Return the bytes of those of the `shared` tensors that autograd does not save."""
        return sum(self.shared[index].nbytes for index in shared if not self.shared[index].saved)

    def extra_shared_bytes(self, block: int, read: Set[int]) -> int:
        """Return the bytes of shared tensors that replays of block number `block` and earlier ones keep alive, if they
        read `read`, above those in its `backward_base_bytes`. The number is negative if they read fewer of these."""
        base = self.base_shared[block]
        return self.unsaved_bytes(read - base) - sum(self.shared[index].nbytes for index in base - read)

    def head_peaks(self, read: Set[int]) -> tuple[int, int]:
        """Return `outside_peak_bytes` and `loss_peak_bytes` under a policy whose replays read the shared tensors
        `read`."""
        base = self.base_shared[-1]
        # The read tensors raise the peak by at most their own bytes, compared with the peak without any shared tensor.
        reduction = max(0, self.outside_live_bytes - sum(self.shared[index].nbytes for index in base & read))
        outside_bytes = self.outside_peak_bytes - reduction + self.unsaved_bytes(read - base)
        return outside_bytes, self.loss_peak_bytes + self.extra_shared_bytes(-1, read)

    @cached_property
    def plain_stored_bytes(self) -> int:
        """Bytes that plain training keeps for backward, without parameters, buffers and the batch. Each storage counts
        once."""
        own = sum(value.nbytes for block in self.blocks for value in self.kind_of(block).activations if value.saved)
        return own + self.outside_stored_bytes + sum(shared.nbytes for shared in self.shared if shared.saved)

    def __repr__(self) -> str:
        num_activations = sum(len(self.kind_of(block).activations) for block in self.blocks)
        sizes = dict(self.measured[0][0]) if self.measured else {}
        batch = f", batch of {', '.join(f'{name} {list(size)}' for name, size in sizes.items())}" if sizes else ""
        return (
            f"<Profile of {self.model_class} on {self.device}{batch}: {_count(len(self.blocks), 'block')} of "
            f"{_count(len(self.kinds), 'kind')}, {_count(num_activations, 'activation')}; plain training stores "
            f"{format_bytes(self.plain_stored_bytes)} for backward>"
        )

    def _repr_markdown_(self) -> str:
        """Return the profile as a small table, which notebooks show."""
        return profile_tables(self)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, atomically."""
        # Without indent and copies, because a run saves its profile at each change of prices, with some 2,000 records.
        write_json(path, labelled(fields_of(self), "profile", FORMAT_VERSION), indent=None)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile file. Raises FileNotFoundError, or AdaccError if the file is not a complete profile."""
        record = read_json(path, AdaccError, "profile")
        return from_labelled(
            cls, record, "profile", FORMAT_VERSION, AdaccError, source=str(path), advice="profile the model",
            check=lambda profile: all(0 <= block.kind < len(profile.kinds) for block in profile.blocks),
        )  # fmt: skip


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
