"""Which plan each block gets, as one program over all kinds: the least time for a given amount of stored bytes.

Blocks of one kind may act differently, which costs less than one plan for all: most take plans of their kind's
frontier, and a few of each kind, the free ones, share a plan of any shape, which uses up what the others leave.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adacc_hf.milp import BlockVariables, Cbc, Column, KindModel, combine, total_ms

if TYPE_CHECKING:
    from adacc_hf.profile import Profile

TIE_BREAK = 1e-6
"""Weight of all stored bytes beside all ms in the objective: decides between plans that are equally fast."""


def fixed_bytes(profile: Profile) -> int:
    """What is stored whatever the policy: the outside of the blocks, and shared tensors that autograd saves."""
    return profile.outside_stored_bytes + sum(shared.nbytes for shared in profile.shared if shared.saved)


def stored_bytes(profile: Profile, columns: Sequence[Column]) -> int:
    """What forward leaves behind when the i-th block runs under `columns[i]`; shared tensors count once."""
    read = frozenset().union(*(column.shared for column in columns))
    shared = sum(profile.shared[i].nbytes for i in read if not profile.shared[i].saved)
    return fixed_bytes(profile) + shared + sum(column.nbytes for column in columns)


def overhead_ms(columns: Sequence[Column]) -> float:
    """What the policy costs per step."""
    return math.fsum(column.ms for column in columns)


class MixtureProgram:
    """The program whose solution gives `num_free` blocks of each kind one plan of any shape and the others columns.

    It is solved once, by `least_ms` or `least_bytes`.

    Variables besides those of `BlockVariables`:
      count[k, c]  blocks of kind k that run under column c of its frontier (integer)
      reads[s]     some replay reads shared tensor s, which autograd does not save (binary)
    """

    def __init__(
        self, profile: Profile, models: Sequence[KindModel], frontiers: Sequence[Sequence[Column]], num_free: int | None
    ) -> None:
        """`num_free` None frees all blocks, so that those of one kind all have the same plan."""
        from pulp import LpMinimize, LpProblem

        self.profile = profile
        self.models = models
        self.frontiers = frontiers
        blocks = Counter(block.kind for block in profile.blocks)
        self.num_free = [blocks[k] if num_free is None else min(num_free, blocks[k]) for k in range(len(models))]
        self.rest = [blocks[k] - free for k, free in enumerate(self.num_free)]
        self.problem = LpProblem("mixture", LpMinimize)
        self.free = {
            k: BlockVariables(self.problem, model, f"k{k}_") for k, model in enumerate(models) if self.num_free[k]
        }
        self.counts = {
            (k, c): self.problem.add_variable(f"count_{k}_{c}", 0, self.rest[k], cat="Integer")
            for k, columns in enumerate(frontiers)
            for c in range(len(columns))
            if self.rest[k]
        }
        unsaved = [i for i, shared in enumerate(profile.shared) if not shared.saved]
        self.reads = {i: self.problem.add_variable(f"reads_{i}", cat="Binary") for i in unsaved}
        self._constrain()

    def _constrain(self) -> None:
        # [Blocks] every block has a plan.
        for k, rest in enumerate(self.rest):
            if rest:
                counts = [(count, 1) for (kind, _), count in self.counts.items() if kind == k]
                self.problem += combine(counts) == rest
        # [Shared] a shared tensor that any replay reads is held, once.
        for block in self.free.values():
            for shared, run in block.shared_readers():
                if shared in self.reads:
                    self.problem += self.reads[shared] >= run
        for (k, c), count in self.counts.items():
            for shared in self.frontiers[k][c].shared & self.reads.keys():
                self.problem += self.rest[k] * self.reads[shared] >= count

    def least_ms(self, cbc: Cbc, cap_bytes: int) -> list[Column] | None:
        """A column per block, the fastest of those that store at most `cap_bytes`; None if there are none."""
        self.problem.setObjective(combine([*self._ms(1.0), *self._bytes(TIE_BREAK)]))
        # [Memory] what is stored keeps to the cap (equations 7 and 8). In units that divide every size; the half unit
        # keeps CBC's rounding away from both sides.
        terms = self._terms_bytes()
        unit = math.gcd(*(nbytes for _, nbytes in terms)) or 1
        room = (cap_bytes - fixed_bytes(self.profile)) // unit + 0.5
        self.problem.addConstraint(combine((x, nbytes // unit) for x, nbytes in terms) <= room, "memory")
        return self._columns() if cbc.solve(self.problem) else None

    def least_bytes(self, cbc: Cbc) -> list[Column]:
        """A column per block, storing as little as any."""
        self.problem.setObjective(combine([*self._bytes(1.0), *self._ms(TIE_BREAK)]))
        assert cbc.solve(self.problem), "all RETAIN is always a solution"
        return self._columns()

    def _ms(self, weight: float) -> list[tuple[Any, float]]:
        """The terms of the objective for time, scaled to at most `weight`."""
        whole = sum(total_ms([self.models[block.kind]]) for block in self.profile.blocks)
        terms = [(x, self.num_free[k] * ms) for k, block in self.free.items() for x, ms in block.terms_ms()]
        terms += [(count, self.frontiers[k][c].ms) for (k, c), count in self.counts.items()]
        return [(x, weight * ms / (whole or 1.0)) for x, ms in terms]

    def _bytes(self, weight: float) -> list[tuple[Any, float]]:
        """The terms of the objective for stored bytes, scaled to at most about `weight`."""
        whole = self.profile.plain_stored_bytes or 1
        return [(x, weight * nbytes / whole) for x, nbytes in self._terms_bytes()]

    def _terms_bytes(self) -> list[tuple[Any, int]]:
        terms = [(x, self.num_free[k] * size) for k, block in self.free.items() for x, size in block.terms_bytes()]
        terms += [(count, self.frontiers[k][c].nbytes) for (k, c), count in self.counts.items()]
        return terms + [(read, self.profile.shared[i].nbytes) for i, read in self.reads.items()]

    def _columns(self) -> list[Column]:
        """The solution as a column per block; among blocks of a kind the first store least."""
        pools = [[self.free[k].column()] * free if free else [] for k, free in enumerate(self.num_free)]
        for (k, c), count in self.counts.items():
            pools[k] += [self.frontiers[k][c]] * round(count.value())
        order = [iter(sorted(pool, key=lambda column: column.nbytes)) for pool in pools]
        return [next(order[block.kind]) for block in self.profile.blocks]
