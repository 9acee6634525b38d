"""What one block keeps and needs under any plan: by activation, or as a whole under torch's checkpoint."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from adacc_hf.artifacts.block_walk import BlockOutcome, BlockWalk
from adacc_hf.artifacts.plans import plain_plan
from adacc_hf.artifacts.policy import RETAIN, Plan

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import KindProfile


def run_block(kind: KindProfile, plan: Plan) -> BlockOutcome:
    """Return what one block of `kind` keeps, needs and costs under `plan`.

    Raises ValueError for a plan that cannot be carried out.
    """
    return _checkpointed(kind, plan) if plan.is_checkpointed else BlockWalk(kind, plan).outcome()


def _checkpointed(kind: KindProfile, plan: Plan) -> BlockOutcome:
    """Return the outcome of one block under torch's checkpoint: only its inputs are stored until backward.

    - An input lives until the block's backward ends. A compressed input is encoded at the end of the forward and
      decoded before the second forward; its payload lives until the block's backward ends too.
    - A saved tensor that others hold as well (`Value.is_kept`) stays, and the second forward makes a second copy.
    - The second forward stops at the last saved tensor (early stop of `torch.utils.checkpoint`). An operator saves its
      inputs before it runs, so that the product that ends a block is not computed again.
    - The backward of a block that cannot be replayed was measured under torch's checkpoint as a whole.
    """
    plain = plain_plan(kind)
    if not kind.slots:  # nothing is saved, so that nothing runs again
        return BlockWalk(kind, plain).outcome()
    choices = dict(plan.choices)
    coded = {v.index: kind.codec_option(v.index, choices[v.index]) for v in kind.inputs if choices[v.index] != RETAIN}
    kept = {value.index: value.nbytes for value in kind.inputs if value.index not in coded}
    payload_bytes = sum(option.nbytes for option in coded.values())
    decoded_bytes = sum(kind.values[value].nbytes for value in coded)
    walk = BlockWalk(kind, plain, held=kept).outcome()
    gradient_bytes = kind.backward[0].entry_bytes if kind.backward else 0
    others = [value for value in kind.activations if value.saved and value.is_kept]
    extra_bytes = payload_bytes + kind.generator_bytes + sum(value.nbytes for value in others)
    # All inputs are live when the second forward starts, and so is a copy of the generator's present state.
    inputs_bytes = sum(kept.values()) + decoded_bytes + kind.generator_bytes
    backward_bytes = extra_bytes + kind.elsewhere_bytes
    again = [max(walk.forward_moments, default=0) + inputs_bytes + gradient_bytes + backward_bytes]
    stored_bytes = sum(kept.values()) + extra_bytes
    # The measured backward of a block that cannot be replayed has the second forward in it.
    moments = [*([] if kind.untrusted else again), *(live + backward_bytes for live in walk.moments)]
    return BlockOutcome(
        stored_bytes=stored_bytes,
        shared=frozenset(kind.given),
        overhead_ms=rerun_ms(kind) + sum(option.encode_ms + option.decode_ms for option in coded.values()),
        forward_moments=_forward_moments(kind, payload_bytes),
        moments=tuple(moments),
        live_bytes=stored_bytes - sum(value.nbytes for value in others if value.cached),
    )


def rerun_ms(kind: KindProfile) -> float:
    """Return the time that torch's checkpoint spends on a block's second forward."""
    if kind.untrusted:
        return kind.forward_ms
    producers = [kind.values[value].producer for value in kind.slots if value >= 0]
    last = max((producer for producer in producers if producer is not None), default=-1)
    return sum(operator.ms for operator in kind.operators[: last + 1])


def _forward_moments(kind: KindProfile, payload_bytes: int) -> tuple[int, ...]:
    """Return the live bytes at each moment of a forward that keeps its inputs, and encodes some of them at its end."""
    others = [value for value in kind.activations if value.saved and value.is_kept and not value.cached]
    # Measured was a forward that lets go of a value at its death; these stay, and count from there on.
    staying = {value.index: value.nbytes for value in [*kind.inputs, *others]}
    dying = (staying.get(event.value, 0) if event.death else 0 for event in kind.forward)
    live = [
        kind.generator_bytes + kept + event.extra_bytes
        for kept, event in zip(accumulate(dying), kind.forward, strict=True)
    ]
    return (*live, live[-1] + payload_bytes) if live and payload_bytes else tuple(live)
