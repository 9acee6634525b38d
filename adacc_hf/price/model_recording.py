"""The result of a recorded forward: the calls of blocks, and their kinds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.block_walk import BlockOutcome
from adacc_hf.artifacts.call_names import calls_per_block, split_call
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.artifacts.profile import BackwardEvent, ForwardEvent, KindProfile, Shared, unpack_order
from adacc_hf.price.cost_model import Prices
from adacc_hf.price.kind_profile_builder import KindProfileBuilder
from adacc_hf.price.memory_probes import SlotProbe
from adacc_hf.price.shared_storage import RecordedBlock, SharedTensors
from adacc_hf.price.tile_memory import TileMemory
from adacc_hf.price.unreplayable_kinds import saved_bytes, untrusted_kind, with_untrusted_forward
from adacc_hf.run.block_executor import BlockExecutor
from adacc_hf.run.blocks import BlockFunction, LaterCall
from adacc_hf.tape.tape import Source
from adacc_hf.tape.tape_cache import TapeCache


@dataclass(frozen=True, kw_only=True)
class ModelRecording:
    """The calls of blocks in one forward, grouped by kind, without the tensors of the forward."""

    blocks: list[RecordedBlock]
    """The calls in the order of the forward."""
    kinds: list[KindProfile]
    """Profile of each kind, at the index `RecordedBlock.kind`."""
    shared: tuple[Shared, ...]
    """Records of the tensors that calls share with each other and with the rest of the model."""
    replay_sources: dict[str, list[Source]]
    """Sources of the shared inputs that each call holds for replay under full recomputation."""
    calls_before_rest: set[str]
    """Calls after which the rest of the model runs before the next call of a block."""
    saved_bytes: dict[str, int]
    """Bytes that autograd saved in each call whose operators cannot be replayed."""
    tape_cache: TapeCache
    tile_memory: Mapping[str, Mapping[str, TileMemory]] = field(default_factory=dict)
    """Memory of one tile of each row-wise module of a block, by the digest of the tape with the modules in tiles and by
    the module's path."""

    @staticmethod
    def of(
        blocks: list[RecordedBlock],
        shared_tensors: SharedTensors,
        prices: Mapping[str, Prices],
        config: AdaccConfig,
        tape_cache: TapeCache,
    ) -> ModelRecording:
        """Group `blocks` by kind, set each block's `kind`, and free the tensors of the recorded forward.

        `prices` maps the digest of each tape to the measured times of the tape's operators and codecs.
        """
        groups: dict[Any, list[RecordedBlock]] = {}
        positions = _call_positions(blocks)
        for block in blocks:
            groups.setdefault((_kind_key(block, shared_tensors), positions[block.name]), []).append(block)
        for index, group in enumerate(groups.values()):
            for block in group:
                block.kind = index
        kinds = [_build_kind(group, shared_tensors, prices, config) for group in groups.values()]
        replay_records = [recompute_outcome(kind).shared for kind in kinds]
        recording = ModelRecording(
            blocks=blocks,
            kinds=kinds,
            shared=tuple(shared_tensors.records),
            replay_sources={block.name: shared_tensors.sources(block, replay_records[block.kind]) for block in blocks},
            calls_before_rest={name for name, (_, _, is_end) in positions.items() if is_end},
            saved_bytes={
                block.name: saved_bytes(block, shared_tensors) for block in blocks if block.tape.untrusted is not None
            },
            tape_cache=tape_cache,
        )
        for block in blocks:
            block.input_tensors, block.argument_tensors, block.outputs, block.casts = {}, {}, {}, {}
        return recording

    @property
    def watched_names(self) -> list[str]:
        """Names of the calls at which memory is measured: the last block call of each kind, which represents the
        kind."""
        return list({block.kind: block.name for block in self.blocks}.values())

    @cached_property
    def outcomes(self) -> list[BlockOutcome]:
        """Memory and time of a block under full recomputation, one `BlockOutcome` for each kind."""
        return [recompute_outcome(kind) for kind in self.kinds]

    def kind_of(self, name: str) -> KindProfile:
        """Return the profile of the kind of the call `name`."""
        return next(self.kinds[block.kind] for block in self.blocks if block.name == name)

    def with_forwards(self, events: Mapping[str, tuple[ForwardEvent, ...]]) -> ModelRecording:
        """Return a copy of this recording with the memory events of a forward in each kind.

        `events` has the memory events of the calls in `watched_names`.
        """
        names = self.watched_names
        return replace(self, kinds=[_with_forward(kind, events[names[i]]) for i, kind in enumerate(self.kinds)])

    def set_full_recompute_strategies(
        self, functions: Mapping[str, BlockFunction | LaterCall], watched_names: Collection[str]
    ) -> list[SlotProbe]:
        """Set the strategy of every block call: a probe for `watched_names`, full recomputation for all other calls.

        Return the probes. A call in `watched_names` whose operators cannot be replayed has no probe, and recomputes
        too.
        """
        probes = []
        for block in self.blocks:
            function, kind = functions[block.name], self.kinds[block.kind]
            if block.name in watched_names and kind.untrusted is None:
                function.strategy = SlotProbe(block.name, kind, self.replay_sources[block.name])
                probes.append(function.strategy)
            else:
                function.strategy = BlockExecutor(block.name, recompute_plan(kind), self.tape_cache, block.known_shapes)
        return probes

    def learn_orders(self, events: Mapping[str, Sequence[BackwardEvent]]) -> None:
        """Read the order in which backward unpacks saved tensors from `events`, the measured events of
        `watched_names`."""
        for block in self.blocks:
            self.tape_cache.learn_order(block.tape, unpack_order(events.get(block.name, ())))


def recompute_outcome(kind: KindProfile) -> BlockOutcome:
    """Return the memory and time of a block of `kind` under full recomputation."""
    return run_block(kind, recompute_plan(kind))


def _call_positions(blocks: Sequence[RecordedBlock]) -> dict[str, tuple[bool, bool, bool]]:
    """Return a dict from each call to the properties of its position in the step that affect its memory.

    A position is three truth values: the gradients of the call's parameters exist before its backward, and the rest of
    the model runs before the call, and after it. The rest of the model runs before or after a call if the loss calls
    the whole model several times.
    """
    names = [block.name for block in blocks]
    last = calls_per_block(names)
    numbers = [split_call(name) for name in names]
    # True where the rest of the model runs before the call: the loss calls the model again, with other inputs.
    begins = [
        number > previous_number and not block.uses_previous_result
        for block, (_, number), (_, previous_number) in zip(blocks, numbers, [("", 1), *numbers], strict=False)
    ]
    ends = [*begins[1:], False]
    return {
        name: (number < last[block], begin, end)
        for name, (block, number), begin, end in zip(names, numbers, begins, ends, strict=True)
    }


def _kind_key(block: RecordedBlock, shared_tensors: SharedTensors) -> tuple[Any, ...]:
    """Return the key that blocks of one kind share: everything in the tape, or only the class and the arguments if
    the block's operators may depend on data."""
    inputs = tuple(shared_tensors.record_index(tensor) for tensor in block.holdable_inputs())
    if block.tape.untrusted is not None:
        signatures = [(source, tensor.shape, tensor.dtype) for source, tensor in block.argument_tensors.items()]
        return block.tape.identity, bool(block.tape.slots), block.tape.has_collectives, tuple(signatures), inputs
    shared_outputs = tuple(v for v, tensor in block.outputs.items() if shared_tensors.is_shared_output(tensor))
    shared_casts = tuple(
        (value, shared_tensors.owns_cast(block, cast))
        for value, cast in block.casts.items()
        if shared_tensors.is_shared_cast(cast)
    )
    return block.tape.digest, block.dead_slots, block.externally_held, inputs, shared_outputs, shared_casts


def _build_kind(
    group: list[RecordedBlock], shared_tensors: SharedTensors, prices: Mapping[str, Prices], config: AdaccConfig
) -> KindProfile:
    """Return the profile of the kind whose recorded blocks are `group`, without the memory of forward and backward."""
    tape = group[0].tape
    if tape.untrusted is not None:
        times = [sum(prices[block.tape.digest].operator_ms) for block in group]
        kind = untrusted_kind(group, shared_tensors, sum(times) / len(times))
    else:
        kind = KindProfileBuilder(group, shared_tensors, prices[tape.digest], config).build()
    replay_records = recompute_outcome(kind).shared
    unsaved = tuple(sorted(i for i in replay_records if not shared_tensors.records[i].saved))
    return replace(kind, held=unsaved, untraced=group[0].known_shapes.untraced)


def _with_forward(kind: KindProfile, forward: tuple[ForwardEvent, ...]) -> KindProfile:
    """Return `kind` with its measured forward. Parameter casts that the forward did not free are marked as cached."""
    if kind.untrusted is not None:
        return with_untrusted_forward(kind, forward)
    dead = {event.value for event in forward if event.death}
    values = tuple(replace(v, cached=v.cached or (v.role == "parameter" and v.index not in dead)) for v in kind.values)
    return replace(kind, values=values, forward=forward)
