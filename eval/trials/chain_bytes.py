"""The bytes that a GPU's kernels would move in a block's replay, with chains as operators and as one kernel each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Policy
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, FakeModel, Workload, fake_model
from adacc_hf.estimate.model_presets import PRESETS
from adacc_hf.eval.trials.pointwise_chains import chain_bytes, find_chains, is_pointwise, operator_bytes
from adacc_hf.run.follow_plan import FollowPlan
from adacc_hf.solve.solver import solve_policy
from adacc_hf.tape.compiled_plan import CompiledPlan
from adacc_hf.tape.library import library_of_profiles

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


def replay_bytes(name: str, models: dict[str, Model] = MODELS) -> dict[str, Any]:
    """Bytes of the replay of a block, by policy, averaged over the blocks.

    Each kernel is taken to read and write every element once. What its caches save is not known, nor what its products
    read twice.
    """
    model = models[name]
    workload = Workload(
        config=PRESETS[model.preset].config(),
        device=find_device("h100"),
        precision=PRECISIONS[model.precision],
    )
    with fake_model(workload) as traced:
        profile = traced.profile(model.batch, model.tokens)
        policies = {
            "everything recomputed": Policy.uniform(profile, "recompute"),
            "half of plain's bytes, lossless": solve_policy(profile, 0.5, LOSSLESS),
            "half of plain's bytes": solve_policy(profile, 0.5),
        }
        return {policy: _bytes_by(traced, plans) for policy, plans in policies.items()}


def _bytes_by(traced: FakeModel, policy: Policy) -> dict[str, Any]:
    library = library_of_profiles(traced.model)
    numbers = Counter(index for _, index in policy.blocks)
    total: Counter[str] = Counter()
    chains: Counter[tuple[str, int, int]] = Counter()
    for index, num_blocks in numbers.items():
        plan = policy.plans[index]
        tape = library.tape_of_structure(plan.kind.partition("-")[0])
        assert tape is not None  # the profile recorded it
        choices, _ = FollowPlan("block", plan, library).choices(tape)
        shared = frozenset(v.index for v in tape.values if tape.is_block_input(v.index) and v.index not in choices)
        for program in CompiledPlan(tape, choices, shared).schedule.programs:
            for step in program.steps:
                is_member = is_pointwise(step.operator)
                total["pointwise" if is_member else "others"] += num_blocks * operator_bytes(step.operator, tape)
                total["operators"] += num_blocks
            for chain in find_chains(program, tape):
                before, after = chain_bytes(chain, tape)
                total["before"] += num_blocks * before
                total["after"] += num_blocks * after
                total["chained"] += num_blocks * len(chain.steps)
                chains[chain.names, before, after] += num_blocks
    num_blocks = len(policy.blocks)
    parts = ("pointwise", "others", "before", "after", "operators", "chained")
    return {
        **{part: total[part] / num_blocks for part in parts},
        "chains": [
            {"names": names, "blocks": number, "before": before, "after": after}
            for (names, before, after), number in sorted(chains.items(), key=lambda item: item[0][2] - item[0][1])
        ],
    }
