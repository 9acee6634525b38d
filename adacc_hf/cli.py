"""The `adacc` command: plan runs, look into policy files, report on them, list the codecs, examine, measure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from adacc_hf import __version__, cli_policy, doctor
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import PROFILES_VARIABLE
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate import command as cli_plan

if TYPE_CHECKING:
    from adacc_hf.price.price_store import ProfileStore, Row

USER_ERROR = 2
"""Exit status for what the user can mend; argparse's own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 after a one-line message on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "eval":
            return _run_eval(arguments)
        _print(arguments.run(arguments))
    except BrokenPipeError:  # the reader, `head` say, has seen enough; the interpreter must not flush to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AdaccError, ValueError, OSError) as error:
        return _refuse(arguments.command, error)
    except ImportError as error:
        if error.name != "matplotlib":
            raise  # a fault of this package, not a missing extra
        return _refuse(arguments.command, error)
    return 0


def _print(text: str) -> None:
    """Print `text`; where stdout has no letter of its encoding for one in a path, say, escape it as stderr does."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError as error:
        print(text.encode(error.encoding, "backslashreplace").decode(error.encoding), flush=True)


def _refuse(command: str, error: Exception) -> int:
    print(f"adacc {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="adacc", description=__doc__)
    parser.add_argument("--version", action="version", version=f"adacc_hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    cli_policy.add_parsers(commands)
    cli_plan.add_parser(commands)
    _add_profiles_parser(commands)
    doctor.add_parser(commands)

    codecs = commands.add_parser("codecs", help="list the codecs, with the bytes that they keep of a tensor")
    codecs.set_defaults(run=_codecs)

    _add_eval_parser(commands)
    return parser


def _codecs(_: argparse.Namespace) -> str:
    """One line per codec: name, whether it is lossless, the share of a tensor's bytes that it keeps, its options."""
    import torch

    from adacc_hf.kernels.codecs import get_codec, list_codecs

    shape, dtype = (8, 1024, 1024), torch.float32
    plain_bytes = 8 * 1024 * 1024 * dtype.itemsize
    lines = [f"kept bytes are of a float32 tensor of 8 x 1024 x 1024 ({format_bytes(plain_bytes)})"]
    for name in list_codecs():
        codec = get_codec(name)
        share = f"{100 * codec.predicted_bytes(shape, dtype) / plain_bytes:.1f} %"
        options = ", ".join(f"{option}={value!r}" for option, value in codec.options.items())
        lines.append(f"{name:16} {'lossless' if codec.lossless else 'lossy':8} {share:>7}  {options or 'no options'}")
    return "\n".join(lines)


# `adacc eval RUNNER`: what measures, by name.

RUNNERS = {
    "throughput": ("throughput", "tokens/s and peak against batch size, by method (Figure 5)"),
    "max-batch": ("max_batch", "largest batch within a memory limit, by method (Table 3)"),
    "loss": ("loss", "validation loss over training, by method (Figure 6)"),
    "ablation": ("ablation", "step time, peak and loss with one part of Adacc taken away"),
    "peers": ("peers", "tokens/s against peak, beside what else saves activation memory"),
    "codecs": ("codecs", "gradient error, round-trip error and bandwidth of the codecs"),
    "solver": ("solver_bench", "seconds that a policy takes to solve, over budgets"),
    "plan": ("plan_bench", "what `adacc plan` says of published models, and the seconds and memory it takes"),
    "published": ("predictions", "what `adacc plan` predicts beside what others measured and published"),
    "block-bytes": ("block_bytes", "bytes that a block keeps, tensor by tensor, beside Megatron's formula"),
    "table3": ("paper_batches", "largest batches on a V100 as predicted, beside the paper's (Table 3)"),
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
    "compact": ("compact", "CompAct's memory and step time, beside GaLore's, Adacc's and its paper's"),
    "compact-training": ("compact_training", "validation loss by CompAct, beside AdamW, GaLore and APOLLO"),
    "compact-tuning": ("compact_tuning", "fine-tuning by CompAct, beside AdamW, LoRA and GaLore"),
    "executor-bench": ("executor_bench", "what recompute-everything and retain-everything cost"),
    "budget-bench": ("budget_bench", "what a memory budget costs in time"),
    "gradient-error": ("gradient_error", "the first half of codecs: how far they move the gradient"),
    "codec-bandwidth": ("codec_bandwidth", "the second half of codecs: bytes per second"),
    "gpu-tests": ("gpu_tests", "the tests of a checkout that need a GPU, file by file"),
    "all": ("everything", "every runner above at the demo's scale, one after the other"),
}
"""By the name on the command line: the module of `adacc_hf.eval`, and what it measures."""


def _add_eval_parser(commands: Any) -> None:
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


def _run_eval(arguments: argparse.Namespace) -> int:
    """Run a module of `adacc_hf.eval`, which prints by itself, and return its exit status."""
    module, _ = RUNNERS[arguments.runner]
    return import_module(f"adacc_hf.eval.{module}").main(arguments.options)


# `adacc profiles`: the prices that are kept.


def _add_profiles_parser(commands: Any) -> None:
    """Add `profiles` to the commands of `adacc`."""
    parser = commands.add_parser(
        "profiles",
        help="list, show or clear the prices that profiling keeps",
        description="Folder: profiles in $XDG_CACHE_HOME/adacc_hf or ~/.cache/adacc_hf; "
        f"${PROFILES_VARIABLE} names another.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="one line per profiled tape, the newest first").set_defaults(run=_list)
    show = actions.add_parser("show", help="the prices of one tape")
    show.add_argument("name", help="its name in the list, or the beginning of it")
    show.set_defaults(run=_show)
    actions.add_parser("clear", help="remove all").set_defaults(run=_clear)


def _store() -> ProfileStore:
    """The store of prices; torch and Transformers, slow to import, are imported only then."""
    from adacc_hf.price.price_store import ProfileStore

    return ProfileStore()


def _list(_: argparse.Namespace) -> str:
    store = _store()
    rows = store.list()
    if not rows:
        return f"no profiles in {store.folder}"
    return "\n".join(_line(row) for row in rows)


def _line(row: Row) -> str:
    operators = row.prices["operators"]
    total_ms = sum(operator["ms"] for operator in operators)
    return (
        f"{row.key.name}  {row.block_class:24} {len(operators):4} operators {total_ms:10.3f} ms  {row.key.dtype}  "
        f"{row.key.device}  torch {row.key.torch}  {row.created}"
    )


def _show(arguments: argparse.Namespace) -> str:
    row = _store().find(arguments.name)
    lines = [_line(row), f"tape {row.key.tape}, shapes {row.key.shapes}, settings {row.key.settings}", "operators"]
    lines += [f"  {operator['ms']:10.4f} ms  {operator['name']}" for operator in row.prices["operators"]]
    lines.append("activations")
    for activation in row.prices["activations"]:
        lines.append(f"  {format_bytes(activation['nbytes']):>12}  {activation['name']}")
        lines += [
            f"    {option['codec']}: {format_bytes(option['nbytes'])}, encode {option['encode_ms']:.4f} ms, decode "
            f"{option['decode_ms']:.4f} ms, error {option['error']:.4f}"
            for option in activation["codecs"]
        ]
    return "\n".join(lines)


def _clear(_: argparse.Namespace) -> str:
    store = _store()
    return f"removed {store.clear()} profiles from {store.folder}"


if __name__ == "__main__":
    sys.exit(main())
