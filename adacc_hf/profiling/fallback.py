"""The profile of a kind that torch's checkpoint runs, since its operators depend on data (rule R8).

All that such a block saves is one activation: retained, the block runs plainly; recomputed, torch's checkpoint runs it,
holds all of the block's arguments and the state of the random generator, and runs the whole forward once more. So the
solver and the simulator need not know about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from adacc_hf.profile import BackwardEvent, ForwardEvent, KindProfile, Operator, Value
from adacc_hf.profiling.sharing import RecordedBlock, Sharing
from adacc_hf.tapes.local_tensors import storage_of

SAVED = 0
"""The index of all that the block saves."""


def fallback_kind(block: RecordedBlock, sharing: Sharing, forward_ms: float) -> KindProfile:
    """The kind of `block`, its memory still to be measured."""
    arguments = [
        _value(index, "an argument of the block", storage_of(tensor).nbytes(), sharing.index_of(tensor))
        for index, tensor in enumerate(block.given.values(), start=SAVED + 1)
    ]
    generator = [_value(len(arguments) + 1, "the random generator's state", _generator_bytes(block), None)]
    values = [_saved_value(block, sharing), *arguments, *generator]
    checkpoint = Operator(
        index=0,
        name="torch.utils.checkpoint",
        module="",
        inputs=tuple(value.index for value in values[1:]),
        outputs=(SAVED,),
        ms=forward_ms,
        replayable=True,
    )
    return KindProfile(
        digest=block.tape.kind,
        block_class=block.tape.block_class,
        values=tuple(values),
        operators=(checkpoint,),
        slots=(SAVED,) if block.tape.slots else (),
        forward=(),
        backward=(),
        forward_ms=forward_ms,
        fallback=block.tape.untrusted,
    )


def with_fallback_forward(kind: KindProfile, forward: Sequence[ForwardEvent]) -> KindProfile:
    """`kind` with its measured forward, in which it counts as storing everything from the start, if it does."""
    most = max(event.extra_bytes for event in forward)
    stored = ForwardEvent(value=SAVED, death=True, extra_bytes=most)
    return replace(kind, forward=(ForwardEvent(value=-1, death=False, extra_bytes=most), stored))


def fallback_backward(kind: KindProfile, extra_bytes: int | None) -> tuple[BackwardEvent, ...]:
    """The backward of `kind`, in which at most `extra_bytes` were live besides what it stored; None if it has none.

    A block that had nothing to save when it was recorded has none either, whatever it did when it was measured.
    """
    if extra_bytes is None or not kind.slots:
        return ()
    besides = extra_bytes - kind.values[SAVED].nbytes
    return (
        BackwardEvent(slot=0, release=False, entry_bytes=besides, extra_bytes=besides),
        BackwardEvent(slot=0, release=True, entry_bytes=0, extra_bytes=0),
    )


def _saved_value(block: RecordedBlock, sharing: Sharing) -> Value:
    tape = block.tape
    own_inputs = {v for v, tensor in block.arguments.items() if sharing.index_of(tensor) is None}
    hidden = block.made.keys() - block.held_besides
    own = [v for v in block.saved() if v in own_inputs or v in hidden or tape.values[v].source is None]
    nbytes = sum(tape.values[v].nbytes for v in own)
    saved = bool(tape.slots)
    whole = _value(SAVED, "all that the block saves", nbytes, None)
    return replace(whole, producer=0, saved=saved, activation=saved, recomputable=True, role="other")


def _value(index: int, name: str, nbytes: int, shared: int | None) -> Value:
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
        role="input",
    )


def _generator_bytes(block: RecordedBlock) -> int:
    """What torch's checkpoint keeps on the block's device; a GPU's state is kept on the CPU."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in block.given.values())
    return torch.get_rng_state().nbytes if on_cpu else 0
