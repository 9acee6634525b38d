"""The result of a recorded forward: the calls of blocks, and their kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.block_walk import BlockOutcome
from adacc_hf.artifacts.call_names import calls_per_block, split_call
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import KindProfile
from adacc_hf.artifacts.plans import checkpoint_plan, recompute_plan
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Plan
from adacc_hf.price.block_memory import BlockMemory
from adacc_hf.price.kind_profile_builder import KindProfileBuilder, untrusted_kind
from adacc_hf.price.measurement import Prices
from adacc_hf.price.shared_storage import RecordedBlock, SharedTensors


class ModelRecording:
    """The calls of blocks in one recorded forward, grouped by kind, without the forward's tensors.

    `prices` maps the digest of a call's tape to its prices, and `memory` (digest, True if parameters have gradients
    when the call's backward begins) to its memory. The `kind` of each call is set.
    """

    def __init__(
        self,
        blocks: list[RecordedBlock],
        shared_tensors: SharedTensors,
        prices: Mapping[str, Prices],
        memory: Mapping[tuple[str, bool], BlockMemory],
        config: AdaccConfig,
    ) -> None:
        self.blocks, self.shared_tensors = blocks, shared_tensors
        groups: dict[Any, list[RecordedBlock]] = {}
        self.positions = _call_positions(blocks)
        for block in blocks:
            groups.setdefault((_kind_key(block, shared_tensors), self.positions[block.name]), []).append(block)
        for index, group in enumerate(groups.values()):
            for block in group:
                block.kind = index
        # Gradients of parameters exist before the backward of all calls of a block but the last, and in accumulation.
        accumulates = all(has_gradients for _, has_gradients in memory)
        self.kinds = [
            _build_kind(
                group,
                shared_tensors,
                prices,
                memory,
                accumulates or self.positions[group[0].name].is_before_last,
                config,
            )
            for group in groups.values()
        ]
        """Profile of each kind of block, by `RecordedBlock.kind`."""

    def outcome_of(self, block: RecordedBlock) -> BlockOutcome:
        """Return the memory and time of `block` in the recorded step."""
        kind = self.kinds[block.kind]
        checkpointed = checkpoint_plan(kind) if block.is_checkpointed and kind.untrusted is None else None
        return run_block(kind, checkpointed or recorded_plan(kind, block.is_retained))

    def kept_bytes(self, block: RecordedBlock) -> tuple[int, int]:
        """Return the bytes that `block` kept in the recorded step, all, and those that it alone keeps live then.

        They differ from what its plan stores: when the plan was chosen, autograd held tensors that it freed afterwards,
        and later calls did not share casts yet.
        """
        outcome, kind = self.outcome_of(block), self.kinds[block.kind]
        if block.tape.untrusted is not None or block.is_checkpointed:
            return outcome.stored_bytes, outcome.live_bytes
        notes, saved = block.input_tensors, set(block.saved_values())
        dead = {ref.value for ref in block.tape.slots} - saved
        own = {v for v in dead if v not in notes or self.shared_tensors.record_index(notes[v]) is None}
        own_kept = own & block.kept_values
        retained = {value for value, choice in recorded_plan(kind).choices if choice is RETAIN and value in saved}
        values = block.tape.values
        unkept = {v for v in retained - block.kept_values if own_kept or v in block.casts}
        more = sum(values[v].nbytes for v in own_kept) - sum(kind.values[v].nbytes for v in unkept)
        cached_bytes = sum(kind.values[v].nbytes for v in unkept if kind.values[v].cached)
        return outcome.stored_bytes + more, outcome.live_bytes + more + cached_bytes


def recorded_plan(kind: KindProfile, is_retained: bool = False) -> Plan:
    """Return the plan under which a block of `kind` trained while it was recorded: without codecs."""
    plan = recompute_plan(kind)
    if not is_retained and (plan.is_checkpointed or kind.untrusted is not None):
        return plan
    recomputed = [value.index for value in kind.activations if value.recomputable and not is_retained]
    choices = tuple((v.index, RECOMPUTE if v.index in recomputed else RETAIN) for v in kind.activations)
    return Plan(kind=kind.digest, choices=choices)


class CallPosition(NamedTuple):
    """Position of a block call in the forward. Calls in different positions need different memory."""

    is_before_last: bool
    """True if the block is called again: the gradients of its parameters exist before this call's backward."""
    follows_rest: bool
    """True if other parts of the model run between the previous call of a block and this one."""
    precedes_rest: bool
    """True if other parts of the model run between this call and the next one of a block."""


def _call_positions(blocks: Sequence[RecordedBlock]) -> dict[str, CallPosition]:
    """Return the position of each block call by name."""
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
        name: CallPosition(number < last[block], begin, end)
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
