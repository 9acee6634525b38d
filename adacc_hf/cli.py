"""The `adacc` command: plan runs, look into policy files, report on them, list the codecs, measure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adacc_hf import __version__, cli_eval, cli_plan, cli_profiles
from adacc_hf.errors import AdaccError, PolicyMismatchError
from adacc_hf.files import read_json
from adacc_hf.policy import COMPILED_FORMAT, Policy
from adacc_hf.profile import Profile
from adacc_hf.reports.explain import explain_policy
from adacc_hf.units import format_bytes

if TYPE_CHECKING:
    from adacc_hf.partitioner.region import CompiledPolicy

USER_ERROR = 2
"""Exit status for what the user can mend; argparse's own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 after a one-line message on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "eval":
            return cli_eval.run(arguments)
        print(arguments.run(arguments), flush=True)
    except BrokenPipeError:  # the reader, `head` say, has seen enough; the interpreter must not flush to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AdaccError, ValueError, OSError) as error:
        return _refuse(arguments.command, error)
    except ImportError as error:
        if error.name != "matplotlib":
            raise  # a fault of this package, not a missing extra
        return _refuse(arguments.command, error)
    return 0


def _refuse(command: str, error: Exception) -> int:
    print(f"adacc {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="adacc", description=__doc__)
    parser.add_argument("--version", action="version", version=f"adacc_hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    explain = commands.add_parser("explain", help="print a policy, with a profile also why each action was chosen")
    explain.add_argument("policy", type=Path, metavar="POLICY", help="policy file that a run or Policy.save wrote")
    explain.add_argument(
        "--profile",
        type=Path,
        help="file that Profile.save wrote, the one the policy was solved from (default: the one that a run left "
        "beside the policy)",
    )
    explain.add_argument("--html", type=Path, metavar="DIR", help="also write the report into this folder")
    explain.set_defaults(run=_explain)

    report = commands.add_parser("report", help="write report.md, report.html and their pictures")
    report.add_argument("policy", type=Path, metavar="POLICY", help="policy file that a run or Policy.save wrote")
    report.add_argument(
        "--profile", type=Path, help="the profile that the policy was solved from; one of compiled graphs has none"
    )
    report.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write into")
    report.add_argument("--history", type=Path, help="adacc_history.json of the run, for what happened over its steps")
    report.set_defaults(run=_report)

    cli_plan.add_parser(commands)
    cli_profiles.add_parser(commands)

    codecs = commands.add_parser("codecs", help="list the codecs, with the bytes that they keep of a tensor")
    codecs.set_defaults(run=_codecs)

    cli_eval.add_parser(commands)
    return parser


def _explain(arguments: argparse.Namespace) -> str:
    compiled = _compiled_policy(arguments.policy)
    if compiled is not None:
        return _explain_compiled(compiled, arguments)
    policy = Policy.load(arguments.policy)
    path = arguments.profile or _profile_beside(arguments.policy)
    if path is None:
        if arguments.html is not None:
            raise ValueError(f"--html needs the profile that {arguments.policy} was solved from: name it by --profile")
        return str(policy)
    profile = Profile.load(path)
    text = explain_policy(policy, profile)
    if arguments.html is not None:
        from adacc_hf.reports.report import write_report

        write_report(arguments.html, profile=profile, policy=policy)
    return text


def _explain_compiled(policy: CompiledPolicy, arguments: argparse.Namespace) -> str:
    from adacc_hf.reports.explain_compiled import explain_compiled

    if arguments.profile is not None:
        raise ValueError(
            f"--profile={arguments.profile}: {arguments.policy} is of compiled graphs, which have no profile"
        )
    if arguments.html is not None:
        from adacc_hf.reports.compiled import write_compiled_report

        write_compiled_report(arguments.html, policy=policy)
    return explain_compiled(policy)


def _compiled_policy(path: Path) -> CompiledPolicy | None:
    """The policy in a file, if it is one of compiled graphs; torch's compiler is imported only then."""
    record = read_json(path, PolicyMismatchError, "policy")
    if not isinstance(record, dict) or record.get("format") != COMPILED_FORMAT:
        return None
    from adacc_hf.partitioner.region import CompiledPolicy

    return CompiledPolicy.load(path)


def _profile_beside(policy: Path) -> Path | None:
    """The profile that a run left beside a policy file, the one with newer prices first; None if there is none."""
    beside = [policy.with_name(policy.name.replace("policy", part)) for part in ("prices", "profile")]
    return next((path for path in beside if path != policy and path.is_file()), None)


def _report(arguments: argparse.Namespace) -> str:
    compiled = _compiled_policy(arguments.policy)
    history = read_json(arguments.history, AdaccError, "history") if arguments.history else ()
    if compiled is not None:
        from adacc_hf.reports.compiled import write_compiled_report

        return f"wrote {write_compiled_report(arguments.output, policy=compiled, history=history)}"
    if arguments.profile is None:
        raise ValueError(f"report needs the profile that {arguments.policy} was solved from: name it by --profile")
    from adacc_hf.reports.report import write_report

    policy, profile = Policy.load(arguments.policy), Profile.load(arguments.profile)
    return f"wrote {write_report(arguments.output, profile=profile, policy=policy, history=history)}"


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


if __name__ == "__main__":
    sys.exit(main())
