"""Profile of one kind of block: saved tensors, operators, events of memory, and costs of actions, without torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from adacc_hf.artifacts.call_names import numbered_names
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR, is_statistic, source_activations, walk_back
from adacc_hf.artifacts.host_link import HostLink
from adacc_hf.artifacts.policy import BlockAction, Choice, Place
from adacc_hf.artifacts.tiles import RowTiles, Tiling
from adacc_hf.kernels._host_payloads import HOST

WHOLE = "whole"
"""Role of the activation that represents all saved tensors of a block that cannot be replayed."""


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
    """Index into `Profile.shared` of an input that others also hold, so that it is always live, or None."""
    recomputable: bool
    """True if replay from stored values gave the original bits. Replay recomputes no other values (rule R7)."""
    role: str
    """Role of the tensor, by which codecs are selected (paper, section 3.2): linear, norm, activation, qkv, softmax,
    mask, input, parameter (a cast), generator (state of a random generator), whole (see WHOLE), other."""
    cached: bool = False
    """True if the value lives until the end of the model's forward under every policy: in autocast's cache, or
    referenced by a module or an autograd Function."""
    is_kept: bool = False
    """True if the value stays alive without the saved tensors of this block: a value that is `cached`, or an output
    that another block or the rest of the model holds."""
    codecs: tuple[CodecOption, ...] = ()
    equal_to: int | None = None
    """Index of an earlier activation with the same bits, which backward reads instead of recomputing, or None."""
    replay_error: float = 0.0
    """Largest relative error in an operator's gradient if the value is recomputed from lossily stored activations."""
    taken_after: int = 0
    """For the state of a random generator: number of tensors that autograd saves before the block stores the state."""
    place: Place = ()
    """For a block input that codecs can encode: its place among the arguments of a call. Otherwise ()."""
    too_coarse: tuple[tuple[str, float], ...] = ()
    """Excluded codecs, each with the relative error that it causes in the gradient of an operator."""
    is_movable: bool = False
    """True if the value may be stored in host memory."""
    is_decision: bool = False
    """True for the result of an operator that chooses indices from data (see `exact_recompute_rules.decisions`)."""

    @property
    def is_generator_state(self) -> bool:
        """True if the value is the state of a random generator, for replay of random operators."""
        return self.role == "generator"

    @property
    def is_statistic(self) -> bool:
        """True if the value has one number per row of another tensor."""
        return is_statistic(self.shape)

    @property
    def is_far_recomputed(self) -> bool:
        """True if a replay from lossily stored activations would degrade a gradient."""
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
    """Bytes that an execution allocates besides its outputs. Negative if outputs share the storage of inputs."""


@dataclass(frozen=True, kw_only=True)
class ForwardEvent:
    """One event of a block's forward: its start, the first time that a value is saved, or (`death`) the release of the
    last reference except autograd's.

    `value` is -1 for the start, and for appended events of other modules that run before the next block call.
    """

    value: int
    death: bool
    extra_bytes: int
    """Peak between this event and the next, above the live bytes at the start, without stored values."""
    tiled: int | None = None
    """Index, in `RowTiles.modules`, of the module that runs in tiles until the next event, or None."""


@dataclass(frozen=True, kw_only=True)
class BackwardEvent:
    """One event of a block's backward: autograd unpacks or releases a saved-tensor slot. Releases of slot -1 mark the
    start and the end of a module in tiles."""

    slot: int
    release: bool
    entry_bytes: int
    """Live bytes at the event, without stored and replayed values: gradients that are not used up yet."""
    extra_bytes: int
    """Peak between this event and the next, without stored and replayed values: gradients and temporaries."""
    tiled: int | None = None
    """Index, in `RowTiles.modules`, of the module that runs in tiles until the next event, or None."""


def unpack_order(events: Iterable[BackwardEvent]) -> tuple[int, ...]:
    """Return the saved-tensor slots in the order in which backward first unpacks each slot."""
    return tuple(dict.fromkeys(event.slot for event in events if not event.release))


@dataclass(frozen=True, kw_only=True)
class KindProfile:
    """Profile of one kind of block: blocks of the same class, parameter shapes and recorded operators."""

    digest: str
    block_class: str
    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    slots: tuple[int, ...]
    """Value in each saved-tensor slot, in the order in which autograd saves. -1 for parameters and buffers."""
    backward: tuple[BackwardEvent, ...]
    """Events at which autograd unpacks or releases saved-tensor slots, in the order of the backward."""
    forward: tuple[ForwardEvent, ...]
    """Events at which values are saved for backward or freed, in the order of a forward that stores nothing."""
    forward_ms: float
    """Sum of the times of the operators in a block's forward."""
    held: tuple[int, ...] = ()
    """Indices into `Profile.shared` of tensors that a block keeps alive only if its replay reads them, as in the
    measured step."""
    given: tuple[int, ...] = ()
    """Indices into `Profile.shared` of all arguments of a call, which torch's checkpoint keeps alive."""
    copied_slots: tuple[int, ...] = ()
    """Slots of autograd Functions written in Python, whose backward may write into saved tensors. It gets copies of the
    tensors that a replay reads later (rule R6)."""
    untrusted: str | None = None
    """Reason why the operators cannot be replayed, or None. Without replay, all saved tensors form one activation of
    role WHOLE."""
    block_actions: tuple[BlockAction, ...] = (BlockAction.PLAIN, BlockAction.CHECKPOINT)
    """Allowed actions for the whole block. Torch's checkpoint is allowed if a replay of all operators was bit-exact, or
    if no operator can be replayed. Collectives must run again on all ranks or on none."""
    elsewhere_bytes: int = 0
    """Bytes of saved parameter casts that autocast cached in an earlier call. A second forward computes them again."""
    generator_bytes: int = 0
    """Bytes of the random generators' states that torch's checkpoint stores on the block's device."""
    host_link: HostLink | None = None
    """Cost of payloads in host memory. None if payloads must stay on the device."""
    tiled: int | None = None
    """Index into `Profile.kinds` of the variant in which modules run in tiles, or None. Blocks have the variant only if
    a policy chooses it (`Profile.with_tiles`)."""
    tiles: RowTiles | None = None
    """The row-wise modules that run in tiles. None for a kind without tiles."""
    extra_ms: float = 0.0
    """Time in ms that tiles add under every plan of this kind."""

    @property
    def tiling(self) -> Tiling | None:
        """The tiles in which modules run under every plan for this kind, or None."""
        return self.tiles.tiling if self.tiles else None

    def in_tiles(self, num_tiles: int) -> KindProfile:
        """Return a copy of this kind, which has `tiles`, with the memory and time of `num_tiles` tiles. With 0 tiles,
        no memory of a tile is included."""
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
        """Map from duplicate values to earlier activations with the same bits, by value index."""
        return {value.index: value.equal_to for value in self.values if value.equal_to is not None}

    @cached_property
    def exactness_dependents(self) -> dict[int, frozenset[int]]:
        """Map from each saved activation that may be recomputed only from exact values to these: the rows of a
        statistic, or all upstream activations if the replay error is too large (`exact_recompute_rules.py`)."""
        saved = [value for value in self.activations if value.saved]
        imprecise = {
            v.index: frozenset(filter(self._is_activation, walk_back(self._reads(v.index), self._reads)[1]))
            for v in saved
            if v.is_far_recomputed
        }
        # If a statistic's rows are recomputed, the statistic is recomputed with them, because it must match the rows.
        rows = {v.index: source_activations(v.index, self._reads, self._is_activation) for v in saved if v.is_statistic}
        return imprecise | rows

    @cached_property
    def allows_lossy_inputs(self) -> bool:
        """True if the block may run again on inputs that were stored lossily.

        False if it cannot be replayed, chooses indices, or if the replay error of a saved value is too large.
        """
        is_inexact = any(value.is_decision or (value.saved and value.is_far_recomputed) for value in self.values)
        return self.untrusted is None and not is_inexact

    def codec_options(self, value: int) -> tuple[CodecOption, ...]:
        """Return the codecs that may compress `value`, also those with their payload in host memory."""
        record, link = self.values[value], self.host_link
        if link is None or not record.is_movable:
            return record.codecs
        unencoded = CodecOption(
            codec=HOST, options=(), nbytes=record.nbytes, encode_ms=0.0, decode_ms=0.0, error=0.0, lossless=True
        )
        return (*record.codecs, *(link.moved(option) for option in (unencoded, *record.codecs)))

    def codec_option(self, value: int, choice: Choice) -> CodecOption:
        """Return the cost of the codec of `choice` for `value`. Raises ValueError if it was not measured."""
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
        """Return the saved activations that must not be recomputed if the values in `lossy` are stored lossily."""
        return frozenset(value for value, others in self.exactness_dependents.items() if not others.isdisjoint(lossy))

    def with_merged_values(self, equal: Mapping[int, int]) -> KindProfile:
        """Return a copy in which operators and slots refer to the value `equal[v]` wherever they referred to `v`."""
        if not equal:
            return self
        operators = (
            operator
            if equal.keys().isdisjoint(operator.inputs)
            else replace(operator, inputs=tuple(dict.fromkeys(equal.get(v, v) for v in operator.inputs)))
            for operator in self.operators
        )
        replaced = {v: replace(self.values[v], saved=False, activation=False, equal_to=None) for v in equal}
        return replace(
            self,
            values=tuple(replaced.get(value.index, value) for value in self.values),
            operators=tuple(operators),
            slots=tuple(equal.get(value, value) for value in self.slots),
        )
