"""`adacc explain` and `adacc report`: what a policy does, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.errors import AdaccError, PolicyMismatchError
from adacc_hf.artifacts.files import COMPILED_FILE, HISTORY_FILE, POLICY_FILE, read_json
from adacc_hf.artifacts.policy import COMPILED_FORMAT, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.reports.explain import explain_policy

if TYPE_CHECKING:
    from adacc_hf.compiler.region import CompiledPolicy


def add_parsers(commands: Any) -> None:
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
    from adacc_hf.adapt.what_ran import describe_fallbacks

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
    from adacc_hf.compiler.region import CompiledPolicy

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
