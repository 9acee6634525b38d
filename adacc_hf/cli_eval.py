"""`adacc eval RUNNER`: what measures, by name."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

RUNNERS = {
    "throughput": ("throughput", "tokens/s and peak against batch size, by method (Figure 5)"),
    "max-batch": ("max_batch", "largest batch within a memory limit, by method (Table 3)"),
    "loss": ("loss", "validation loss over training, by method (Figure 6)"),
    "ablation": ("ablation", "step time, peak and loss with one part of Adacc taken away"),
    "peers": ("peers", "tokens/s against peak, beside what else saves activation memory"),
    "codecs": ("codecs", "gradient error, round-trip error and bandwidth of the codecs"),
    "solver": ("solver_bench", "seconds that a policy takes to solve, over budgets"),
    "plan": ("plan_bench", "what `adacc plan` says of published models, and the seconds and memory it takes"),
    "table4": ("table4", "train by every method, then score all of them (Table 4)"),
    "downstream": ("downstream", "zero-shot accuracy of one model by lm-eval, on the data sets of Table 4"),
    "cloze": ("cloze", "accuracy of one model on cloze passages of one's own text"),
    "peak-accuracy": ("peak_accuracy", "predicted against measured peaks, over models and budgets"),
    "budget-sweep": ("budget_sweep", "overhead and peak from the least budget to one that everything fits"),
    "table1": ("table1", "recompute and compression time of every activation, and which wins (Table 1)"),
    "partitions": ("partitions", "bits and bytes of compiled graphs that our partitioner cut"),
    "compiled": ("compiled", "bytes, peaks, step and compile times of torch.compile with our partitioner"),
    "evolution": ("evolution", "what a policy gains by following the data (Figure 7)"),
    "tracking-cost": ("tracking_cost", "the share of a long run that tracking and solving take"),
    "lengths": ("lengths", "step times where every batch has another size, and of the first step at each"),
    "sizes": ("sizes", "predicted against measured memory at sizes that were never profiled, under a budget"),
    "executor-bench": ("executor_bench", "what recompute-everything and retain-everything cost"),
    "budget-bench": ("budget_bench", "what a memory budget costs in time"),
    "gradient-error": ("gradient_error", "the first half of codecs: how far they move the gradient"),
    "codec-bandwidth": ("codec_bandwidth", "the second half of codecs: bytes per second"),
    "all": ("everything", "every runner above at the demo's scale, one after the other"),
}
"""By the name on the command line: the module of `adacc_hf.eval`, and what it measures."""


def add_parser(commands: Any) -> None:
    """Add `eval` to the commands of `adacc`."""
    width = max(map(len, RUNNERS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in RUNNERS.items()]
    parser = commands.add_parser(
        "eval",
        help="measure speed, memory, gradient error or accuracy",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run one of the runners below; each leaves a JSON record, a Markdown table and, some, a plot.",
        epilog="\n".join(["runners:", *lines, "", "`adacc eval RUNNER --help` lists the options of one."]),
    )
    parser.add_argument("runner", type=_name, choices=tuple(RUNNERS), metavar="RUNNER", help="one of those below")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="the runner's own options")


def _name(text: str) -> str:
    """The runner's name; a module's name stands for it too."""
    hyphened = text.replace("_", "-")
    by_module = {module.replace("_", "-"): name for name, (module, _) in RUNNERS.items()}
    return hyphened if hyphened in RUNNERS else by_module.get(hyphened, text)


def run(arguments: argparse.Namespace) -> int:
    """Run a module of `adacc_hf.eval`, which prints by itself, and return its exit status."""
    module, _ = RUNNERS[arguments.runner]
    return import_module(f"adacc_hf.eval.{module}").main(arguments.options)
