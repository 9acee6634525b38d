"""Memory and time of one block under any plan: a plan with one action per activation, or torch's checkpoint."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from adacc_hf.artifacts.block_walk import BlockOutcome, BlockWalk
from adacc_hf.artifacts.plans import plain_plan
from adacc_hf.artifacts.policy import RETAIN, Plan

if TYPE_CHECKING:
    from adacc_hf.artifacts.kind_profile import KindProfile


def run_block(kind: KindProfile, plan: Plan) -> BlockOutcome:
    """Return the memory and time of one block of `kind` under `plan`.

    Raises ValueError for a plan that cannot be executed.
    """
    return _checkpointed_outcome(kind, plan) if plan.is_checkpointed else BlockWalk(kind, plan).outcome()


def _checkpointed_outcome(kind: KindProfile, plan: Plan) -> BlockOutcome:
    """Return the memory and time of one block under torch's checkpoint, which stores only the inputs for backward.

    - An input lives until the block's backward ends. An input with a codec is encoded at the end of the forward and
      decoded before the second forward; the payload lives until the block's backward ends too. A payload in host memory
      is on the device only while the payload is copied.
    - A saved tensor with a reference outside the block (`Value.is_kept`) stays live, and the second forward computes a
      second copy.
    - The second forward stops at the last saved tensor (early stop of `torch.utils.checkpoint`). An operator saves its
      inputs before the operator runs. Therefore the matrix product at the end of a block is not computed again.
    - If a block cannot be replayed, its whole backward was measured under torch's checkpoint.
    """
    plain = plain_plan(kind)
    if not kind.slots:  # autograd saves no tensor, so that no second forward runs
        return BlockWalk(kind, plain).outcome()
    choices = dict(plan.choices)
    compressed = {
        v.index: kind.codec_option(v.index, choices[v.index]) for v in kind.inputs if choices[v.index] != RETAIN
    }
    retained = {value.index: value.nbytes for value in kind.inputs if value.index not in compressed}
    payload_bytes = sum(option.nbytes for option in compressed.values())
    staging_bytes = max((option.staging_bytes for option in compressed.values()), default=0)
    decoded_bytes = sum(kind.values[value].nbytes for value in compressed)
    walk = BlockWalk(kind, plain, held_inputs=retained).outcome()
    gradient_bytes = kind.backward[0].entry_bytes if kind.backward else 0
    externally_held = [value for value in kind.activations if value.saved and value.is_kept]
    extra_bytes = payload_bytes + kind.generator_bytes + sum(value.nbytes for value in externally_held)
    # At the start of the second forward, all inputs and a copy of the generator's current state are live.
    inputs_bytes = sum(retained.values()) + decoded_bytes + kind.generator_bytes
    backward_bytes = extra_bytes + kind.elsewhere_bytes
    forward_bytes = max(staging_bytes, max(walk.forward_moments, default=0))
    rerun = [forward_bytes + inputs_bytes + gradient_bytes + backward_bytes]
    stored_bytes = sum(retained.values()) + extra_bytes
    # If the block cannot be replayed, its measured backward includes the second forward.
    moments = [*([] if kind.untrusted else rerun), *(live + backward_bytes for live in walk.moments)]
    return BlockOutcome(
        stored_bytes=stored_bytes,
        shared=frozenset(kind.given),
        overhead_ms=rerun_ms(kind)
        + kind.extra_ms
        + sum(option.encode_ms + option.decode_ms for option in compressed.values()),
        forward_moments=_forward_moments(kind, payload_bytes + staging_bytes),
        moments=tuple(moments),
        live_bytes=stored_bytes - sum(value.nbytes for value in externally_held if value.cached),
        host_bytes=sum(option.host_bytes for option in compressed.values()),
    )


def rerun_ms(kind: KindProfile) -> float:
    """Return the time in ms of the second forward, which torch's checkpoint runs during a block's backward."""
    if kind.untrusted:
        return kind.forward_ms
    producers = [kind.values[value].producer for value in kind.slots if value >= 0]
    last = max((producer for producer in producers if producer is not None), default=-1)
    return sum(operator.ms for operator in kind.operators[: last + 1])


def _forward_moments(kind: KindProfile, payload_bytes: int) -> tuple[int, ...]:
    """Return the live bytes at each moment of a checkpointed forward, the last one after the encoding of inputs.
    `payload_bytes` are those of the encoded inputs, including payloads that are being copied to host memory."""
    externally_held = [value for value in kind.activations if value.saved and value.is_kept and not value.cached]
    # The measured forward frees every value at its last release. Here, inputs and externally held values stay live and
    # are added from that moment on.
    nbytes = {value.index: value.nbytes for value in [*kind.inputs, *externally_held]}
    staying_bytes = accumulate(nbytes.get(event.value, 0) if event.death else 0 for event in kind.forward)
    live = [
        kind.generator_bytes + staying + event.extra_bytes
        for staying, event in zip(staying_bytes, kind.forward, strict=True)
    ]
    return (*live, live[-1] + payload_bytes) if live and payload_bytes else tuple(live)
