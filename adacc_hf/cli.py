"""The `adacc` command. Its subcommands run, plan and verify training, explain policies, write reports, list
codecs, check the environment, and run experiments."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacc_hf import __version__, doctor, launch, verify
from adacc_hf.artifacts.errors import AdaccError, PolicyMismatchError
from adacc_hf.artifacts.files import COMPILED_FORMAT, HISTORY_FILE, policy_file, read_json
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate import command as cli_plan
from adacc_hf.reports.explain import explain_policy
from adacc_hf.reports.text_table import fit_lines

if TYPE_CHECKING:
    from adacc_hf.compiler.compiled_policy import CompiledPolicy

USER_ERROR = 2
"""Exit status for errors that the user can fix. argparse uses the same status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `adacc` command with the arguments `argv`, by default the command line's. Return the exit status.

    After an error that the user can fix, the status is 2, and a one-line message is written to stderr.
    """
    arguments = _command_parser().parse_args(argv)
    try:
        result = arguments.run(arguments)
        if isinstance(result, int):  # the exit status of a command that prints its own output
            return result
        for text in [result] if isinstance(result, str) else result:
            _print_output(text)
    except BrokenPipeError:  # the reader, such as `head`, has exited; the interpreter must not flush stdout at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AdaccError, ValueError, OSError) as error:
        return _print_command_error(arguments.command, error)
    except ImportError as error:
        if error.name != "matplotlib":
            raise  # a bug in this package, not a missing extra
        return _print_command_error(arguments.command, error)
    return 0


def _print_output(text: str) -> None:
    """Print the output `text` of a command. A character that stdout cannot encode is escaped with a backslash."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError as error:
        print(text.encode(error.encoding, "backslashreplace").decode(error.encoding), flush=True)


def _print_command_error(command: str, error: Exception) -> int:
    """Print the error of an `adacc` command in one line. Return the exit status for errors that the user can fix."""
    print(f"adacc {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return USER_ERROR


def _command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="adacc", description=__doc__)
    parser.add_argument("--version", action="version", version=f"adacc_hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    launch.add_parser(commands)
    _add_policy_parsers(commands)
    cli_plan.add_parser(commands)
    verify.add_parser(commands)
    doctor.add_parser(commands)

    codecs = commands.add_parser("codecs", help="list the codecs and their compressed sizes")
    codecs.set_defaults(run=_codecs_command)

    _add_eval_parser(commands)
    return parser


def _codecs_command(_: argparse.Namespace) -> Iterator[str]:
    """Yield one line per codec: name, lossless or lossy, compressed size in percent of the tensor, and options."""
    shape = (8, 1024, 1024)
    plain_bytes = 4 * math.prod(shape)
    yield f"compressed size in percent of a float32 tensor of 8 x 1024 x 1024 ({format_bytes(plain_bytes)})"
    import torch  # after the first line, because the import takes seconds

    from adacc_hf.kernels.codecs import get_codec, list_codecs

    for name in list_codecs():
        codec = get_codec(name)
        share = f"{100 * codec.predicted_bytes(shape, torch.float32) / plain_bytes:.1f} %"
        options = ", ".join(f"{option}={value!r}" for option, value in codec.options.items())
        yield f"{name:16} {'lossless' if codec.lossless else 'lossy':8} {share:>7}  {options or 'no options'}"


# `adacc explain` and `adacc report`: the actions of a policy, and the reasons.


def _add_policy_parsers(commands: Any) -> None:
    explain = commands.add_parser("explain", help="print a policy and, with a profile, the reason for each action")
    _add_policy_argument(explain)
    explain.set_defaults(run=_explain_command)

    report = commands.add_parser("report", help="write report.md, report.html and their pictures")
    _add_policy_argument(report)
    report.add_argument("--output", type=Path, metavar="DIR", help="output folder (default: the policy's folder)")
    report.set_defaults(run=_report_command)


def _add_policy_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "policy", type=Path, metavar="POLICY", help="a run's folder, a checkpoint, or a file written by Policy.save"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        help="the profile that the policy was solved from (default: the profile that a run saved next to the policy); "
        "policies of compiled graphs have no profile",
    )


def _explain_command(arguments: argparse.Namespace) -> str:
    path = policy_file(arguments.policy)
    compiled = _compiled_policy(path)
    if compiled is not None:
        from adacc_hf.compiler.graph_report import explain_compiled

        if arguments.profile is not None:
            raise ValueError(
                f"--profile={arguments.profile}: the policy {arguments.policy} is for compiled graphs, which have no "
                f"profile; leave out --profile"
            )
        text = explain_compiled(compiled)
    else:
        policy, profile_path = Policy.load(path), arguments.profile or _saved_profile(path)
        text = str(policy) if profile_path is None else explain_policy(policy, Profile.load(profile_path))
    from adacc_hf.adapt.history import describe_fallbacks

    fallbacks = describe_fallbacks(_load_history(path.with_name(HISTORY_FILE)))
    return fit_lines("\n".join([text, *[""] * bool(fallbacks), *fallbacks]))


def _report_command(arguments: argparse.Namespace) -> str:
    path = policy_file(arguments.policy)
    compiled = _compiled_policy(path)
    history = _load_history(path.with_name(HISTORY_FILE))
    if compiled is not None:
        from adacc_hf.compiler.graph_report import compiled_report

        report = compiled_report(policy=compiled, history=history)
    else:
        profile_path = arguments.profile or _saved_profile(path)
        if profile_path is None:
            raise ValueError(f"report needs the profile that {path} was solved from: pass it with --profile")
        from adacc_hf.reports.report import policy_report

        report = policy_report(profile=Profile.load(profile_path), policy=Policy.load(path), history=history)
    markdown = report.save(arguments.output or path.parent)
    return f"wrote {markdown.with_suffix('.html')} and {markdown.name}"


def _compiled_policy(path: Path) -> CompiledPolicy | None:
    """Return the policy in the file `path` if it is for compiled graphs, else None. For other policies, torch's
    compiler is not imported."""
    record = read_json(path, PolicyMismatchError, "policy")
    if not isinstance(record, dict) or record.get("format") != f"adacc_hf.{COMPILED_FORMAT}":
        return None
    from adacc_hf.compiler.compiled_policy import CompiledPolicy

    return CompiledPolicy.load(path)


def _saved_profile(policy: Path) -> Path | None:
    """Return the path of the profile that a run saved next to the file `policy`, or None if there is no profile. The
    newer profile in a checkpoint is not used, because its codecs may have fewer raw (uncompressed) channels than the
    policy needs."""
    profile = policy.with_name(policy.name.replace("policy", "profile"))
    return profile if profile != policy and profile.is_file() else None


def _load_history(path: Path) -> Sequence[dict[str, Any]]:
    """Load a run's history, the events of its steps. Return () if the file is missing."""
    if not path.is_file():
        return ()
    history = read_json(path, AdaccError, "history")
    if not isinstance(history, list) or not all(_is_history_event(record) for record in history):
        raise AdaccError(f"{path} is not the history of a run: delete the file, or copy the run's {HISTORY_FILE} there")
    return history


def _is_history_event(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("event"), str)


# `adacc eval RUNNER`: the measurement programs, by name.

RUNNERS = {
    "throughput": ("throughput", "tokens/s and peak against batch size, by method (Figure 5)"),
    "max-batch": ("max_batch", "largest batch within a memory limit, by method (Table 3)"),
    "loss": ("loss", "validation loss over training, by method (Figure 6)"),
    "peers": ("peers", "tokens/s against peak, compared with other methods that save activation memory"),
    "longest": ("longest", "longest sequence within a memory limit, and its time per token, by method"),
    "downstream": ("downstream", "zero-shot accuracy of one model by lm-eval, on the paper's data sets (Table 4)"),
    "published": ("repository.predictions", "predictions of `adacc plan` compared with published measurements"),
    "all": ("repository.run_all", "every runner above but downstream, at the demo's scale, one after the other"),
}
"""Experiments that `adacc eval` runs, by name: (module in `adacc_hf.eval`, description). Only a source checkout has the
modules in `repository`, which measure the numbers on the repository's pages."""


def _add_eval_parser(commands: Any) -> None:
    width = max(map(len, RUNNERS))
    lines: dict[bool, list[str]] = {False: [], True: []}
    for name, (module, text) in RUNNERS.items():
        lines[module.startswith("repository.")].append(f"  {name:{width}}  {text}")
    note = "only in a source checkout, for the figures of its pages:"
    hint = "`adacc eval RUNNER --help` lists the options of a runner."
    parser = commands.add_parser(
        "eval",
        help="measure speed, memory, gradient error or accuracy",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run one of the runners below. Each writes a JSON record and a Markdown table, some also a plot.",
        epilog="\n".join(["runners:", *lines[False], "", note, *lines[True], "", hint]),
    )
    parser.add_argument(
        "runner", type=lambda name: name.replace("_", "-"), choices=tuple(RUNNERS), metavar="RUNNER", help="see below"
    )
    parser.add_argument("options", nargs=argparse.REMAINDER, help="the runner's own options")
    parser.set_defaults(run=_run_eval)


def _run_eval(arguments: argparse.Namespace) -> int:
    module, _ = RUNNERS[arguments.runner]
    try:
        runner = import_module(f"adacc_hf.eval.{module}")
    except ModuleNotFoundError as error:
        if error.name != "adacc_hf.eval.repository":
            raise
        raise AdaccError(
            f"`adacc eval {arguments.runner}` measures figures of the repository's pages, and an installed package "
            "lacks it: run it from a source checkout (pip install -e .)"
        ) from None
    return runner.main(arguments.options)


if __name__ == "__main__":
    sys.exit(main())
