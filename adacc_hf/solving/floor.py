"""How small the peak of a step can get: policies below what the frontiers reach, and a bound that no policy is below.

The plans of a frontier store little for their time, which is not all that a peak asks for: replaying more adds to the
working set of a block's backward. So from the policy of frontier plans with the least peak on, single activations get
another action, in all plans of the kind of block where the peak is that are the best for some need of memory, as long
as that lowers the peak. It is a local search: what it ends at is the best found, not proven to be the least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from adacc_hf.policy import RECOMPUTE
from adacc_hf.solving.milp import Column, KindModel, price
from adacc_hf.solving.peak import PeakOracle

if TYPE_CHECKING:
    from adacc_hf.profile import KindProfile, Profile

    _Needs = tuple[tuple[int, ...], frozenset[int]]

VARIED = 8
"""Plans that are varied in a round: one leaves GPT-2's floor 4 % higher."""
VARIATIONS = 1200
"""Changes after which no round begins, each 0.3 to 1 ms: what GPT-2 takes. T5's would go on for a minute, for 2 %."""


def descent(
    oracle: PeakOracle, models: Sequence[KindModel], frontiers: Sequence[Sequence[Column]], start: list[Column]
) -> list[list[Column]]:
    """Policies of falling peak, from `start` on, which has the least that frontier plans reach; they depend on no
    budget."""
    pools = [_undominated(oracle, kind, frontier) for kind, frontier in enumerate(frontiers)]
    trail, varied, num_left = [start], set(), VARIATIONS
    while num_left > 0:
        block = oracle.peak_block(trail[-1])
        if block is None:
            break
        kind = oracle.profile.blocks[block].kind
        new = _to_vary(oracle, kind, trail[-1], pools[kind], varied)
        varied.update(new)
        changed = [change for column in new for change in _changed(models[kind], column)]
        num_left -= len(changed)
        pools[kind] = _undominated(oracle, kind, [*pools[kind], *changed])
        if not oracle.is_peak_below(pools, oracle.peak_bytes(trail[-1])):
            break
        trail.append(oracle.least_peak(pools))
    return trail


def _to_vary(
    oracle: PeakOracle, kind: int, policy: Sequence[Column], pool: Sequence[Column], varied: set[Column]
) -> list[Column]:
    """Plans of a kind that were not varied yet: what the policy has, then those with the smallest working sets."""
    used = set(policy)
    order = sorted(pool, key=lambda column: (column not in used, oracle.outcome(kind, column).working_bytes))
    return [column for column in order if column not in varied][:VARIED]


def _changed(model: KindModel, column: Column) -> Iterator[Column]:
    """The plans that differ from `column` in one activation."""
    choices = dict(column.plan.choices)
    for value, menu in model.menus.items():
        can_go = model.kind.values[value].saved and model.remake(value) is not None
        for choice in [*(store.choice for store in menu), *([RECOMPUTE] if can_go else [])]:
            if choice != choices[value]:
                yield price(model, {**choices, value: choice})


def _undominated(oracle: PeakOracle, kind: int, columns: Sequence[Column]) -> list[Column]:
    """Those that no other needs less memory than at every moment that counts."""
    kept: dict[_Needs, Column] = {}
    for column in sorted(columns, key=lambda column: column.ms):
        outcome = oracle.outcome(kind, column)
        sizes = (outcome.stored_bytes, outcome.held_bytes, outcome.working_bytes, outcome.forward_working_bytes)
        needs = (sizes, outcome.shared)
        if not any(_is_within(other, needs) for other in kept):
            kept = {other: kept[other] for other in kept if not _is_within(needs, other)} | {needs: column}
    return list(kept.values())


def _is_within(needs: _Needs, others: _Needs) -> bool:
    (sizes, shared), (other_sizes, other_shared) = needs, others
    return shared <= other_shared and all(size <= other for size, other in zip(sizes, other_sizes, strict=True))


def least_bound(profile: Profile, frontiers: Sequence[Sequence[Column]]) -> int:
    """Bytes that no policy's peak is below: what is live in any case, with the least that blocks can store."""
    bounds = [profile.tail_peak_bytes]
    stored = held = 0
    for index, block in enumerate(profile.blocks):
        kind = profile.kind_of(block)
        bounds.append(block.forward_base_bytes + held + max((e.extra_bytes for e in kind.forward), default=0))
        if kind.backward:
            unread = profile.unread_bytes(index, frozenset())
            bounds.append(block.backward_base_bytes - unread + stored + handed_bytes(kind))
        least = frontiers[block.kind][-1].nbytes
        stored += least
        held += max(0, least - sum(value.nbytes for value in kind.activations if value.cached))
    outside, loss = profile.head_peaks(frozenset())
    return max([*bounds, outside + held, loss + stored])


def handed_bytes(kind: KindProfile) -> int:
    """Most that is live in a block's backward whatever its plan: what autograd holds at once, and the rest's own."""
    slots: dict[int, int] = {}
    most = 0
    for event in kind.backward:
        value = kind.slots[event.slot]
        if event.release:
            slots.pop(event.slot, None)
        elif value >= 0 and kind.values[value].shared is None:
            slots[event.slot] = value
        # A repeated value may be the other's own storage.
        distinct = {kind.equal.get(value, value) for value in slots.values()}
        live = sum(kind.values[value].nbytes for value in distinct)
        most = max(most, live + (event.extra_bytes if event.release else max(event.entry_bytes, event.extra_bytes)))
    return most
