"""Frontier of each kind of block: the plans on the lower convex hull of stored bytes and time.

A plan assigns an action to each activation of a block. The plans on a frontier are called frontier plans. They are in
order: the first one retains everything, and is the fastest. Each further one stores fewer bytes and takes more time. A
mixture of frontier plans gives each block of a kind one of these plans.

If memory has a price of w ms per byte, the best plan of a block minimises ms + w * bytes. Over all w, the best plans
are the corners of the lower convex hull of (bytes, ms).

At a fixed price, an integer program finds the best plan. The program is a closure problem, so its linear relaxation
usually has an integer solution. Only the constraints on values that must not be recomputed from lossily stored values
can make the solution fractional, and then the integer program itself is solved. Therefore a corner usually takes one
run of the simplex method. The run starts from the final basis of the run for the previous corner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from adacc_hf.solve.linear_program import TOLERANCE, LinearProgram, Solver, SolverLog
from adacc_hf.solve.milp import BlockVariables, KindModel, PricedPlan, retain_all

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile

SLOPE_TOLERANCE = 1e-6
"""Minimum distance of a corner of the hull below the line between its two neighbours, as a fraction of the difference
in ms between these neighbours. The fraction is far above HiGHS's optimality tolerance."""
INTEGRALITY = 1e-4
"""Maximum distance from an integer at which a variable counts as integer. The maximum is far above HiGHS's
tolerance."""
SCALE = 1e3
"""Upper limit of an objective's costs after scaling. The scale matters because HiGHS's tolerances are absolute."""


def frontiers(log: SolverLog, models: Sequence[KindModel]) -> list[list[PricedPlan]]:
    """Return the frontier of each kind of block: plans in order of falling stored bytes. The first plan retains
    everything.

    Each plan of a frontier is slower than the previous plan. Frontiers do not depend on the budget, so policies for
    different budgets are comparable. Tensors that several blocks share cost no bytes here.
    """
    return [_frontier_of_kind(log, model) for model in models]


def _frontier_of_kind(log: SolverLog, model: KindModel) -> list[PricedPlan]:
    plain = retain_all(model)
    if not plain.plan.choices:  # HiGHS has no status for a program without variables
        return [plain]
    program = _PricedMemory(log, model)
    least = program.least_bytes()
    if least.nbytes >= plain.nbytes:
        return [plain]
    return [plain, *_hull_corners(program, plain, least), least]


def _hull_corners(program: _PricedMemory, larger: PricedPlan, smaller: PricedPlan) -> list[PricedPlan]:
    """Return the corners of the convex hull of `program`'s plans that lie between `larger` and `smaller`, in the order
    of falling bytes. `larger` is the plan that stores more bytes, and `smaller` the plan that stores fewer. Both are
    left out of the result."""
    if smaller.ms <= larger.ms:
        return []
    corner = program.cheapest(_price_of_memory(larger, smaller))
    if not _is_below_mixtures(corner, larger, smaller):
        return []
    return [*_hull_corners(program, larger, corner), corner, *_hull_corners(program, corner, smaller)]


class _PricedMemory:
    """Integer program that chooses the plan of one block, solved for different prices of memory in ms per byte."""

    def __init__(self, log: SolverLog, model: KindModel) -> None:
        program = LinearProgram()
        self.log = log
        self.program = program
        self.block = BlockVariables(program, model)
        self.total_ms = model.total_ms or 1.0
        self.total_bytes = retain_all(model).nbytes or 1
        self.limit = program.constrain(self.block.terms_bytes(1 / self.total_bytes))
        self.relaxation = Solver(program, log, integer=False)

    def cheapest(self, price: float) -> PricedPlan:
        weight = SCALE / (self.total_ms + price * self.total_bytes)
        return self._solve([*self.block.terms_ms(weight), *self.block.terms_bytes(weight * price)])

    def least_bytes(self) -> PricedPlan:
        """Return the plan that stores the fewest bytes.

        If several plans store the fewest bytes, return the fastest of these.
        """
        least = self._solve(self.block.terms_bytes(SCALE / self.total_bytes))
        # Values of an integer solution are integers only within a tolerance, so the limit needs the same slack.
        limit = least.nbytes / self.total_bytes + TOLERANCE
        fastest = self._solve(self.block.terms_ms(SCALE / self.total_ms), limit)
        return min(least, fastest, key=lambda plan: (plan.nbytes, plan.ms))

    def _solve(self, costs: list[tuple[int, float]], limit: float = math.inf) -> PricedPlan:
        solution = self._solution(self.relaxation, costs, limit)
        if not _is_integral_solution(solution):
            solution = self._solution(self.integer, costs, limit)
        return self.block.priced_plan(solution)

    @cached_property
    def integer(self) -> Solver:
        """Solver of the integer program, used if the solution of the linear relaxation is fractional."""
        return Solver(self.program, self.log, integer=True)

    def _solution(self, solver: Solver, costs: list[tuple[int, float]], limit: float) -> Sequence[float]:
        solver.bound(self.limit, high=limit)
        solution = solver.minimize(costs)
        solver.bound(self.limit)
        assert solution is not None, "the program has no solution, though RETAIN for all activations is one"
        return solution


def _is_integral_solution(solution: Sequence[float]) -> bool:
    return not any(INTEGRALITY < value % 1 < 1 - INTEGRALITY for value in solution)


def least_ms(num_blocks: Sequence[int], frontiers: Sequence[Sequence[PricedPlan]], limit_bytes: int) -> float:
    """Return a lower bound on the overhead in ms of policies that store at most `limit_bytes`, without shared tensors.

    Return infinity if no policy stores so little. `frontiers[k]` is the frontier of `num_blocks[k]` blocks.

    A step along a frontier replaces a block's plan by the next plan, which stores less. The bound takes the steps in
    the order of their price (ms per freed byte). Of the last step, it takes only the part that is needed, as in the
    continuous knapsack problem. Real policies cannot be faster, because they consist of whole steps, or of plans above
    the hull.
    """
    excess = sum(n * frontier[0].nbytes for n, frontier in zip(num_blocks, frontiers, strict=True)) - limit_bytes
    ms = 0.0
    for price, kind, _, smaller, larger in sorted(_frontier_steps(frontiers), key=lambda step: step[:3]):
        freed = min(max(0, excess), num_blocks[kind] * (larger.nbytes - smaller.nbytes))
        ms += freed * price
        excess -= freed
    slack = sum(n * SLOPE_TOLERANCE * frontier[-1].ms for n, frontier in zip(num_blocks, frontiers, strict=True))
    return math.inf if excess > 0 else max(0.0, ms - slack)


def _frontier_steps(
    frontiers: Sequence[Sequence[PricedPlan]],
) -> Iterator[tuple[float, int, int, PricedPlan, PricedPlan]]:
    """Yield (price in ms per byte, index of the kind of block, index of the larger plan, smaller plan, larger plan) for
    each pair of neighbouring plans on the frontier of a kind."""
    for kind, frontier in enumerate(frontiers):
        for number, (larger, smaller) in enumerate(pairwise(frontier)):
            yield _price_of_memory(larger, smaller), kind, number, smaller, larger


def lower_hull(plans: Sequence[PricedPlan]) -> list[PricedPlan]:
    """Return the plans on the lower convex hull of stored bytes and time, from the fastest plan to the plan that stores
    the fewest bytes."""
    hull: list[PricedPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.ms, plan.nbytes)):
        if hull and plan.nbytes >= hull[-1].nbytes:
            continue
        while len(hull) > 1 and _price_of_memory(hull[-2], hull[-1]) >= _price_of_memory(hull[-2], plan):
            hull.pop()
        hull.append(plan)
    return hull


def chain(kinds: Sequence[int], frontiers: Sequence[Sequence[PricedPlan]]) -> Iterator[list[PricedPlan]]:
    """Yield policies: the first one retains everything, and each further one stores fewer bytes and takes more time.

    `kinds[i]` is the index of the kind (blocks that run the same operators) of block i. `frontiers[k]` contains the
    plans for blocks of kind k, in order of falling stored bytes. The first plan retains everything. Each policy gives
    one more block the next plan of its kind's frontier.

    The changes are made in the order of their price, the extra ms per freed byte. Therefore, of all policies that
    consist of plans in `frontiers` and store at most as many bytes as a yielded policy, the yielded policy is the
    fastest. Of the blocks of one kind, the first block is changed first, because its backward comes last, when the
    other blocks store the least memory.
    """
    policy = [frontiers[kind][0] for kind in kinds]
    yield list(policy)
    for _, kind, _, plan, _ in sorted(_frontier_steps(frontiers), key=lambda step: step[:3]):
        for block in range(len(kinds)):
            if kinds[block] == kind:
                policy[block] = plan
                yield list(policy)


def _price_of_memory(larger: PricedPlan, smaller: PricedPlan) -> float:
    """Return the price of memory, in ms per byte, at which two plans cost the same."""
    return (smaller.ms - larger.ms) / (larger.nbytes - smaller.nbytes)


def _is_below_mixtures(corner: PricedPlan, larger: PricedPlan, smaller: PricedPlan) -> bool:
    """Return True if the plan `corner` is faster than any mixture of the plans `larger` and `smaller` that stores as
    many bytes. `corner` must store fewer bytes than `larger` and more bytes than `smaller`. Otherwise return False."""
    line_ms = larger.ms + _price_of_memory(larger, smaller) * (larger.nbytes - corner.nbytes)
    limit_ms = line_ms - SLOPE_TOLERANCE * (smaller.ms - larger.ms)
    return smaller.nbytes < corner.nbytes < larger.nbytes and corner.ms < limit_ms


# One program over all kinds: the plan of each block, with the least time for a given amount of stored bytes.
#
# Blocks of one kind may have different plans, which costs less time than one plan for all. Most blocks get plans of
# their kind's frontier. A few blocks of each kind, the free ones, share a plan that is not limited to the frontier, and
# uses up the bytes that the others leave.

TIE_BREAK = 1e-6
"""Weight of the stored bytes relative to the time in an objective. This small term decides between equally fast
plans."""
MAX_CORRECTIONS = 3
"""Maximum number of solver runs for one cap on stored bytes. After rounding to integers, a solution may exceed the cap
by a few bytes in a hundred GiB. In the next run, the cap is then lower by this excess."""


def fixed_bytes(profile: Profile) -> int:
    """Return the bytes that every policy stores: outside the blocks, and in shared tensors that autograd saves."""
    return profile.outside_stored_bytes + sum(shared.nbytes for shared in profile.shared if shared.saved)


def stored_bytes(profile: Profile, plans: Sequence[PricedPlan]) -> int:
    """Return the bytes that forward stores if the i-th block runs under `plans[i]`. Shared tensors count once."""
    read = frozenset().union(*(plan.shared for plan in plans))
    shared = sum(profile.shared[i].nbytes for i in read if not profile.shared[i].saved)
    return fixed_bytes(profile) + shared + sum(plan.nbytes for plan in plans)


def overhead_ms(plans: Sequence[PricedPlan]) -> float:
    """Return the extra time of a step whose blocks run under `plans`, in ms."""
    return math.fsum(plan.ms for plan in plans)


class MixtureProgram:
    """Integer program that chooses the plans of all blocks.

    In each kind k (blocks that run the same operators), `num_free[k]` blocks get one common plan, which need not be on
    the frontier. All other blocks get plans of their kind's frontier, and may differ from each other.

    Variables in addition to `BlockVariables`:
      count[k, c]  number of blocks of kind k under plan c of its frontier (integer)
      reads[s]     1 if some replay reads shared tensor s, which autograd does not save (binary)
    """

    def __init__(
        self,
        profile: Profile,
        models: Sequence[KindModel],
        frontiers: Sequence[Sequence[PricedPlan]],
        num_free: Sequence[int],
        log: SolverLog,
    ) -> None:
        self.profile = profile
        self.models = models
        self.frontiers = frontiers
        blocks = Counter(block.kind for block in profile.blocks)
        self.num_free = num_free
        self.rest = [blocks[k] - free for k, free in enumerate(num_free)]
        program = LinearProgram()
        self.free = {k: BlockVariables(program, model) for k, model in enumerate(models) if num_free[k]}
        self.counts = {
            (k, c): program.variable(self.rest[k])
            for k, frontier in enumerate(frontiers)
            for c in range(len(frontier))
            if self.rest[k]
        }
        self.reads = {i: program.variable() for i, shared in enumerate(profile.shared) if not shared.saved}
        self._constrain(program)
        # [Memory] the stored bytes are within a cap (equations 7 and 8), relative to plain training's stored bytes.
        self.unit = 1 / (profile.plain_stored_bytes or 1)
        self.total_ms = sum(models[block.kind].total_ms for block in profile.blocks) or 1.0
        self.memory = program.constrain((x, self.unit * nbytes) for x, nbytes in self._terms_bytes())
        self.program, self.log = program, log
        self.solver = Solver(program, log, integer=True)

    def _constrain(self, program: LinearProgram) -> None:
        # [Blocks] every block has a plan.
        for k, rest in enumerate(self.rest):
            if rest:
                counts = [(count, 1.0) for (kind, _), count in self.counts.items() if kind == k]
                program.constrain(counts, low=rest, high=rest)
        # [Shared] a shared tensor that any replay reads is stored once.
        for block in self.free.values():
            for shared, run in block.shared_readers():
                if shared in self.reads:
                    program.constrain([(self.reads[shared], 1.0), (run, -1.0)], low=0.0)
        for (k, c), count in self.counts.items():
            for shared in self.frontiers[k][c].shared & self.reads.keys():
                program.constrain([(self.reads[shared], self.rest[k]), (count, -1.0)], low=0.0)

    def least_ms(self, cap_bytes: int, most_ms: float = math.inf) -> list[PricedPlan] | None:
        """Return the fastest policy that stores at most `cap_bytes` and has an overhead of at most `most_ms`.

        Return None if no such policy is found. A tight `most_ms` makes the search several times shorter.
        """
        room = cap_bytes - fixed_bytes(self.profile)
        costs = [*self._ms(SCALE), *self._bytes(SCALE * TIE_BREAK)]
        # This limit is above the objective of policies that take exactly `most_ms`, whatever they store.
        limit = SCALE * (most_ms / self.total_ms + 2 * TIE_BREAK * max(1.0, room * self.unit))
        for _ in range(MAX_CORRECTIONS):
            # Sizes are whole bytes, so half a byte of slack absorbs rounding errors.
            self.solver.bound(self.memory, high=(room + 0.5) * self.unit)
            solution = self.solver.minimize(costs, limit)
            if solution is None:
                return None
            plans = self._plans(solution)
            excess = stored_bytes(self.profile, plans) - cap_bytes
            if excess <= 0:
                return plans
            room -= excess
        return None

    def least_bytes(self) -> list[PricedPlan]:
        """Return the policy that stores the fewest bytes, as one plan per block.

        `num_free` must include every block: no block may be restricted to the plans of a frontier. Stored bytes have no
        upper bound here. The linear relaxation therefore usually has an integer solution, as for one block. No time
        limit applies to the relaxation.
        """
        assert not any(self.rest), "blocks with frontier plans make the relaxation fractional"
        costs = [*self._bytes(SCALE), *self._ms(SCALE * TIE_BREAK)]
        solution = self._solve_uncapped(Solver(self.program, self.log, integer=False), costs)
        if not _is_integral_solution(solution):
            solution = self._solve_uncapped(self.solver, costs)
        return self._plans(solution)

    def _solve_uncapped(self, solver: Solver, costs: list[tuple[int, float]]) -> Sequence[float]:
        solver.bound(self.memory)
        solution = solver.minimize(costs)
        assert solution is not None, "the program has no solution, though RETAIN for all activations is one"
        return solution

    def _ms(self, weight: float) -> list[tuple[int, float]]:
        """Return the objective's terms for time, scaled so that their sum is at most `weight`."""
        terms = [(x, self.num_free[k] * ms) for k, block in self.free.items() for x, ms in block.terms_ms()]
        terms += [(count, self.frontiers[k][c].ms) for (k, c), count in self.counts.items()]
        return [(x, weight * ms / self.total_ms) for x, ms in terms]

    def _bytes(self, weight: float) -> list[tuple[int, float]]:
        """Return the objective's terms for stored bytes. The terms are scaled: for a policy that stores as many bytes
        as plain training, their sum is about `weight`."""
        return [(x, weight * self.unit * nbytes) for x, nbytes in self._terms_bytes()]

    def _terms_bytes(self) -> list[tuple[int, float]]:
        terms = [(x, self.num_free[k] * size) for k, block in self.free.items() for x, size in block.terms_bytes()]
        terms += [(count, self.frontiers[k][c].nbytes) for (k, c), count in self.counts.items()]
        return terms + [(read, self.profile.shared[i].nbytes) for i, read in self.reads.items()]

    def _plans(self, solution: Sequence[float]) -> list[PricedPlan]:
        """Return the plan of each block in `solution`. Within a kind (blocks that run the same operators), the first
        blocks get the plans that store least."""
        pools = [[self.free[k].priced_plan(solution)] * free if free else [] for k, free in enumerate(self.num_free)]
        for (k, c), count in self.counts.items():
            pools[k] += [self.frontiers[k][c]] * round(solution[count])
        order = [iter(sorted(pool, key=lambda plan: plan.nbytes)) for pool in pools]
        return [next(order[block.kind]) for block in self.profile.blocks]
