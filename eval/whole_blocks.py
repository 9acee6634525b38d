"""Blocks that replay badly, with memory for half of them: loops over experts, and kernels that write by address.

    adacc eval whole-blocks --clock cpu

A loop over experts runs other operators for other data, so its block runs plainly or under torch's checkpoint. Kernels
that write by address are invisible to dispatchers: an autograd Function that launches them is run again as a whole. All
methods train on the same batch in turn. First their gradients are compared with plain training's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from adacc_hf import AdaccConfig, Profile, profile_model, solve_policy
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.eval.records.command_line import parse, runner_parser
from adacc_hf.eval.records.ledger import Ledger, open_ledger
from adacc_hf.eval.records.records import Figures, positive_int
from adacc_hf.eval.trials.contenders import (
    CHECKPOINTING,
    PLAIN,
    Contender,
    check_gradients,
    ratio_text,
    time_rounds,
    timing_figures,
)
from adacc_hf.eval.trials.opaque_llama import opaque_llama
from adacc_hf.reports.run_record import Settings, Spread, markdown_table
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy
from adacc_hf.solve.solver import least_policy

LOSSLESS = AdaccConfig(actions=("retain", "recompute"))
VOCABULARY = 128
HALF, LEAST = "Adacc, half", "Adacc, least peak"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of models and batches."""

    width: int = 256
    layers: int = 6
    batch: int = 8
    tokens: int = 128


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model, and a budget with memory for half of its blocks."""

    build: Callable[[Scale], PreTrainedModel] = field(repr=False)
    budget: Callable[[Profile], float | int] = field(repr=False)
    """Function from the profile to the budget of `solve_policy`."""


def _middle_peak(profile: Profile) -> int:
    """Return the peak half-way between torch's checkpoint around all blocks and plain training, in bytes."""
    plain, least = uniform_policy(profile, "retain"), checkpoint_policy(profile)
    return (plain.predicted_peak_bytes + least.predicted_peak_bytes) // 2


def _half_stored(profile: Profile) -> float:
    return 0.5


def _experts(scale: Scale) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": scale.width,
        "intermediate_size": 2 * scale.width,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": scale.width // 4,
        "use_cache": False,
    }


def _mixtral(scale: Scale) -> PreTrainedModel:
    return _loop(MixtralForCausalLM, MixtralConfig(**_experts(scale), num_local_experts=4))


def _qwen3_moe(scale: Scale) -> PreTrainedModel:
    sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": scale.width}
    return _loop(Qwen3MoeForCausalLM, Qwen3MoeConfig(**_experts(scale), **sizes))


def _loop(model_class: Any, config: Any) -> PreTrainedModel:
    """Return a model that runs its experts one after the other."""
    return model_class._from_config(config, attn_implementation="sdpa", experts_implementation="eager").train()


CASES: dict[str, Case] = {
    "Mixtral, loop over experts": Case(build=_mixtral, budget=_middle_peak),
    "Qwen3-MoE, loop over experts": Case(build=_qwen3_moe, budget=_middle_peak),
    "LLaMA, kernels by address": Case(
        build=lambda scale: opaque_llama(scale.width, scale.layers, VOCABULARY), budget=_half_stored
    ),
}


def main(argv: Sequence[str] | None = None, cases: Mapping[str, Case] = CASES, scale: Scale | None = None) -> int:
    """Measure every case, print the table and save the record."""
    parser = runner_parser("whole-blocks", __doc__)
    parser.add_argument("--rounds", type=positive_int, default=20, help="timed rounds of every case (default: 20)")
    arguments, settings = parse(parser, argv, clock=True)
    scale = scale or Scale()
    run_info = {"cases": list(cases), "scale": vars(scale), "rounds": arguments.rounds, "clock": arguments.clock}
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for name, case in cases.items():
            ledger.measure(name, partial(measure, case, scale, arguments.rounds, arguments.clock, settings))
        ledger.finish()
        ledger.publish(report_text(ledger))
    return 0


def measure(case: Case, scale: Scale, num_rounds: int, clock: str, settings: Settings) -> Figures:
    """Measure every method: its time, its peak, and its policy's numbers of blocks and activations by action.

    Raise WrongResultError if gradients differ from plain training's.
    """
    torch.manual_seed(settings.seed)
    model = case.build(scale)
    ids = torch.randint(VOCABULARY, (scale.batch, scale.tokens))
    batch = {"input_ids": ids, "labels": ids.clone()}
    profile = profile_model(model, batch, LOSSLESS)
    budget = case.budget(profile)
    policies = {
        PLAIN: None,
        CHECKPOINTING: None,
        HALF: solve_policy(profile, budget, LOSSLESS),
        LEAST: least_policy(profile, LOSSLESS),
    }
    contenders = [Contender(name, model, batch, policy) for name, policy in policies.items()]
    errors = check_gradients(contenders)
    memories = {contender.name: contender.memory() for contender in contenders}
    figures = timing_figures(time_rounds(contenders, num_rounds, clock))
    for name, policy in policies.items():
        figures[name] |= {
            "stored_bytes": memories[name].stored_bytes,
            "peak_bytes": memories[name].peak_bytes,
            "gradient_error": errors[name],
        }
        if policy is not None:
            figures[name] |= {
                "predicted_peak_bytes": simulate_policy(profile, policy).peak_bytes,
                "blocks": dict(policy.block_counts()),
                "actions": dict(policy.action_counts()),
            }
    return {"budget": budget, "methods": figures}


def report_text(ledger: Ledger) -> str:
    """Return a table for each case, as Markdown."""
    parts = []
    for name, point in ledger.points.items():
        budget = point["budget"]
        room = f"{budget:.0%} of the bytes that plain training stores" if budget <= 1 else f"a peak of {budget:,} bytes"
        parts += [f"{name}, half is {room}:", markdown_table([_cells(*row) for row in point["methods"].items()])]
    return "\n\n".join([*parts, " ".join(_NOTE.split())]) + "\n"


_NOTE = """Steps are forward and backward, all methods in turn; ratios are of medians, and in brackets the 20th to 80th
percentile of the ratios of single rounds. Peaks are counted in bytes of live tensors, parameters and gradients among
them. Gradients are bit for bit those of plain training in all methods."""


def _cells(name: str, row: Mapping[str, Any]) -> dict[str, str]:
    predicted = row.get("predicted_peak_bytes")
    return {
        "method": name,
        "step, ms": f"{Spread(**row['step_ms']).median:.1f}",
        "x plain": ratio_text(row, "of_plain"),
        "x checkpointing": ratio_text(row, "of_checkpointing"),
        "peak, bytes": f"{row['peak_bytes']:,}",
        "of predicted": "-" if predicted is None else f"{row['peak_bytes'] / predicted:.4f}",
        "blocks": _counts(row.get("blocks", {})),
        "activations": _counts(row.get("actions", {})),
    }


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items()) or "-"


if __name__ == "__main__":
    sys.exit(main())
