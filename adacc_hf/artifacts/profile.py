"""A profile: the tensors that a model's blocks save for backward, and the cost of each action. The records do not need
torch.

`profile_model` measures a profile (paper, section 3.1). The solver and the memory simulator use the profile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from adacc_hf.artifacts.call_names import numbered_names
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.exact_recompute_rules import (
    DEGRADED_ERROR,
    index_values,
    is_function,
    is_index,
    is_statistic,
    source_activations,
    upstream_activations,
)
from adacc_hf.artifacts.files import fields_of, read_json, write_json
from adacc_hf.artifacts.host_link import HostLink
from adacc_hf.artifacts.notebook_html import profile_html
from adacc_hf.artifacts.policy import BlockAction, Choice, Place, Plan
from adacc_hf.artifacts.size_model import Shapes, SizeModel, sizes_of
from adacc_hf.artifacts.tiles import ModuleTiles, RowTiles, Tiling
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.kernels._host_names import HOST

FORMAT_VERSION = 9
WHOLE = "whole"
"""Role of the single activation that represents all saved tensors of a block whose operators cannot be replayed."""


@dataclass(frozen=True, kw_only=True)
class CodecOption:
    """One codec that may compress an activation, with the codec's cost, measured on the profiled data."""

    codec: str
    options: tuple[tuple[str, Any], ...]
    nbytes: int
    """Payload bytes on the device, scales and indices included (M_i * CRate_i of the paper's equation 8)."""
    encode_ms: float
    decode_ms: float
    error: float
    """Relative L2 error of encoding and decoding the tensor, or 0 for a lossless codec."""
    lossless: bool
    host_bytes: int = 0
    """Payload bytes in host memory. 0 if the payload stays on the device."""
    staging_bytes: int = 0
    """Bytes on the device while the payload is copied to the host, and back."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One storage, at one version, that a block reads or writes.

    An *activation* is a value that the block stores or recomputes for backward: a tensor that autograd saves, or the
    block input that replay starts from.
    """

    index: int
    name: str
    """Origin of the value: module path and operator, or the place of the argument."""
    shape: tuple[int, ...]
    encoded_shape: tuple[int, ...]
    """Shape as passed to codecs: dimensions in memory order."""
    dtype: str
    nbytes: int
    """Bytes of the whole storage."""
    producer: int | None
    """Index of the operator that computes the value, or None for a block input."""
    saved: bool
    """True if autograd saves the value in this block."""
    activation: bool
    """True if a policy has an action for the value: a value that only this block saves, or the block input."""
    shared: int | None
    """Index into `Profile.shared` of an input that other blocks or the caller also hold, and that is therefore always
    live. None for all other values."""
    recomputable: bool
    """True if replay from stored values gave the original bits. In training, replay recomputes no other values (rule
    R7)."""
    role: str
    """Role of the tensor, by which codecs are selected (paper, section 3.2): linear, norm, activation, qkv, softmax,
    mask, input, parameter (a cast parameter), generator (state of a random generator), whole (see WHOLE), other."""
    cached: bool = False
    """True if the value lives until the end of the model's forward under every policy: a cast parameter in autocast's
    cache, or a value that a module or an autograd Function references."""
    is_kept: bool = False
    """True if the value stays alive even without the saved tensors of this block, because something else refers to it.
    The value is then an output that another block or the rest of the model holds, a cast parameter in autocast's cache,
    or a value that a module or autograd Function references."""
    codecs: tuple[CodecOption, ...] = ()
    equal_to: int | None = None
    """Index of an earlier activation with the same bits, computed by the same operator from the same input, or None. If
    the value is to be recomputed, backward reads the earlier activation instead."""
    replay_error: float = 0.0
    """Largest relative error in an operator's gradient if the value is recomputed from lossily compressed activations.
    0 if not measured."""
    taken_after: int = 0
    """For the state of a random generator: number of tensors that autograd saves before the block stores the state."""
    place: Place = ()
    """For a block input that codecs can encode: its place among the arguments of a call. Otherwise ()."""
    too_coarse: tuple[tuple[str, float], ...] = ()
    """Excluded codecs, each with the relative error that it causes in the gradient of an operator."""
    is_movable: bool = False
    """True if the value may be stored in host memory."""

    @property
    def is_generator_state(self) -> bool:
        """True if the value is the state of a random generator, which a block stores to replay random operators."""
        return self.role == "generator"

    @property
    def is_index(self) -> bool:
        """True if the value has integers that may be indices (see `exact_recompute_rules.is_index`)."""
        return is_index(self.dtype)

    @property
    def is_statistic(self) -> bool:
        """True if the value has one number per row of another tensor, such as the standard deviations of a norm."""
        return is_statistic(self.shape)

    @property
    def is_far_recomputed(self) -> bool:
        """True if `replay_error` is above DEGRADED_ERROR: a replay from lossily stored activations would degrade a
        gradient."""
        return self.replay_error > DEGRADED_ERROR


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One recorded operator of a block, with its inputs and outputs by value index."""

    index: int
    name: str
    module: str
    inputs: tuple[int, ...]
    """Values that the operator reads, without parameters and buffers."""
    outputs: tuple[int, ...]
    ms: float
    """Median time of one execution (T_comp_i of the paper's equation 4)."""
    replayable: bool
    extra_bytes: int = 0
    """Bytes that an execution allocates in addition to its outputs. Negative if outputs share the storage of inputs."""


@dataclass(frozen=True, kw_only=True)
class ForwardEvent:
    """One event of a block's forward that changes memory.

    The event is the start of the forward, the first time that a value is saved for backward, or the release of the last
    reference to a value except autograd's. If other modules of the model run before the next block call, their events
    are appended. `value` is -1 for the start, and for events of other calls or modules. `death` is True for a release.
    """

    value: int
    death: bool
    extra_bytes: int
    """Peak between this event and the next, in bytes above the live bytes at the start of the block. Stored values are
    left out."""
    tiled: int | None = None
    """Index, in `RowTiles.modules`, of the module that runs in tiles (some rows at a time) until the next event. None
    if no module does."""


@dataclass(frozen=True, kw_only=True)
class BackwardEvent:
    """One event of a block's backward: autograd unpacks a saved-tensor slot, or releases the slot.

    If a module runs in tiles (some rows at a time), releases of slot -1 mark the start and the end of this run.
    """

    slot: int
    release: bool
    entry_bytes: int
    """Live bytes when the event occurs, without stored and replayed values: gradients that are not used up yet."""
    extra_bytes: int
    """Peak in bytes between this event and the next, without stored and replayed values: gradients and temporaries."""
    tiled: int | None = None
    """Index, in `RowTiles.modules`, of the module that runs in tiles (some rows at a time) until the next event. None
    if no module does."""


def unpack_order(events: Iterable[BackwardEvent]) -> tuple[int, ...]:
    """Return the saved-tensor slots in the order in which backward first unpacks each slot."""
    return tuple(dict.fromkeys(event.slot for event in events if not event.release))


MAX_MERGED = 64
"""Maximum number of results of `KindProfile.with_merged_values` that are cached for each kind of block."""


@dataclass(frozen=True, kw_only=True)
class KindProfile:
    """Profile of one kind of block. Blocks of the same class, parameter shapes and recorded operators are of one
    kind."""

    digest: str
    block_class: str
    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    slots: tuple[int, ...]
    """Index of the value in each saved-tensor slot, in the order in which autograd saves. -1 for parameters and
    buffers."""
    backward: tuple[BackwardEvent, ...]
    """Events at which autograd unpacks or releases saved-tensor slots, in the order of the backward."""
    forward: tuple[ForwardEvent, ...]
    """Events at which values are saved for backward or freed, in the order of a forward that stores nothing."""
    forward_ms: float
    """Sum of the times of the operators in a block's forward."""
    held: tuple[int, ...] = ()
    """Indices into `Profile.shared` of the tensors that a block keeps alive for backward only if the block's replay
    reads them. Memory was measured under full recomputation, in which replay reads all these tensors."""
    given: tuple[int, ...] = ()
    """Indices into `Profile.shared` of all arguments of a call, unused arguments included. Torch's checkpoint keeps
    them alive."""
    copied_slots: tuple[int, ...] = ()
    """Slots of autograd Functions written in Python. The Functions' backward may write into saved tensors. To protect
    the tensors that a replay reads later (rule R6), the backward gets copies of them."""
    untrusted: str | None = None
    """Reason why the block's operators cannot be replayed, or None if replay is possible. Without replay, all saved
    tensors form one activation of role WHOLE, which a plain block retains and torch's checkpoint recomputes."""
    block_actions: tuple[BlockAction, ...] = (BlockAction.PLAIN, BlockAction.CHECKPOINT)
    """Allowed actions for the whole block. Torch's checkpoint is allowed if a replay of all operators was bit-exact, or
    if no operator can be replayed. For blocks with collectives, the actions are restricted, because collectives must
    run again on all ranks or on none."""
    elsewhere_bytes: int = 0
    """Bytes of those cast parameters saved by the block that an earlier call computed and autocast cached. The second
    forward of torch's checkpoint computes the casts again."""
    generator_bytes: int = 0
    """Bytes of the random generators' states that torch's checkpoint stores on the block's device."""
    host_link: HostLink | None = None
    """Cost of payloads in host memory. None if payloads must stay on the device."""
    untraced: str | None = None
    """Reason why Dynamo cannot trace the block's Python code completely. Each call is then compared with the tape,
    operator by operator. None if guards can check that a call runs the recorded operators."""
    tiled: int | None = None
    """Index into `Profile.kinds` of the variant of this kind in which modules run in tiles (some rows at a time), or
    None. Blocks have the variant only if a policy chooses it (`Profile.with_tiles`)."""
    tiles: RowTiles | None = None
    """The row-wise modules that run in tiles (some rows at a time). None for a kind without tiles."""
    extra_ms: float = 0.0
    """Time in ms that is added, under every plan of this kind, by running modules in tiles (some rows at a time). 0
    for a kind without tiles."""

    @property
    def tiling(self) -> Tiling | None:
        """The tiles (groups of rows) in which modules run under every plan for this kind of block. None for a kind
        without tiles."""
        return self.tiles.tiling if self.tiles else None

    def in_tiles(self, num_tiles: int) -> KindProfile:
        """Return a copy of this kind with the memory and time of running its row-wise modules in `num_tiles` tiles. The
        kind's `tiles` must not be None.

        With 0 tiles, no memory of a tile is included.
        """
        tiles = self.tiles
        assert tiles is not None  # the caller has checked
        before = tiles.num_tiles
        forward = [m.forward_bytes(num_tiles) - m.forward_bytes(before) for m in tiles.modules]
        backward = [m.backward_bytes(num_tiles) - m.backward_bytes(before) for m in tiles.modules]
        launch_ms = min((operator.ms for operator in self.operators if operator.ms > 0), default=0.0)
        module_ms = [sum(self.operators[index].ms for index in module.operators) for module in tiles.modules]
        extra_ms = (m.extra_ms(num_tiles, ms, launch_ms) for m, ms in zip(tiles.modules, module_ms, strict=True))
        return replace(
            self,
            forward=tuple(
                event if event.tiled is None else replace(event, extra_bytes=event.extra_bytes + forward[event.tiled])
                for event in self.forward
            ),
            backward=tuple(
                event if event.tiled is None else replace(event, extra_bytes=event.extra_bytes + backward[event.tiled])
                for event in self.backward
            ),
            tiles=replace(tiles, num_tiles=num_tiles),
            extra_ms=sum(extra_ms) if num_tiles else 0.0,
        )

    @cached_property
    def activations(self) -> tuple[Value, ...]:
        """Values that a policy has an action for."""
        return tuple(value for value in self.values if value.activation)

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """Inputs that torch's checkpoint of the block must store, because nothing else keeps them alive."""
        return tuple(value for value in self.activations if value.producer is None and value.role != WHOLE)

    @cached_property
    def names(self) -> list[str]:
        """Unique name of each value, the same for batches of all sizes: "attn:clone", "attn:clone#2"."""
        return numbered_names(value.name for value in self.values)

    @cached_property
    def equal(self) -> dict[int, int]:
        """Map from duplicate values to originals, by value index. A duplicate has the same bits as an earlier
        activation, its original."""
        return {value.index: value.equal_to for value in self.values if value.equal_to is not None}

    def index_values(self, lossy: Collection[int]) -> frozenset[int]:
        """Return the values that contain indices and must not be recomputed if the values in `lossy` are stored
        lossily.

        Such indices are, for example, the numbers of the experts that a layer chose for each token. A value is
        represented by its position in the field `values`. See `exact_recompute_rules.py`.
        """
        return index_values(
            ((operator.inputs, operator.outputs) for operator in self.operators),
            self._counts_as_index,
            lossy,
            {value.index for value in self.values if value.shared is not None or (value.activation and value.saved)},
        )

    def _counts_as_index(self, value: int) -> bool:
        producer = self.values[value].producer
        if self.values[value].is_index or producer is None:
            return self.values[value].is_index
        operator = self.operators[producer]
        return is_function(operator.name) and any(self.values[read].is_generator_state for read in operator.inputs)

    @cached_property
    def exactness_dependents(self) -> dict[int, frozenset[int]]:
        """Saved activations that may be recomputed only from exact values, as a dict from each activation to the values
        that must be exact.

        For a statistic (a tensor with one number per row of another tensor), the tensor with the rows must be exact.
        For an activation whose replay error is too large, all upstream activations must be exact. See
        `exact_recompute_rules.py`.
        """
        saved = [value for value in self.activations if value.saved]
        imprecise = {
            v.index: upstream_activations(v.index, self._reads, self._is_activation)
            for v in saved
            if v.is_far_recomputed
        }
        # If a statistic's rows are recomputed, the statistic is recomputed with them, because it must match the rows.
        rows = {v.index: source_activations(v.index, self._reads, self._is_activation) for v in saved if v.is_statistic}
        return imprecise | rows

    @cached_property
    def allows_lossy_inputs(self) -> bool:
        """True if the block may run again on inputs that were stored lossily.

        False in three cases. The block cannot be replayed: its operators may then depend on data. Indices are computed
        from the inputs (`exact_recompute_rules.py`). Or the replay error of a saved value is too large.
        """
        inputs = {value.index for value in self.inputs}
        is_imprecise = any(value.saved and value.is_far_recomputed for value in self.values)
        return self.untrusted is None and not is_imprecise and not self.index_values(inputs)

    def codec_options(self, value: int) -> tuple[CodecOption, ...]:
        """Return the codecs that may compress `value`: the measured codecs, and codecs that store their payload in host
        memory."""
        record, link = self.values[value], self.host_link
        if link is None or not record.is_movable:
            return record.codecs
        unencoded = CodecOption(
            codec=HOST, options=(), nbytes=record.nbytes, encode_ms=0.0, decode_ms=0.0, error=0.0, lossless=True
        )
        return (*record.codecs, *(link.moved(option) for option in (unencoded, *record.codecs)))

    def codec_option(self, value: int, choice: Choice) -> CodecOption:
        """Return the cost of compressing `value` with the codec of `choice`.

        Raises ValueError if the codec was not measured.
        """
        for option in self.codec_options(value):
            if (option.codec, option.options) == (choice.codec, choice.options):
                return option
        raise ValueError(
            f"activation {value} ({self.values[value].name}) has no price for codec {choice.codec!r} with "
            f"{dict(choice.options)}: profile again with that codec"
        )

    def _reads(self, value: int) -> tuple[int, ...]:
        producer = self.values[value].producer
        return () if producer is None else self.operators[producer].inputs

    def _is_activation(self, value: int) -> bool:
        return self.values[value].activation

    def exactness_dependents_of(self, lossy: Collection[int]) -> frozenset[int]:
        """Return the saved activations that must not be recomputed if the values in `lossy` are stored lossily.

        See `exactness_dependents`.
        """
        return frozenset(value for value, others in self.exactness_dependents.items() if not others.isdisjoint(lossy))

    def with_merged_values(self, equal: Mapping[int, int]) -> KindProfile:
        """Return a copy in which operators and saved tensors refer to the value `equal[v]` wherever they referred to a
        value `v` in `equal`."""
        if not equal:
            return self
        key = frozenset(equal.items())
        if key not in self._merged:
            if len(self._merged) >= MAX_MERGED:
                self._merged.clear()
            self._merged[key] = self._merge_values(equal)
        return self._merged[key]

    @cached_property
    def _merged(self) -> dict[frozenset[tuple[int, int]], KindProfile]:
        """Cache of `with_merged_values`. The solver's search calls this method with few distinct arguments."""
        return {}

    def _merge_values(self, equal: Mapping[int, int]) -> KindProfile:
        operators = (
            replace(operator, inputs=tuple(dict.fromkeys(equal.get(v, v) for v in operator.inputs)))
            for operator in self.operators
        )
        replaced = {v: replace(self.values[v], saved=False, activation=False, equal_to=None) for v in equal}
        return replace(
            self,
            values=tuple(replaced.get(value.index, value) for value in self.values),
            operators=tuple(operators),
            slots=tuple(equal.get(value, value) for value in self.slots),
        )


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block call in the profiled step: the index of its profile in `Profile.kinds`, and the live bytes when forward
    and backward of the block start."""

    name: str
    """Module path of the block. The second call in the step is "path#2", and so on."""
    kind: int
    """Index into `Profile.kinds`."""
    forward_base_bytes: int
    """Bytes live at the start of this block's forward, without the bytes that earlier blocks store. The block's own
    input is included."""
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
    """One way to run the output layer and the loss: its time, and the fields of a profile that depend on the head."""

    name: str
    """ "plain": with whole logits. "chunked": a loss without whole logits (chunked_loss.py)."""
    ms: float
    """Time of the head's forward and backward. 0 if the profile has only one head, because nothing is compared."""
    outside_stored_bytes: int
    outside_peak_bytes: int
    loss_peak_bytes: int
    tail_peak_bytes: int
    backward_base_bytes: tuple[int, ...]
    """`BlockProfile.backward_base_bytes` of each block, in forward order."""
    outside_live_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Tapes and costs of a model's blocks for one batch, and the memory of the rest of the step."""

    model_class: str
    kinds: tuple[KindProfile, ...]
    blocks: tuple[BlockProfile, ...]
    shared: tuple[Shared, ...]
    outside_stored_bytes: int
    """Bytes that the model outside the blocks (embedding, head, loss) keeps for backward. Each storage is counted
    once."""
    static_bytes: int
    """Bytes live before a forward: parameters, buffers, optimizer state, the step's batches, and, with gradient
    accumulation, the gradients of earlier micro-batches."""
    outside_peak_bytes: int
    """Peak in bytes in the forward of the head and the loss, without the bytes that blocks store. Casts in autocast's
    cache are included, because they are live under every policy."""
    loss_peak_bytes: int
    """Peak in bytes in the backward of the head and the loss, without the bytes that blocks store."""
    tail_peak_bytes: int
    """Peak in bytes while no block stores anything: after the backward of all blocks (for the embedding's gradient, for
    example), and before the forward of all blocks (for a teacher model, for example)."""
    available_bytes: int
    """Bytes available to this process on the device at the time of profiling: its live bytes plus the free bytes."""
    step_ms: float
    """Time of one forward and backward under full recomputation."""
    device: str
    head: str = "plain"
    """Name of the head (way to run the output layer and the loss) under which memory was measured. `with_head` returns
    the profile for another head."""
    head_ms: float = 0.0
    """`Head.ms` of the measured head."""
    other_heads: tuple[Head, ...] = ()
    """Heads that a policy may choose besides the measured head."""
    outside_live_bytes: int = 0
    """Bytes by which `outside_peak_bytes` is lower if no replay reads any of the tensors in `KindProfile.held`."""
    host_free_bytes: int = 0
    """Bytes of host memory free for this process at the time of profiling: the share of one rank of the host. 0 if
    payloads must stay on the device."""
    optimizer_peak_bytes: int = 0
    """Peak in bytes of gradient clipping and the optimizer step. 0 if profiled without an optimizer."""
    measured: tuple[tuple[Shapes, tuple[int, ...]], ...] = ()
    """(shapes, numbers) of the batch, then of other measured sizes. The numbers of a size are those numbers of a
    profile that depend on the shapes, in a fixed order. If no other size was measured, the only entry has the batch's
    shapes and no numbers. See size_model.py."""

    @property
    def sizes(self) -> SizeModel | None:
        """Size model that predicts this profile at other sizes of a batch. None if no other size was measured."""
        return sizes_of(self.measured) if len(self.measured) > 1 else None

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the heads that a policy may choose, the measured head first."""
        return (self.head, *(head.name for head in self.other_heads))

    def with_head(self, name: str) -> Profile:
        """Return a copy for the head `name`, which runs the output layer and the loss.

        Raises ValueError if this head was not profiled.
        """
        if name == self.head:
            return self
        new_head = next((head for head in self.other_heads if head.name == name), None)
        if new_head is None:
            raise ValueError(
                f"head={name!r} is not in this profile, which has {' and '.join(self.heads)}: profile again with "
                f"AdaccConfig(head={name!r}), on a model whose output layer can be chunked"
            )
        bases = zip(self.blocks, new_head.backward_base_bytes, strict=True)
        return replace(
            self,
            head=name,
            head_ms=new_head.ms,
            other_heads=(self._own_head(), *(head for head in self.other_heads if head is not new_head)),
            blocks=tuple(replace(block, backward_base_bytes=base) for block, base in bases),
            outside_stored_bytes=new_head.outside_stored_bytes,
            outside_peak_bytes=new_head.outside_peak_bytes,
            outside_live_bytes=new_head.outside_live_bytes,
            loss_peak_bytes=new_head.loss_peak_bytes,
            tail_peak_bytes=new_head.tail_peak_bytes,
        )

    def without_codecs_below(self, nbytes: int) -> Profile:
        """Return a copy without codecs for activations of fewer than `nbytes` bytes."""

        def limited(value: Value) -> Value:
            has_codecs = bool(value.codecs) or value.is_movable
            return replace(value, codecs=(), is_movable=False) if has_codecs and value.nbytes < nbytes else value

        return replace(self, kinds=tuple(replace(k, values=tuple(map(limited, k.values))) for k in self.kinds))

    def with_extra_live_bytes(self, forward: int, blocks: Sequence[int], after: int) -> Profile:
        """Return a copy with more live bytes for every head. Negative numbers reduce the live bytes.

        `forward` bytes are live in the forward and in the loss's backward, `blocks[i]` in the backward of the i-th
        block, and `after` once the backward of all blocks has ended. `static_bytes` and the optimizer's peak do not
        change.
        """

        def shifted(bases: Sequence[int]) -> tuple[int, ...]:
            return tuple(base + more for base, more in zip(bases, blocks, strict=True))

        heads = (
            replace(
                head,
                outside_peak_bytes=head.outside_peak_bytes + forward,
                loss_peak_bytes=head.loss_peak_bytes + forward,
                tail_peak_bytes=head.tail_peak_bytes + after,
                backward_base_bytes=shifted(head.backward_base_bytes),
            )
            for head in self.other_heads
        )
        bases = shifted([block.backward_base_bytes for block in self.blocks])
        return replace(
            self,
            blocks=tuple(
                replace(block, forward_base_bytes=block.forward_base_bytes + forward, backward_base_bytes=base)
                for block, base in zip(self.blocks, bases, strict=True)
            ),
            outside_peak_bytes=self.outside_peak_bytes + forward,
            loss_peak_bytes=self.loss_peak_bytes + forward,
            tail_peak_bytes=self.tail_peak_bytes + after,
            other_heads=tuple(heads),
        )

    def with_comparison(self, absent_bytes: int = 0) -> Profile:
        """Return a copy whose predicted forward includes the memory to run any one operator a second time.

        Some first calls at a size run each operator twice, to compare the bits of its results (`run/validation.py`).
        `absent_bytes` are predicted bytes that do not exist yet in these calls, such as the state of an optimizer that
        has not stepped. The comparison may take these bytes.
        """

        # On a GPU, torch.equal stores a boolean for each eight compared bytes (`replay_check.same_bits`).
        compared_share = 1.0 if self.device.startswith("cpu") else 1.125

        def with_room(kind: KindProfile) -> KindProfile:
            twice = (op for op in kind.operators if any(kind.values[value].recomputable for value in op.outputs))
            # The events contain the operators' temporary memory, which the first run has freed.
            second_results = max((sum(kind.values[v].nbytes for v in op.outputs) for op in twice), default=0)
            # The comparison keeps the state from which replay would draw, and the state to return to.
            states = 2 * max((value.nbytes for value in kind.values if value.is_generator_state), default=0)
            room = max(0, int(second_results * compared_share) + states - absent_bytes)
            events = (replace(event, extra_bytes=event.extra_bytes + room) for event in kind.forward)
            return replace(kind, forward=tuple(events))

        return replace(self, kinds=tuple(kind if kind.untrusted else with_room(kind) for kind in self.kinds))

    def with_tiles(self, num_tiles: Sequence[int]) -> Profile:
        """Return a copy in which the row-wise modules of the i-th block run in `num_tiles[i]` tiles (groups of rows).
        If `num_tiles[i]` is 0, the modules of the i-th block run without tiles.

        The copy lists a kind of block only if a block of this kind exists. Raises ValueError for a block that was not
        profiled in tiles.
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
        """Copy of the profile in which no module runs in tiles (some rows at a time)."""
        return self.with_tiles([0] * len(self.blocks))

    def under(self, plans: Iterable[Plan]) -> Profile:
        """Return a copy in which the i-th block runs as the i-th plan requires: with a module in tiles (some rows at a
        time), or without tiles."""
        return self.with_tiles([0 if plan.tiling is None else plan.tiling.num_tiles for plan in plans])

    def kind_index(self, block: BlockProfile, plan: Plan) -> int:
        """Return the index, in `kinds`, of the kind of block that `block` belongs to under `plan`. If a module runs in
        tiles (some rows at a time), the block belongs to another kind."""
        tiled = self.kinds[block.kind].tiled
        return block.kind if plan.tiling is None or tiled is None else tiled

    def kinds_of(self, block: BlockProfile) -> tuple[int, ...]:
        """Return the indices, in `kinds`, of the kinds of block that `block` may belong to: the kind without tiles and,
        if it was profiled, the kind with a module in tiles (some rows at a time)."""
        tiled = self.kinds[block.kind].tiled
        return (block.kind,) if tiled is None else (block.kind, tiled)

    def with_host_memory(self, num_blocks: int, limit_bytes: int) -> Profile:
        """Return a copy in which only the first `num_blocks` blocks may store payloads in host memory, at most
        `limit_bytes` in total.

        The limit is divided among these blocks in proportion to the bytes that each block stores without a policy.
        """
        stored_bytes = [sum(v.nbytes for v in kind.activations if v.saved or v.producer is None) for kind in self.kinds]
        total_bytes = sum(stored_bytes[block.kind] for block in self.blocks[:num_blocks])
        limits = [limit_bytes * nbytes // max(1, total_bytes) for nbytes in stored_bytes]
        limited = tuple(
            replace(kind, host_link=None if kind.host_link is None else replace(kind.host_link, limit_bytes=limit))
            for kind, limit in zip(self.kinds, limits, strict=True)
        )
        if num_blocks >= len(self.blocks):
            return replace(self, kinds=limited)
        others = tuple(replace(kind, host_link=None) for kind in self.kinds)
        rest = tuple(replace(block, kind=block.kind + len(self.kinds)) for block in self.blocks[num_blocks:])
        # Kinds that no block has would have frontiers that no policy needs.
        blocks = (*self.blocks[:num_blocks], *rest)
        used = sorted({block.kind for block in blocks})
        kinds = (*limited, *others)
        return replace(
            self,
            kinds=tuple(kinds[kind] for kind in used),
            blocks=tuple(replace(block, kind=used.index(block.kind)) for block in blocks),
        )

    def _own_head(self) -> Head:
        return Head(
            name=self.head,
            ms=self.head_ms,
            outside_stored_bytes=self.outside_stored_bytes,
            outside_peak_bytes=self.outside_peak_bytes,
            outside_live_bytes=self.outside_live_bytes,
            loss_peak_bytes=self.loss_peak_bytes,
            tail_peak_bytes=self.tail_peak_bytes,
            backward_base_bytes=tuple(block.backward_base_bytes for block in self.blocks),
        )

    @property
    def head_overhead_ms(self) -> float:
        """Time of the head (output layer and loss) minus the time of the plain head, which computes whole logits.

        The number is negative if the head is faster than the plain head, and 0 if the plain head was not profiled.
        """
        plain_ms = next((head.ms for head in self.other_heads if head.name == "plain"), self.head_ms)
        return self.head_ms - plain_ms

    def kind_of(self, block: BlockProfile) -> KindProfile:
        return self.kinds[block.kind]

    @cached_property
    def base_shared(self) -> tuple[frozenset[int], ...]:
        """Shared tensors that each block's `backward_base_bytes` includes. Under full recomputation, replays of this
        block and of earlier blocks read these tensors. The last entry also applies to the loss's backward."""
        return tuple(accumulate((frozenset(self.kind_of(block).held) for block in self.blocks), frozenset.union))

    def unread_shared_bytes(self, block: int, read: Set[int]) -> int:
        """Return the bytes of shared tensors in a block's `backward_base_bytes` that are not live under a policy.

        `block` is the index of the block. `read` contains the indices of the shared tensors that the policy keeps
        alive, because replays of this block or of earlier blocks read them.
        """
        unread = self.base_shared[block] - read
        return sum(self.shared[index].nbytes for index in unread) if unread else 0

    def extra_shared_bytes(self, block: int, read: Set[int]) -> int:
        """Return the bytes of shared tensors that a policy keeps alive in addition to the shared tensors in a block's
        `backward_base_bytes`.

        `block` is the index of the block. `read` contains the indices of the shared tensors that the policy keeps
        alive, because replays of this block or of earlier blocks read them. Tensors that autograd saves anyway are not
        counted.
        """
        extra = read - self.base_shared[block]
        return sum(shared.nbytes for index in extra if not (shared := self.shared[index]).saved) if extra else 0

    def head_peaks(self, read: Set[int]) -> tuple[int, int]:
        """Return `outside_peak_bytes` and `loss_peak_bytes` under a policy.

        `read` contains the indices of the shared tensors that the policy keeps alive, because replays read them.
        """
        base, unread = self.unread_shared_bytes(-1, frozenset()), self.unread_shared_bytes(-1, read)
        extra = self.extra_shared_bytes(-1, read)
        # The read tensors raise the peak by at most their own bytes, compared with the peak without any shared tensor.
        reduction = max(0, self.outside_live_bytes - (base - unread))
        return self.outside_peak_bytes - reduction + extra, self.loss_peak_bytes - unread + extra

    @cached_property
    def plain_stored_bytes(self) -> int:
        """Bytes that plain training keeps for backward. Each storage is counted once.

        Parameters, buffers and the batch are left out, because they are live before the step.
        """
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

    def _repr_html_(self) -> str:
        """Return the profile as a small table, which notebooks show."""
        return profile_html(self)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, atomically."""
        # Without indent and copies, because a run saves its profile at each change of prices, with some 2,000 records.
        record = {"format": "adacc_hf.profile", "version": FORMAT_VERSION, **fields_of(self)}
        write_json(path, record, indent=None)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile file. Raises FileNotFoundError, or AdaccError if the file is not a complete profile."""
        record = read_json(path, AdaccError, "profile")
        if not isinstance(record, dict) or record.get("format") != "adacc_hf.profile":
            raise AdaccError(f"{path} is not an adacc_hf profile: profile the model and save it again")
        if record.get("version") != FORMAT_VERSION:
            raise AdaccError(
                f"{path} has profile format version {record.get('version')!r}, this release reads {FORMAT_VERSION}: "
                f"profile the model again"
            )
        try:
            return _profile_from_json(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AdaccError(
                f"{path} is a damaged profile ({type(error).__name__}: {error}): profile the model again"
            ) from error


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _profile_from_json(record: dict[str, Any]) -> Profile:
    fields = {name: value for name, value in record.items() if name not in ("format", "version")}
    fields["kinds"] = tuple(_kind_from_json(kind) for kind in fields["kinds"])
    fields["blocks"] = tuple(BlockProfile(**block) for block in fields["blocks"])
    if any(not 0 <= block.kind < len(fields["kinds"]) for block in fields["blocks"]):
        raise ValueError("a block names a kind that is not in the file")
    fields["measured"] = tuple(
        (tuple((name, tuple(size)) for name, size in shapes), tuple(numbers))
        for shapes, numbers in fields.get("measured", ())
    )
    fields["shared"] = tuple(Shared(**shared) for shared in fields["shared"])
    fields["other_heads"] = tuple(
        Head(**{**head, "backward_base_bytes": tuple(head["backward_base_bytes"])}) for head in fields["other_heads"]
    )
    return Profile(**fields)


def _kind_from_json(record: dict[str, Any]) -> KindProfile:
    fields = dict(record)
    fields["values"] = tuple(_value_from_json(value) for value in fields["values"])
    fields["operators"] = tuple(
        Operator(**{**operator, "inputs": tuple(operator["inputs"]), "outputs": tuple(operator["outputs"])})
        for operator in fields["operators"]
    )
    fields["forward"] = tuple(ForwardEvent(**event) for event in fields["forward"])
    fields["backward"] = tuple(BackwardEvent(**event) for event in fields["backward"])
    fields["slots"] = tuple(fields["slots"])
    fields["held"] = tuple(fields["held"])
    fields["given"] = tuple(fields["given"])
    fields["copied_slots"] = tuple(fields.get("copied_slots", ()))
    fields["block_actions"] = tuple(map(BlockAction, fields["block_actions"]))
    tiles = fields.get("tiles")
    if tiles is not None:
        fields["tiles"] = RowTiles(**{**tiles, "modules": tuple(map(_module_tiles_from_json, tiles["modules"]))})
    link = fields.get("host_link")
    fields["host_link"] = None if link is None else HostLink(**link)
    return KindProfile(**fields)


def _module_tiles_from_json(record: dict[str, Any]) -> ModuleTiles:
    lines = {name: tuple(tuple(line) for line in record[name]) for name in ("forward", "backward")}
    return ModuleTiles(**{**record, **lines, "operators": tuple(record["operators"])})


def _value_from_json(record: dict[str, Any]) -> Value:
    codecs = tuple(codec_option_from_json(option) for option in record["codecs"])
    shapes = {name: tuple(record[name]) for name in ("shape", "encoded_shape", "place")}
    return Value(**{**record, **shapes, "codecs": codecs, "too_coarse": _pairs(record.get("too_coarse", ()))})


def codec_option_from_json(record: dict[str, Any]) -> CodecOption:
    """Convert a dictionary from a JSON file or from `asdict` to a codec option."""
    return CodecOption(**{**record, "options": _pairs(record["options"])})


def _pairs(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((str(name), value) for name, value in pairs)
