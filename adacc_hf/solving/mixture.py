"""Which plan each block gets, as one program over all kinds: the least time for a given amount of stored bytes.

Blocks of one kind may act differently, which costs less than one plan for all: most take plans of their kind's
frontier, and a few of each kind, the free ones, share a plan of any shape, which uses up what the others leave.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from adacc_hf.solving.milp import BlockVariables, Column, KindModel
from adacc_hf.solving.program import Program, Solver, SolverLog

if TYPE_CHECKING:
    from adacc_hf.profile import Profile

SCALE = 1e3
"""What the objective comes to at most: HiGHS's tolerances are absolute."""
TIE_BREAK = 1e-6
"""Weight of all stored bytes beside all ms in the objective: decides between plans that are equally fast."""
CORRECTIONS = 3
"""Runs that lower a cap again when a rounded solution misses it, as it may by a few bytes in a hundred GiB."""


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
    """The program whose solution gives `num_free[k]` blocks of kind k one plan of any shape and the others columns.

    Variables besides those of `BlockVariables`:
      count[k, c]  blocks of kind k that run under column c of its frontier (integer)
      reads[s]     some replay reads shared tensor s, which autograd does not save (binary)
    """

    def __init__(
        self,
        profile: Profile,
        models: Sequence[KindModel],
        frontiers: Sequence[Sequence[Column]],
        num_free: Sequence[int],
        log: SolverLog,
    ) -> None:
        self.profile = profile
        self.models = models
        self.frontiers = frontiers
        blocks = Counter(block.kind for block in profile.blocks)
        self.num_free = num_free
        self.rest = [blocks[k] - free for k, free in enumerate(num_free)]
        program = Program()
        self.free = {k: BlockVariables(program, model) for k, model in enumerate(models) if num_free[k]}
        self.counts = {
            (k, c): program.variable(self.rest[k])
            for k, columns in enumerate(frontiers)
            for c in range(len(columns))
            if self.rest[k]
        }
        self.reads = {i: program.variable() for i, shared in enumerate(profile.shared) if not shared.saved}
        self._constrain(program)
        # [Memory] what is stored keeps to a cap (equations 7 and 8), as a part of what plain training stores.
        self.unit = 1 / (profile.plain_stored_bytes or 1)
        self.whole_ms = sum(models[block.kind].total_ms for block in profile.blocks) or 1.0
        self.memory = program.constrain((x, self.unit * nbytes) for x, nbytes in self._terms_bytes())
        self.program, self.log = program, log
        self.solver = Solver(program, log, integer=True)

    def _constrain(self, program: Program) -> None:
        # [Blocks] every block has a plan.
        for k, rest in enumerate(self.rest):
            if rest:
                counts = [(count, 1.0) for (kind, _), count in self.counts.items() if kind == k]
                program.constrain(counts, low=rest, high=rest)
        # [Shared] a shared tensor that any replay reads is held, once.
        for block in self.free.values():
            for shared, run in block.shared_readers():
                if shared in self.reads:
                    program.constrain([(self.reads[shared], 1.0), (run, -1.0)], low=0.0)
        for (k, c), count in self.counts.items():
            for shared in self.frontiers[k][c].shared & self.reads.keys():
                program.constrain([(self.reads[shared], self.rest[k]), (count, -1.0)], low=0.0)

    def least_ms(self, cap_bytes: int, most_ms: float = math.inf) -> list[Column] | None:
        """A column per block, the fastest of those that store at most `cap_bytes` and take at most `most_ms`; None if
        none was found. A limit of time that is near what can be had shortens the search to a fraction."""
        room = cap_bytes - fixed_bytes(self.profile)
        costs = [*self._ms(SCALE), *self._bytes(SCALE * TIE_BREAK)]
        # Policies that take `most_ms` themselves are below this, whatever they store.
        limit = SCALE * (most_ms / self.whole_ms + 2 * TIE_BREAK * max(1.0, room * self.unit))
        for _ in range(CORRECTIONS):
            # Sizes are whole bytes, so that half of one keeps rounding away from both sides.
            self.solver.bound(self.memory, high=(room + 0.5) * self.unit)
            solution = self.solver.minimize(costs, limit)
            if solution is None:
                return None
            columns = self._columns(solution)
            excess = stored_bytes(self.profile, columns) - cap_bytes
            if excess <= 0:
                return columns
            room -= excess
        return None

    def least_bytes(self) -> list[Column]:
        """A column per block, storing as little as any, where all blocks are free.

        Without a cap the relaxation is integral, as in frontier.py, and no limit of time can cut it short.
        """
        assert not any(self.rest), "blocks that take columns of a frontier make the relaxation fractional"
        relaxation = Solver(self.program, self.log, integer=False)
        relaxation.bound(self.memory)
        solution = relaxation.minimize([*self._bytes(SCALE), *self._ms(SCALE * TIE_BREAK)])
        assert solution is not None, "all RETAIN is always a solution"
        return self._columns(solution)

    def _ms(self, weight: float) -> list[tuple[int, float]]:
        """The terms of the objective for time, scaled to at most `weight`."""
        terms = [(x, self.num_free[k] * ms) for k, block in self.free.items() for x, ms in block.terms_ms()]
        terms += [(count, self.frontiers[k][c].ms) for (k, c), count in self.counts.items()]
        return [(x, weight * ms / self.whole_ms) for x, ms in terms]

    def _bytes(self, weight: float) -> list[tuple[int, float]]:
        """The terms of the objective for stored bytes, scaled to at most about `weight`."""
        return [(x, weight * self.unit * nbytes) for x, nbytes in self._terms_bytes()]

    def _terms_bytes(self) -> list[tuple[int, float]]:
        terms = [(x, self.num_free[k] * size) for k, block in self.free.items() for x, size in block.terms_bytes()]
        terms += [(count, self.frontiers[k][c].nbytes) for (k, c), count in self.counts.items()]
        return terms + [(read, self.profile.shared[i].nbytes) for i, read in self.reads.items()]

    def _columns(self, solution: Sequence[float]) -> list[Column]:
        """The solution as a column per block; among blocks of a kind the first store least."""
        pools = [[self.free[k].column(solution)] * free if free else [] for k, free in enumerate(self.num_free)]
        for (k, c), count in self.counts.items():
            pools[k] += [self.frontiers[k][c]] * round(solution[count])
        order = [iter(sorted(pool, key=lambda column: column.nbytes)) for pool in pools]
        return [next(order[block.kind]) for block in self.profile.blocks]
