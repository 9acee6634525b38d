"""Profiles of kinds of blocks whose operators cannot be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from adacc_hf.artifacts.kind_profile import WHOLE, BackwardEvent, ForwardEvent, KindProfile, Value
from adacc_hf.artifacts.policy import BlockAction
from adacc_hf.price.shared_storage import RecordedBlock, SharedTensors
from adacc_hf.tape.operator_effects import CHANGED_UNSEEN
from adacc_hf.tape.replay_check import is_reproducible

SAVED = 0
"""Index of the profiled value that represents all saved tensors of a block."""


def untrusted_kind(group: Sequence[RecordedBlock], shared_tensors: SharedTensors, forward_ms: float) -> KindProfile:
    """Return the profile of blocks whose operators cannot be replayed, without the memory of forward and backward.

    The blocks in `group` may save different numbers of bytes, because the tokens of an expert vary. The largest counts.
    """
    block = group[0]
    arguments = [
        _value_of_bytes(index, "an argument of the block", tensor.nbytes, "input", shared_tensors.record_index(tensor))
        for index, tensor in enumerate(block.argument_tensors.values(), start=SAVED + 1)
    ]
    actions = (BlockAction.CHECKPOINT,) if block.tape.has_collectives else (BlockAction.PLAIN, BlockAction.CHECKPOINT)
    is_reproduced = not block.tape.verified or is_reproducible(block.tape)  # else only Dynamo stops at it
    # A traced graph, or a second run that ends at the last saved tensor, would omit the changes behind autograd's back.
    is_reproduced = is_reproduced and block.tape.untrusted != CHANGED_UNSEEN
    if not is_reproduced or any(each.changes_state for each in group):
        actions = (BlockAction.PLAIN,)
    return KindProfile(
        digest=block.tape.kind,
        block_class=block.tape.block_class,
        values=(_whole_saved_value(block, max(saved_bytes(each, shared_tensors) for each in group)), *arguments),
        operators=(),
        slots=(SAVED,) if block.tape.slots else (),
        forward=(),
        backward=(),
        forward_ms=forward_ms,
        given=shared_argument_records(block, shared_tensors),
        untrusted=block.tape.untrusted,
        block_actions=actions,
        generator_bytes=generator_bytes(block),
    )


def with_untrusted_memory(kind: KindProfile, forward_bytes: int, backward_bytes: int | None) -> KindProfile:
    """Return a copy of `kind` whose forward needs `forward_bytes`, and at its end stores all saved tensors at once, and
    whose backward needs `backward_bytes` in addition to the saved tensors, or was not measured (None).

    `backward_bytes` were measured under torch's checkpoint, which runs the forward again, but may stop before its
    result. So the forward is limited to these bytes plus the result, assumed to be as large as the largest input.
    """
    end_bytes, backward = forward_bytes, kind.backward
    if backward_bytes is not None and kind.slots:
        end_bytes = min(end_bytes, backward_bytes + max((v.nbytes for v in kind.values[SAVED + 1 :]), default=0))
        backward = (
            BackwardEvent(slot=0, release=False, entry_bytes=backward_bytes, extra_bytes=backward_bytes),
            BackwardEvent(slot=0, release=True, entry_bytes=0, extra_bytes=0),
        )
    forward = (
        ForwardEvent(value=-1, death=False, extra_bytes=forward_bytes),
        ForwardEvent(value=SAVED, death=True, extra_bytes=end_bytes),
    )
    return replace(kind, forward=forward, backward=backward)


def saved_bytes(block: RecordedBlock, shared_tensors: SharedTensors) -> int:
    """Return the bytes of the tensors that only autograd keeps alive after a recorded block call."""
    tape = block.tape
    own_inputs = {v for v, tensor in block.input_tensors.items() if shared_tensors.record_index(tensor) is None}
    hidden_values = block.internal_storages.keys() - block.externally_held
    own_values = [
        v for v in block.saved_values() if v in own_inputs or v in hidden_values or tape.values[v].source is None
    ]
    return sum(tape.values[v].nbytes for v in own_values)


def _whole_saved_value(block: RecordedBlock, nbytes: int) -> Value:
    """Return the profiled value that represents all saved tensors of a block."""
    value = _value_of_bytes(SAVED, "all that the block saves", nbytes, WHOLE, None)
    is_saved = bool(block.tape.slots)
    return replace(value, saved=is_saved, activation=is_saved)


def _value_of_bytes(index: int, name: str, nbytes: int, role: str, shared: int | None) -> Value:
    """Return a profiled value of `nbytes` bytes that no recorded operator computes."""
    return Value(
        index=index,
        name=name,
        shape=(nbytes,),
        encoded_shape=(nbytes,),
        dtype="uint8",
        nbytes=nbytes,
        producer=None,
        saved=False,
        activation=shared is None,
        shared=shared,
        recomputable=False,
        role=role,
    )


def shared_argument_records(block: RecordedBlock, shared_tensors: SharedTensors) -> tuple[int, ...]:
    """Return the shared tensors among a call's arguments, as indices in `SharedTensors.records`."""
    records = {shared_tensors.record_index(tensor) for tensor in block.argument_tensors.values()}
    return tuple(sorted(index for index in records if index is not None))


def generator_bytes(block: RecordedBlock) -> int:
    """Return the bytes of generator state that torch's checkpoint stores on the block's device, 0 on a GPU."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in block.argument_tensors.values())
    return torch.get_rng_state().nbytes if on_cpu else 0
