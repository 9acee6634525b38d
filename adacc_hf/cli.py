"""The `adacc` command: plan runs, look into policy files, report on them, list the codecs, examine, measure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacc_hf import __version__, doctor
from adacc_hf.artifacts.errors import AdaccError, PolicyMismatchError
from adacc_hf.artifacts.files import COMPILED_FILE, HISTORY_FILE, POLICY_FILE, PROFILES_VARIABLE, read_json
from adacc_hf.artifacts.policy import COMPILED_FORMAT, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate import command as cli_plan
from adacc_hf.reports.explain import explain_policy

if TYPE_CHECKING:
    from adacc_hf.compiler.compiled_policy import CompiledPolicy
    from adacc_hf.price.profile_cache import ProfileCache, Row

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

    _add_policy_parsers(commands)
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


# `adacc explain` and `adacc report`: what a policy does, and why.


def _add_policy_parsers(commands: Any) -> None:
    """Add `explain` and `report` to the commands of `adacc`."""
    explain = commands.add_parser("explain", help="print a policy, with a profile also why each action was chosen")
    _add_policy(explain)
    explain.add_argument("--html", type=Path, metavar="DIR", help="also write the report into this folder")
    explain.set_defaults(run=_explain)

    report = commands.add_parser("report", help="write report.md, report.html and their pictures")
    _add_policy(report)
    report.add_argument(
        "--output", type=Path, metavar="DIR", help="folder to write into (default: the one of the policy)"
    )
    report.add_argument(
        "--history",
        type=Path,
        help="adacc_history.json of the run, for what happened over its steps (default: the one beside the policy)",
    )
    report.set_defaults(run=_report)


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "policy", type=Path, metavar="POLICY", help="a run's folder, a checkpoint, or a file that Policy.save wrote"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        help="the profile that the policy was solved from; one of compiled graphs has none (default: the one that a "
        "run left beside the policy)",
    )


def _explain(arguments: argparse.Namespace) -> str:
    path = _policy_file(arguments.policy)
    compiled = _compiled_policy(path)
    if compiled is not None:
        return _explain_compiled(compiled, arguments)
    policy = Policy.load(path)
    profile_path = arguments.profile or _profile_beside(path)
    if profile_path is None:
        if arguments.html is not None:
            raise ValueError(f"--html needs the profile that {path} was solved from: name it by --profile")
        return str(policy)
    profile = Profile.load(profile_path)
    text = "\n".join([explain_policy(policy, profile), *_fallbacks(path)])
    if arguments.html is not None:
        from adacc_hf.reports.report import write_report

        write_report(arguments.html, profile=profile, policy=policy)
    return text


def _fallbacks(policy: Path) -> list[str]:
    """Lines on the steps of the run that left `policy` that ran otherwise."""
    from adacc_hf.adapt.fallback_stats import describe_fallbacks

    first, *reasons = [*describe_fallbacks(_history(policy.with_name(HISTORY_FILE), is_asked_for=False)), ""]
    return ["", first, *(f"  {reason}" for reason in reasons if reason)] if first else []


def _explain_compiled(policy: CompiledPolicy, arguments: argparse.Namespace) -> str:
    from adacc_hf.compiler.graph_report import explain_compiled

    if arguments.profile is not None:
        raise ValueError(
            f"--profile={arguments.profile}: {arguments.policy} is of compiled graphs, which have no profile"
        )
    if arguments.html is not None:
        from adacc_hf.compiler.graph_report import write_compiled_report

        write_compiled_report(arguments.html, policy=policy)
    return "\n".join([explain_compiled(policy), *_fallbacks(_policy_file(arguments.policy))])


def _report(arguments: argparse.Namespace) -> str:
    path = _policy_file(arguments.policy)
    compiled = _compiled_policy(path)
    folder = arguments.output or path.parent
    history = _history(arguments.history or path.with_name(HISTORY_FILE), is_asked_for=arguments.history is not None)
    if compiled is not None:
        from adacc_hf.compiler.graph_report import write_compiled_report

        return f"wrote {write_compiled_report(folder, policy=compiled, history=history)}"
    profile_path = arguments.profile or _profile_beside(path)
    if profile_path is None:
        raise ValueError(f"report needs the profile that {path} was solved from: name it by --profile")
    from adacc_hf.reports.report import write_report

    policy, profile = Policy.load(path), Profile.load(profile_path)
    return f"wrote {write_report(folder, profile=profile, policy=policy, history=history)}"


def _policy_file(path: Path) -> Path:
    """The policy in a folder, or the file itself. Raises ValueError for a folder without one."""
    if not path.is_dir():
        return path
    found = [path / name for name in (POLICY_FILE, COMPILED_FILE) if (path / name).is_file()]
    if not found:
        raise ValueError(
            f"{path} has neither {POLICY_FILE} nor {COMPILED_FILE}: name the folder of a run with AdaccCallback, one "
            f"of its checkpoints, or a policy file"
        )
    return found[0]


def _compiled_policy(path: Path) -> CompiledPolicy | None:
    """The policy in a file, if it is one of compiled graphs; torch's compiler is imported only then."""
    record = read_json(path, PolicyMismatchError, "policy")
    if not isinstance(record, dict) or record.get("format") != COMPILED_FORMAT:
        return None
    from adacc_hf.compiler.compiled_policy import CompiledPolicy

    return CompiledPolicy.load(path)


def _profile_beside(policy: Path) -> Path | None:
    """The profile that a run left beside a policy file; None if there is none.

    A checkpoint has newer prices too, which may have no codec for as many raw channels as the policy keeps.
    """
    beside = policy.with_name(policy.name.replace("policy", "profile"))
    return beside if beside != policy and beside.is_file() else None


def _history(path: Path, is_asked_for: bool) -> Sequence[dict[str, Any]]:
    if not is_asked_for and not path.is_file():
        return ()
    history = read_json(path, AdaccError, "history")
    if not isinstance(history, list) or not all(_is_event(record) for record in history):
        raise AdaccError(f"{path} is no history of a run: name the {HISTORY_FILE} that it left by --history")
    return history


def _is_event(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("event"), str)


# `adacc eval RUNNER`: what measures, by name.

RUNNERS = {
    "headline": ("headline", "Adacc between plain training and checkpointing, timed in turn: the share that it wins"),
    "throughput": ("throughput", "tokens/s and peak against batch size, by method (Figure 5)"),
    "max-batch": ("max_batch", "largest batch within a memory limit, by method (Table 3)"),
    "loss": ("loss", "validation loss over training, by method (Figure 6)"),
    "peers": ("peers", "tokens/s against peak, beside what else saves activation memory"),
    "codecs": ("codecs", "gradient error, round-trip error and bandwidth of the codecs"),
    "solver": ("solver_bench", "seconds that a policy takes to solve, over budgets"),
    "published": ("predictions", "what `adacc plan` predicts beside what others measured and published"),
    "table4": ("table4", "train by every method, then score all of them (Table 4)"),
    "downstream": ("downstream", "zero-shot accuracy of one model by lm-eval, on the data sets of Table 4"),
    "cloze": ("cloze", "accuracy of one model on cloze passages of one's own text"),
    "peak-accuracy": ("peak_accuracy", "predicted against measured peaks, over models and budgets"),
    "table1": ("table1", "recompute and compression time of every activation, and which wins (Table 1)"),
    "compiled": ("compiled", "bytes, peaks, step and compile times of torch.compile with our partitioner"),
    "lengths": ("lengths", "step times where every batch has another size, and of the first step at each"),
    "compact": ("compact", "CompAct's memory and step time, beside GaLore's, Adacc's and its paper's"),
    "compact-training": ("compact_training", "validation loss by CompAct, beside AdamW, GaLore and APOLLO"),
    "executor-bench": ("executor_bench", "what recompute-everything and retain-everything cost"),
    "whole-blocks": ("whole_blocks", "blocks that no replay serves well, in half of the room: plain, or checkpointed"),
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


def _store() -> ProfileCache:
    """The store of prices; torch and Transformers, slow to import, are imported only then."""
    from adacc_hf.price.profile_cache import ProfileCache

    return ProfileCache()


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
