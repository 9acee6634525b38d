"""The result of a recorded forward: the calls of blocks, and their kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.block_walk import BlockOutcome
from adacc_hf.artifacts.call_names import calls_per_block, split_call
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import KindProfile, unpack_order
from adacc_hf.artifacts.plans import checkpoint_plan, recompute_plan
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Plan
from adacc_hf.artifacts.profile import Shared
from adacc_hf.price.block_memory import BlockMemory
from adacc_hf.price.cost_model import Prices
from adacc_hf.price.kind_profile_builder import KindProfileBuilder
from adacc_hf.price.shared_storage import RecordedBlock, SharedTensors
from adacc_hf.price.tile_memory import TileMemory
from adacc_hf.price.unreplayable_kinds import saved_bytes, untrusted_kind
from adacc_hf.tape.tape_cache import TapeCache


@dataclass(frozen=True, kw_only=True)
class ModelRecording:
    """The calls of blocks in one recorded forward, grouped by kind, without the forward's tensors."""

    blocks: list[RecordedBlock]
    """The recorded block calls, in the order of the forward."""
    kinds: list[KindProfile]
    """Profile of each kind of block, by `RecordedBlock.kind`."""
    shared: tuple[Shared, ...]
    """Records of the tensors that block calls share with each other and with the rest of the model."""
    calls_before_rest: set[str]
    """Names of the calls after which other parts of the model run before the next call of a block."""
    calls_after_rest: set[str]
    """Names of the calls before which other parts of the model run after another call of a block."""
    unplanned_bytes: dict[str, tuple[int, int]]
    """Bytes that a call kept in the recorded step beyond what its plan stores, and the same without casts in autocast's
    cache: when the plan was chosen, autograd held tensors that it freed afterwards, and later calls did not share casts
    yet."""
    saved_bytes: dict[str, int]
    """Bytes that autograd saved in each call that cannot be replayed, by call name."""
    tape_cache: TapeCache
    freed_shared: frozenset[int]
    """Indices into `shared` of the tensors that only replays keep alive when the head runs."""
    tile_memory: Mapping[str, Mapping[str, TileMemory]] = field(default_factory=dict)
    """Memory of one tile of each row-wise module, by the digest of the block's tape in tiles and the module's path."""

    @staticmethod
    def of(
        blocks: list[RecordedBlock],
        shared_tensors: SharedTensors,
        prices: Mapping[str, Prices],
        memory: Mapping[tuple[str, bool], BlockMemory],
        config: AdaccConfig,
        tape_cache: TapeCache,
        freed_keys: Set[int],
    ) -> ModelRecording:
        """Group the recorded calls by kind, and set each call's `kind`.

        `prices` maps the digest of a call's tape to its prices, and `memory` (digest, True if parameters have gradients
        when the call's backward begins) to its memory. `freed_keys` are the storages that were freed when the head ran.
        """
        groups: dict[Any, list[RecordedBlock]] = {}
        positions = _call_positions(blocks)
        for block in blocks:
            groups.setdefault((_kind_key(block, shared_tensors), positions[block.name]), []).append(block)
        for index, group in enumerate(groups.values()):
            for block in group:
                block.kind = index
        # Gradients of parameters exist before the backward of all calls of a block but the last, and in accumulation.
        accumulates = all(has_gradients for _, has_gradients in memory)
        kinds = [
            _build_kind(group, shared_tensors, prices, memory, accumulates or positions[group[0].name][0], config)
            for group in groups.values()
        ]
        for block in blocks:
            tape_cache.learn_order(block.tape, unpack_order(kinds[block.kind].backward))
        return ModelRecording(
            blocks=blocks,
            kinds=kinds,
            shared=tuple(shared_tensors.records),
            freed_shared=shared_tensors.records_of(freed_keys),
            calls_before_rest={name for name, (_, _, is_end) in positions.items() if is_end},
            calls_after_rest={name for name, (_, is_begin, _) in positions.items() if is_begin},
            unplanned_bytes={
                block.name: _unplanned_bytes(block, kinds[block.kind], shared_tensors)
                for block in blocks
                if block.tape.untrusted is None and not block.is_checkpointed
            },
            saved_bytes={
                block.name: saved_bytes(block, shared_tensors) for block in blocks if block.tape.untrusted is not None
            },
            tape_cache=tape_cache,
        )

    @property
    def watched(self) -> list[RecordedBlock]:
        """The block calls at which memory is measured in a step: the last call of each kind."""
        return list({block.kind: block for block in self.blocks}.values())

    def outcome_of(self, block: RecordedBlock) -> BlockOutcome:
        """Return the memory and time of `block` in the recorded step."""
        kind = self.kinds[block.kind]
        checkpointed = checkpoint_plan(kind) if block.is_checkpointed and kind.untrusted is None else None
        return run_block(kind, checkpointed or recorded_plan(kind, block.is_retained))


def _unplanned_bytes(block: RecordedBlock, kind: KindProfile, shared_tensors: SharedTensors) -> tuple[int, int]:
    notes, saved = block.input_tensors, set(block.saved_values())
    dead = {ref.value for ref in block.tape.slots} - saved
    own = {v for v in dead if v not in notes or shared_tensors.record_index(notes[v]) is None}
    own_kept = own & block.kept_values
    retained = {value for value, choice in recorded_plan(kind).choices if choice is RETAIN and value in saved}
    values = block.tape.values
    unkept = {v for v in retained - block.kept_values if own_kept or v in block.casts}
    stored = sum(values[v].nbytes for v in own_kept) - sum(kind.values[v].nbytes for v in unkept)
    return stored, stored + sum(kind.values[v].nbytes for v in unkept if kind.values[v].cached)


def recorded_plan(kind: KindProfile, is_retained: bool = False) -> Plan:
    """Return the plan under which a block of `kind` trained while it was recorded: without codecs."""
    plan = recompute_plan(kind)
    if not is_retained and (plan.is_checkpointed or kind.untrusted is not None):
        return plan
    recomputed = [value.index for value in kind.activations if value.recomputable and not is_retained]
    choices = tuple((v.index, RECOMPUTE if v.index in recomputed else RETAIN) for v in kind.activations)
    return Plan(kind=kind.digest, choices=choices)


def _call_positions(blocks: Sequence[RecordedBlock]) -> dict[str, tuple[bool, bool, bool]]:
    """Return three truth values for each block call, because calls in different positions need different memory: the
    gradients of its parameters exist before its backward; the rest of the model runs directly before it; and directly
    after it (if the loss calls the model several times)."""
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
    """Return a key of a recorded block, equal for blocks of one kind: its whole tape, or only the class and the
    arguments if its operators may depend on data."""
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
    group: list[RecordedBlock],
    shared_tensors: SharedTensors,
    prices: Mapping[str, Prices],
    memory: Mapping[tuple[str, bool], BlockMemory],
    has_gradients: bool,
    config: AdaccConfig,
) -> KindProfile:
    """Return the profile that the recorded blocks in `group`, all of one kind, share."""
    tape = group[0].tape
    if tape.untrusted is not None:
        times = [sum(prices[block.tape.digest].operator_ms) for block in group]
        kind = untrusted_kind(group, shared_tensors, sum(times) / len(times))
    else:
        kind = KindProfileBuilder(group, shared_tensors, prices[tape.digest], config).build()
        own = memory.get((tape.digest, has_gradients))
        kind = _with_memory(kind, memory[tape.digest, False] if own is None else own)
    replay_records = run_block(kind, recompute_plan(kind)).shared
    unsaved = tuple(sorted(i for i in replay_records if not shared_tensors.records[i].saved))
    return replace(kind, held=unsaved)


def _with_memory(kind: KindProfile, memory: BlockMemory) -> KindProfile:
    """Return a copy of `kind` with measured events. Casts that forward did not free are marked as cached."""
    dead = {event.value for event in memory.forward if event.death}
    casts = {value for operator in kind.operators if "._to_copy." in operator.name for value in operator.outputs}
    # A value that is not saved has no events. Autocast also caches casts that are not saved, such as those of biases.
    # Other values computed from parameters, such as dequantized weights, are freed after their product.
    cached = {
        v.index
        for v in kind.values
        if v.cached or (v.role == "parameter" and v.index not in dead and (v.saved or v.index in casts))
    }
    values = tuple(replace(v, cached=v.index in cached) for v in kind.values)
    return replace(kind, values=values, forward=memory.forward, backward=memory.backward)
