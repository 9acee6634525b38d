"""A model whose replay runs chains of pointwise operators one by one, or as kernels, on what a real backward gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from adacc_hf import Action, Policy, apply_policy, profile_model
from adacc_hf.eval.records.records import Settings, Spread
from adacc_hf.eval.trials.chain_kernel import ChainKernels, Kernel
from adacc_hf.eval.trials.exact_kernels import ExactOperators, compare
from adacc_hf.eval.trials.gradients import Gradients, compute_gradients, first_difference, relative_error
from adacc_hf.eval.trials.pointwise_chains import Chain, ChainStep, chain_bytes, find_chains, is_pointwise, with_chains
from adacc_hf.eval.trials.workload import Workload
from adacc_hf.price.timing import seconds_of
from adacc_hf.tape.compiled_plan import CompiledPlan, Schedule
from adacc_hf.tape.replay import Environment, ReplayProgram, ReplayStep
from adacc_hf.tape.tape import TapeOperator
from adacc_hf.torch_glue.tensors import copy_with_storage

OPERATORS, ALL, EXACT = "operators", "all chains", "exact chains"
"""How replay runs: operator by operator, with a kernel for each chain of pointwise operators, or with a kernel for each
chain of exact operators."""

WARM_UP = 3
"""Steps before anything is noted: the first ones are recorded, and learn the order of backward."""


@dataclass(eq=False)
class Replay:
    """The replay of blocks that share one plan, and what one backward gave to its chains."""

    plan: CompiledPlan
    num_blocks: int
    chains: dict[str, list[list[Chain]]]
    """By variant, those of each program."""
    bases: dict[int, torch.Tensor]

    def environment(self, chain: Chain) -> Environment:
        """What `chain` reads; of what it writes a copy."""
        environment: Environment = [None] * self.plan.num_values
        written = {old for operator in chain.operators for old, _ in operator.mutations}
        for value in dict.fromkeys(ref.value for ref in chain.inputs):
            base = self.bases[value]
            environment[value] = copy_with_storage(base) if value in written else base
        return environment


class ChainReplay:
    """A model that recomputes everything, the chains in its replay, and their kernels."""

    def __init__(
        self, workload: Workload, settings: Settings, clock: Callable[[], float], exact: ExactOperators
    ) -> None:
        self._clock, self._exact = clock, exact
        self.model = workload.model(settings.device, settings.seed)
        self.batch = next(workload.batches(settings.device, settings.seed))
        self._kernels = ChainKernels()
        profile = profile_model(self.model, self.batch)
        self.handle = apply_policy(self.model, Policy.uniform(profile, Action.RECOMPUTE))
        for seed in range(WARM_UP):
            self.gradients(seed)
        strategies = self.handle.plans.strategies.values()
        plans = Counter(plan for strategy in strategies for plan in strategy.entries.programs() if plan is not None)
        self.replays = [self._replay(plan, number) for plan, number in plans.items()]
        self._schedules = {
            variant: [self._with_kernels(replay, variant) for replay in self.replays] for variant in (ALL, EXACT)
        } | {OPERATORS: [replay.plan.schedule for replay in self.replays]}

    def gradients(self, seed: int) -> Gradients:
        return compute_gradients(self.model, self.batch, seed)

    def run_by(self, variant: str) -> None:
        """Let replay run as `variant` says from the next step on."""
        for replay, schedule in zip(self.replays, self._schedules[variant], strict=True):
            replay.plan.schedule = schedule

    def _replay(self, plan: CompiledPlan, num_blocks: int) -> Replay:
        def is_exact(operator: TapeOperator) -> bool:
            return is_pointwise(operator) and self._exact.has(operator, plan.tape)

        programs = plan.schedule.programs
        chains = {
            ALL: [find_chains(program, plan.tape) for program in programs],
            EXACT: [find_chains(program, plan.tape, is_exact) for program in programs],
        }
        read = {
            ref.value for variant in chains.values() for found in variant for chain in found for ref in chain.inputs
        }
        bases: dict[int, torch.Tensor] = {}
        with noting_reads(programs, read, bases):
            self.gradients(seed=0)
        return Replay(plan, num_blocks, chains, bases)

    def _kernel(self, replay: Replay, chain: Chain) -> tuple[Kernel, float]:
        return self._kernels.of(chain, chain.arguments(replay.environment(chain)))

    def _with_kernels(self, replay: Replay, variant: str) -> Schedule:
        schedule = copy(replay.plan.schedule)
        schedule.programs = [
            with_chains(program, [(chain, self._kernel(replay, chain)[0]) for chain in chains])
            for program, chains in zip(schedule.programs, replay.chains[variant], strict=True)
        ]
        return schedule

    # What is measured.

    def chain_figures(self, variant: str, num_rounds: int) -> list[dict[str, Any]]:
        """For each chain of `variant`: what it takes as operators and as one kernel, in turn, and how far these are
        apart."""
        return [
            {"blocks": replay.num_blocks, **self._figures(replay, chain, num_rounds)}
            for replay in self.replays
            for chains in replay.chains[variant]
            for chain in chains
        ]

    def _figures(self, replay: Replay, chain: Chain, num_rounds: int) -> dict[str, Any]:
        kernel, compile_seconds = self._kernel(replay, chain)
        ways: list[Callable[[Environment], None]] = [partial(run_operators, chain), ChainStep(chain, kernel).run]
        samples: list[list[float]] = [[], []]
        for number in range(num_rounds):
            for place in (0, 1) if number % 2 else (1, 0):
                run = partial(ways[place], replay.environment(chain))
                samples[place].append(1e3 * seconds_of(run, self.model.device, self._clock))
        made = []
        for way in ways:
            environment = replay.environment(chain)
            way(environment)
            made.append([tensor for value in chain.outputs if (tensor := environment[value]) is not None])
        before, after = chain_bytes(chain, replay.plan.tape)
        size, _, _ = replay.plan.tape.values[chain.outputs[-1]].ref.geometry
        return {
            "names": chain.names,
            "size": list(size),
            **compare(made[1], made[0]),
            "bytes_before": before,
            "bytes_after": after,
            "operators_ms": Spread.of(samples[0]),
            "kernel_ms": Spread.of(samples[1]),
            "ratio_by_round": Spread.of([old / new for old, new in zip(*samples, strict=True)]),
            "compile_seconds": compile_seconds,
        }

    def step_figures(self, num_rounds: int) -> dict[str, Any]:
        """Milliseconds of forward and backward by each variant, in turn, and how far its gradients are off."""
        variants = [OPERATORS, ALL, EXACT]
        gradients = {}
        samples: dict[str, list[float]] = {variant: [] for variant in variants}
        for variant in variants:
            self.run_by(variant)
            gradients[variant] = self.gradients(seed=1)
        for number in range(num_rounds):
            for variant in variants[number % 3 :] + variants[: number % 3]:
                self.run_by(variant)
                run = partial(self.gradients, seed=number)
                samples[variant].append(1e3 * seconds_of(run, self.model.device, self._clock))
        self.run_by(OPERATORS)
        expected = gradients[OPERATORS]
        return {
            variant: {
                "step_ms": Spread.of(samples[variant]),
                "faster_by_round": Spread.of(
                    [a / b for a, b in zip(samples[OPERATORS], samples[variant], strict=True)]
                ),
                "is_equal": first_difference(expected, gradients[variant]) is None,
                "gradient_error": relative_error(expected, gradients[variant]),
            }
            for variant in variants
        }


def run_operators(chain: Chain, environment: Environment) -> None:
    for step in chain.steps:
        step.run(environment)


@contextmanager
def noting_reads(
    programs: Sequence[ReplayProgram], wanted: Collection[int], bases: dict[int, torch.Tensor]
) -> Iterator[None]:
    """While open, copies of the `wanted` values go into `bases` when an operator first reads them."""

    def run(step: ReplayStep, environment: Environment) -> None:
        for value in step.operator.inputs():
            tensor = environment[value]
            if value in wanted and tensor is not None:
                bases.setdefault(value, copy_with_storage(tensor))
        ReplayStep.run(step, environment)

    steps = [step for program in programs for step in program.steps]
    for step in steps:
        step.run = partial(run, step)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for step in steps:
            del step.run
