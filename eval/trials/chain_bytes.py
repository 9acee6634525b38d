"""The bytes that a GPU's kernels would move in a block's replay, with chains as operators and as one kernel each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Plan, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload, fake_model
from adacc_hf.estimate.model_presets import PRESETS
from adacc_hf.eval.trials.pointwise_chains import chain_bytes, find_chains, is_pointwise, operator_bytes
from adacc_hf.run.follow_plan import FollowPlan
from adacc_hf.solve.solver import solve_policy
from adacc_hf.tape.compiled_plan import CompiledPlan
from adacc_hf.tape.library import TapeLibrary, library_of_profiles
from adacc_hf.tape.replay import ReplayProgram
from adacc_hf.tape.tape import Tape

LOSSLESS = AdaccConfig(actions=("retain", "recompute"))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A preset, and the batch that a GPU trains it on."""

    preset: str
    batch: int
    tokens: int
    precision: str = "bf16-amp"


MODELS = {
    "GPT-345M, 16 x 1024": Model(preset="gpt2-345m", batch=16, tokens=1024),
    "LLaMA-1B, 4 x 2048": Model(preset="llama-1b", batch=4, tokens=2048),
}
"""By name: what the first GPU is to show."""


POLICIES: dict[str, Callable[[Profile], Policy]] = {
    "everything recomputed": lambda profile: Policy.uniform(profile, "recompute"),
    "half of plain's bytes, lossless": lambda profile: solve_policy(profile, 0.5, LOSSLESS),
    "half of plain's bytes": lambda profile: solve_policy(profile, 0.5),
}


def replay_bytes(name: str, models: dict[str, Model] = MODELS) -> dict[str, Any]:
    """Bytes of the replay of a block, by policy, averaged over the blocks; and the overhead of a step by a roofline.

    Each kernel is taken to read and write every element once: what caches save, and what products read twice, is left
    out. With kernels the roofline's time of each operator that could be in a chain shrinks as the chain's bytes do,
    whether or not the policy has that chain, and policies are solved anew: they cannot gain more than that.
    """
    model = models[name]
    workload = Workload(
        config=PRESETS[model.preset].config(),
        device=find_device("h100"),
        precision=PRECISIONS[model.precision],
    )
    with fake_model(workload) as traced:
        profile = traced.profile(model.batch, model.tokens)
        programs = _Programs(library_of_profiles(traced.model))
        faster = programs.with_faster_chains(profile)
        return {
            policy: {
                **programs.moved_bytes(made := make(profile)),
                "step_ms": profile.step_ms,
                "overhead_ms": made.predicted_overhead_ms,
                "faster_overhead_ms": make(faster).predicted_overhead_ms,
            }
            for policy, make in POLICIES.items()
        }


class _Programs:
    """The replay of policies' plans, from the tapes of a library."""

    def __init__(self, library: TapeLibrary) -> None:
        self._library = library

    def of(self, plan: Plan) -> tuple[Tape, list[ReplayProgram]]:
        """The tape that a plan is for, and what its replay runs."""
        tape = self._library.tape_of_structure(plan.kind.partition("-")[0])
        assert tape is not None  # the profile recorded it
        choices, _ = FollowPlan("block", plan, self._library).entries.choices(tape)
        shared = frozenset(v.index for v in tape.values if tape.is_block_input(v.index) and v.index not in choices)
        return tape, CompiledPlan(tape, choices, shared).schedule.programs

    def moved_bytes(self, policy: Policy) -> dict[str, Any]:
        """Bytes and numbers of the operators in a block's replay under `policy`, and of those in chains."""
        total: Counter[str] = Counter()
        chains: Counter[tuple[str, int, int]] = Counter()
        for index, num_blocks in Counter(index for _, index in policy.blocks).items():
            tape, programs = self.of(policy.plans[index])
            for step in (step for program in programs for step in program.steps):
                sort = "pointwise" if is_pointwise(step.operator) else "others"
                total[sort] += num_blocks * operator_bytes(step.operator, tape)
                total["operators"] += num_blocks
            for chain in (chain for program in programs for chain in find_chains(program, tape)):
                before, after = chain_bytes(chain, tape)
                total += Counter(before=before * num_blocks, after=after * num_blocks)
                total["chained"] += num_blocks * len(chain.steps)
                chains[chain.names, before, after] += num_blocks
        parts = ("pointwise", "others", "before", "after", "operators", "chained")
        return {
            **{part: total[part] / len(policy.blocks) for part in parts},
            "chains": [
                {"names": names, "blocks": number, "before": before, "after": after}
                for (names, before, after), number in sorted(chains.items(), key=lambda item: item[0][2] - item[0][1])
            ],
        }

    def with_faster_chains(self, profile: Profile) -> Profile:
        """`profile`, in which the operators of chains take as much less time as a kernel moves fewer bytes."""
        shares: dict[tuple[str, int], float] = {}
        for plan in Policy.uniform(profile, "recompute").plans:
            tape, programs = self.of(plan)
            for chain in (chain for program in programs for chain in find_chains(program, tape)):
                before, after = chain_bytes(chain, tape)
                shares |= {(plan.kind, operator.index): after / before for operator in chain.operators}
        kinds = [
            replace(
                kind,
                operators=tuple(
                    replace(operator, ms=operator.ms * shares.get((kind.digest, operator.index), 1.0))
                    for operator in kind.operators
                ),
            )
            for kind in profile.kinds
        ]
        return replace(profile, kinds=tuple(kinds))
