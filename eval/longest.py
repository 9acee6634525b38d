"""Longest sequence that trains within a memory limit, and its time per token, by method.

    adacc eval longest --layers 8 --width 64 --limit 48MiB

Each model is profiled once. The profile predicts the peak of each method at any length, and the longest length is
searched in these predictions. A training step of that length then runs in its own process, and its bytes are counted.
If they exceed the limit, the next shorter length is tried. All methods are also timed at one common length: the longest
length of checkpointing with a chunked head. The lengths are multiples of `--multiple`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.policy import Action
from adacc_hf.artifacts.profile import Profile, Shapes
from adacc_hf.artifacts.size_model import joined
from adacc_hf.artifacts.units import format_bytes, parse_bytes
from adacc_hf.estimate.largest import largest_fitting
from adacc_hf.estimate.planning import fully_recomputed
from adacc_hf.eval.records.command_line import CLOCKS, parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, open_ledger
from adacc_hf.eval.records.plots import PlotPoint, curves
from adacc_hf.eval.records.records import Figures, Status
from adacc_hf.eval.throughput import Run
from adacc_hf.eval.trials.isolation import run_isolated
from adacc_hf.eval.trials.model_under_test import Batch
from adacc_hf.eval.trials.trial import check_limit
from adacc_hf.price.codec_selection import resize_profile
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import Spread, markdown_table, to_json
from adacc_hf.solve.plan_pools import most_tiled
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import quick_least_policy
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import backward, forward_loss, static_bytes
from adacc_hf.torch_glue.meters import MemoryMeter

REFERENCE = "chunked"
"""Method whose longest sequence is the common length, and the reference of the ratios."""
NUM_ATTEMPTS = 4
"""Number of lengths that are tried if counted bytes exceed the limit that the predicted bytes keep."""


def main(argv: Sequence[str] | None = None, run: Run = run_isolated) -> int:
    """Measure every method on every model, print the tables, save record, tables and plot.

    Return 1 if a trial failed for reasons other than memory.
    """
    parser = runner_parser("longest", __doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument("--limit", default="48MiB", help="memory limit of a training step (default: 48MiB)")
    parser.add_argument("--width", type=positive_int, default=64)
    parser.add_argument("--layers", type=positive_int, default=8)
    parser.add_argument("--heads", type=positive_int, default=2)
    parser.add_argument("--vocabulary", type=positive_int, default=2048)
    parser.add_argument("--profiled", type=positive_int, default=4096, help="tokens of the profiled sequence")
    parser.add_argument("--most", type=positive_int, default=65536, help="upper bound of the search, in tokens")
    parser.add_argument("--multiple", type=positive_int, default=64, help="lengths are multiples of this number")
    parser.add_argument("--rounds", type=positive_int, default=3, help="timed steps of each trial")
    parser.add_argument("--timeout", type=positive_int, default=3600, help="time limit of one trial in seconds")
    arguments, settings = parse(parser, argv, clock=True)
    size = Size(
        width=arguments.width,
        layers=arguments.layers,
        heads=arguments.heads,
        vocabulary=arguments.vocabulary,
        tokens=arguments.most,
    )
    names = ("models", "methods", "profiled", "most", "multiple", "rounds", "clock")
    run_info = {name: getattr(arguments, name) for name in names}
    run_info |= {"size": to_json(size), "limit_bytes": parse_bytes(arguments.limit, "--limit")}
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        longest = {
            model: _measure_model(ledger, model, size, partial(run, timeout_s=arguments.timeout))
            for model in arguments.models
        }
        ledger.complete(report_text, save_plot, longest=longest)
    return 1 if ledger.has_status(Status.ERROR, Status.TIMEOUT) else 0


def _measure_model(ledger: Ledger, model: str, size: Size, run: Run) -> dict[str, int]:
    """Return the longest sequence of each method. Measure each method there, and at the common length."""
    info = ledger.run_info
    training = LongTraining(model, size, ledger.settings.device, ledger.settings.seed)
    profile = joined([training.profile(info["profiled"] * share // 4) for share in (4, 3, 2, 1)])
    longest: dict[str, int] = {}
    for method in tqdm(info["methods"], desc=f"longest, {model}", unit="method"):
        tokens = predicted_longest(profile, method, info)
        lengths = range(tokens, max(0, tokens - NUM_ATTEMPTS * info["multiple"]), -info["multiple"])
        fits = (_trial(ledger, model, method, length, run)["status"] == Status.MEASURED.value for length in lengths)
        longest[method] = next((length for length, fit in zip(lengths, fits, strict=True) if fit), 0)
    common = longest.get(REFERENCE, 0)
    for method, tokens in longest.items():
        if common and tokens > common:
            _trial(ledger, model, method, common, run)
    return longest


def predicted_longest(profile: Profile, method: str, info: dict[str, Any]) -> int:
    """Return the largest multiple of `--multiple` tokens with a predicted peak within the limit, or 0."""

    def excess(number: int) -> int:
        return peak_at(profile, method, number * info["multiple"]) - info["limit_bytes"]

    multiple = info["multiple"]
    start, limit = info["profiled"] // multiple, info["most"] // multiple
    return multiple * largest_fitting(excess, start, limit, at_zero=-info["limit_bytes"])


def point_key(model: str, method: str, tokens: int) -> str:
    return f"{model}, {method}, {tokens} tokens"


def _trial(ledger: Ledger, model: str, method: str, tokens: int, run: Run) -> Figures:
    info, settings = ledger.run_info, ledger.settings
    order = {name: info[name] for name in ("size", "limit_bytes", "rounds", "clock")}
    order |= {name: getattr(settings, name) for name in ("device", "threads", "seed")}
    order |= {"model": model, "method": method, "tokens": tokens}
    return ledger.measure(point_key(model, method, tokens), lambda: run(run_long_trial, order))


def report_text(ledger: Ledger) -> str:
    """Return one table for each model as Markdown."""
    info, size = ledger.run_info, ledger.run_info["size"]
    parts = [
        f"Longest sequence within {format_bytes(info['limit_bytes'])}: models of {size['layers']} layers of width "
        f"{size['width']} with a vocabulary of {size['vocabulary']}, float32, one sequence. Peaks are counted bytes of "
        f"whole training steps. Times are medians of {info['rounds']} steps (20th to 80th percentile)"
    ]
    for model, longest in ledger.summary["longest"].items():
        parts += [f"{model}:", markdown_table([_row(ledger, model, longest, method) for method in longest])]
    return "\n\n".join([*parts, *ledger.reasons()]) + "\n"


def _row(ledger: Ledger, model: str, longest: dict[str, int], method: str) -> dict[str, str]:
    tokens, common = longest[method], longest.get(REFERENCE, 0)
    point = ledger.points.get(point_key(model, method, tokens), {})
    at_common = ledger.points.get(point_key(model, method, common), {})
    return {
        "method": METHODS[method].title,
        "longest": f"{tokens:,}",
        f"x {METHODS[REFERENCE].title}": f"{tokens / common:.2f}" if common else "",
        "peak": format_bytes(point["peak_bytes"]) if "peak_bytes" in point else "",
        "ms per 1,000 tokens": _time_text(point),
        f"at {common:,} tokens": _time_text(at_common),
    }


def _time_text(point: Figures) -> str:
    return Spread(**point["ms_per_1000_tokens"]).text(0) if "ms_per_1000_tokens" in point else ""


def save_plot(ledger: Ledger) -> None:
    """Plot the time per token against the length, for the first model."""
    model, longest = next(iter(ledger.summary["longest"].items()))
    series: dict[str, list[PlotPoint]] = {}
    labelled: set[int] = set()
    for method, tokens in longest.items():
        for length in sorted({tokens, longest.get(REFERENCE, tokens)}):
            time = ledger.points.get(point_key(model, method, length), {}).get("ms_per_1000_tokens")
            if time is None:
                continue
            label = f"{tokens:,}" if length == tokens and tokens not in labelled else ""
            labelled.add(length)
            point = PlotPoint(x=length, y=time["median"], low=time["low"], high=time["high"], label=label)
            series.setdefault(METHODS[method].title, []).append(point)
    path = ledger.settings.output.with_suffix(".svg")
    curves(path, series, "tokens per sequence", "ms per 1,000 tokens", from_zero=True)


# Models, methods with their policies, and one measured trial.

MODELS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Configurations of models with rotary positions, by their names on the command line."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a model, and the length of its longest sequence."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    tokens: int

    def model(self, name: str, device: str, seed: int) -> PreTrainedModel:
        """Return the model `name` in MODELS in train mode, without a cache of keys and values."""
        config = MODELS[name](
            num_hidden_layers=self.layers,
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            head_dim=self.width // self.heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.tokens,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device).train()


Solve = Callable[[Profile, int | None], Policy]
"""Function of (profile, budget in bytes) that returns a method's policy, with the least peak if the budget is None."""


@dataclass(frozen=True, kw_only=True)
class LongMethod:
    """Method of training on long sequences."""

    title: str
    solve: Solve
    is_own: bool = True
    """True if the policy is applied. False for methods that train without this package: the policy predicts them."""
    is_checkpointed: bool = False
    """True if Transformers' checkpointing runs the blocks."""

    def peak_bytes(self, profile: Profile) -> int:
        """Return the least peak of a training step with the method."""
        return self.solve(profile, None).predicted_peak_bytes


def _plain(profile: Profile, budget: int | None) -> Policy:
    return uniform_policy(profile.untiled, Action.RETAIN)


def _checkpointing(profile: Profile, budget: int | None, head: str = "plain", tiles: bool = False) -> Policy:
    profile = profile.with_head(head)
    return fully_recomputed(most_tiled(profile) if tiles else profile.untiled)


def _adacc(profile: Profile, budget: int | None, config: AdaccConfig) -> Policy:
    return quick_least_policy(profile, config) if budget is None else solve_policy(profile, budget, config)


EXACT = AdaccConfig(actions=("retain", "recompute"), head="plain")

METHODS = {
    "plain": LongMethod(title="plain", solve=_plain, is_own=False),
    "checkpointing": LongMethod(title="checkpointing", solve=_checkpointing, is_own=False, is_checkpointed=True),
    "chunked": LongMethod(title="checkpointing, chunked head", solve=partial(_checkpointing, head="chunked")),
    "tiled": LongMethod(
        title="checkpointing, chunked head, tiles", solve=partial(_checkpointing, head="chunked", tiles=True)
    ),
    "exact": LongMethod(title="Adacc, exact", solve=partial(_adacc, config=EXACT)),
    "adacc": LongMethod(title="Adacc", solve=partial(_adacc, config=AdaccConfig())),
}
"""Methods by their names on the command line. The methods with a chunked head and tiles run by this package's own
implementation of both, without a solver."""


class LongTraining:
    """Training of one model on one sequence."""

    def __init__(self, model: str, size: Size, device: str, seed: int) -> None:
        """Build the model, and train one short step, which creates the optimizer's state."""
        self._size = size
        self._device = device
        self.model: PreTrainedModel = size.model(model, device, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.step(self.batch(16))

    def batch(self, tokens: int) -> Batch:
        """Return ids and labels of [1, tokens] random tokens."""
        ids = torch.randint(5, self._size.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens)).to(
            self._device
        )
        return {"input_ids": ids, "labels": ids.clone()}

    def step(self, batch: Batch) -> None:
        """Run forward, backward and optimizer step."""
        backward(forward_loss(self.model, batch))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def profile(self, tokens: int) -> Profile:
        """Profile one step on `tokens` tokens."""
        return profile_model(self.model, self.batch(tokens), AdaccConfig(), self.optimizer)


def shapes_of(tokens: int) -> Shapes:
    """Return the shapes of a batch of one sequence of `tokens` tokens."""
    return tuple((name, (1, tokens)) for name in ("input_ids", "labels"))


def peak_at(profile: Profile, method: str, tokens: int) -> int:
    """Return the predicted least peak of a step of `method` on `tokens` tokens. `profile` predicts all sizes."""
    return METHODS[method].peak_bytes(resize_profile(profile, shapes_of(tokens)))


def run_long_trial(
    model: str,
    size: Figures,
    method: str,
    tokens: int,
    limit_bytes: int,
    rounds: int,
    clock: str,
    device: str,
    threads: int,
    seed: int,
) -> Figures:
    """Count the bytes of a training step of `method` on `tokens` tokens, and time `rounds` steps.

    `size` has the fields of a Size. Raise OverLimitError if the step takes more than `limit_bytes`, and
    InfeasibleBudgetError if no policy fits.
    """
    torch.set_num_threads(threads)
    training, long_method = LongTraining(model, Size(**size), device, seed), METHODS[method]
    batch = training.batch(tokens)
    figures: Figures = {}
    if long_method.is_own:
        policy = long_method.solve(training.profile(tokens), limit_bytes)
        apply_policy(training.model, policy)
        figures = {"policy": policy.summary(), "predicted_peak_bytes": policy.predicted_peak_bytes}
    if long_method.is_checkpointed:
        switch_checkpointing(training.model, on=True)
    for _ in range(2 if long_method.is_own else 1):  # the first two calls at a shape are recorded
        training.step(batch)
    live_bytes = static_bytes(training.model, batch, training.optimizer)
    with MemoryMeter.for_device(torch.device(device)) as meter:
        training.step(batch)
    figures |= {"static_bytes": live_bytes, "peak_bytes": live_bytes + meter.peak_bytes}
    check_limit(figures, limit_bytes)
    seconds = [seconds_of(partial(training.step, batch), torch.device(device), CLOCKS[clock]) for _ in range(rounds)]
    figures["ms_per_1000_tokens"] = Spread.of([1e6 * each / tokens for each in seconds])
    return to_json(figures)


if __name__ == "__main__":
    sys.exit(main())
