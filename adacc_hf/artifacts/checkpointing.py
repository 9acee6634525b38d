"""A step under torch's checkpoint around every block, from the same profile as a policy's.

`Policy.uniform(profile, "recompute")` is not that: it keeps what random operators made, recomputes each tensor when it
is wanted, and lets it go after its last use. Checkpoint keeps a block's inputs alone, runs its forward again before its
backward, and then holds all that the block saves. It stops at the last tensor that autograd saves, which an operator
does before it runs: the product that ends a block is not computed again (`torch.utils.checkpoint`, early stop; with
`use_reentrant=True`, no default of Transformers any more, it is).
"""

from __future__ import annotations

from dataclasses import replace

from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import KindProfile, Profile
from adacc_hf.artifacts.step_peak import BlockOutcome, Outcome, run_block, simulate_blocks


def simulate_checkpointed(profile: Profile) -> Outcome:
    """The outcome of a step of `profile` in which torch's checkpoint runs every block."""
    plain = Policy.uniform(profile, "retain")
    of_kind = {
        block.kind: checkpointed(profile.kind_of(block), run_block(profile.kind_of(block), plain.plan_of(block.name)))
        for block in profile.blocks
    }
    return simulate_blocks(profile, [of_kind[block.kind] for block in profile.blocks])


def checkpointed(kind: KindProfile, plain: BlockOutcome) -> BlockOutcome:
    """One block of `kind` under torch's checkpoint; `plain` is its outcome if it retains everything."""
    if not kind.slots:
        return plain
    inputs = {value.index: value.nbytes for value in kind.activations if value.producer is None}
    held = sum(inputs.values())
    # What backward holds besides, should autograd not save an input itself.
    unsaved = sum(nbytes for value, nbytes in inputs.items() if not kind.values[value].saved)
    gradient = kind.backward[0].entry_bytes if kind.backward else 0
    again = max(plain.forward_moments, default=0) + gradient + held
    return replace(
        plain,
        stored_bytes=held,
        live_bytes=held,
        shared=frozenset(kind.held),
        overhead_ms=recomputed_ms(kind),
        forward_moments=_forward_moments(kind, inputs),
        moments=(again, *(live + unsaved for live in plain.moments)),
    )


def recomputed_ms(kind: KindProfile) -> float:
    """Time that torch's checkpoint spends on a block's second forward."""
    producers = [kind.values[value].producer for value in kind.slots if value >= 0]
    last = max((producer for producer in producers if producer is not None), default=-1)
    return sum(operator.ms for operator in kind.operators[: last + 1])


def _forward_moments(kind: KindProfile, inputs: dict[int, int]) -> tuple[int, ...]:
    """Live bytes at each moment of a forward that keeps its inputs alone."""
    kept, moments = 0, []
    for event in kind.forward:
        if event.value in inputs and event.death:
            kept += inputs[event.value]
        moments.append(kept + event.extra_bytes)
    return tuple(moments)
