"""Files of a run: policy, profile and history in the run's folder, and the state for resuming in each checkpoint.

A resumed run records its first step anew, as every run does. From the checkpoint it keeps the policies that fit this
profile, the corrections with the switched-off codecs, and the history. Tracking starts over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import (
    COMPILED_FILE,
    HISTORY_FILE,
    POLICY_FILE,
    PROFILE_FILE,
    STATE_FILE,
    fields_of,
    read_json,
    write_json,
)
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.torch_glue.progress import announce

STATE_VERSION = 5


@dataclass(frozen=True, kw_only=True)
class Saved:
    """State of a run in a checkpoint, for resuming."""

    policies: Sequence[Policy]
    """Different policies of the run, the one in use first."""
    settings: str
    """`AdaccConfig.describe_changes()` of the run."""
    step: int
    """Number of finished steps."""
    history: list[dict[str, Any]]
    corrections: dict[str, Any] | None = None
    """`Corrections.to_json()` of the run, or None if its policy was passed in."""
    batches: dict[str, Any] | None = None
    """`ByteBatches.to_json()` of the run, or None if it does not make micro-batches by bytes."""


def drop_files(folder: str | Path) -> None:
    """Remove the files of an earlier run from `folder`, the state first: a checkpoint without it is not resumed."""
    for name in (STATE_FILE, POLICY_FILE, COMPILED_FILE, PROFILE_FILE, HISTORY_FILE):
        (Path(folder) / name).unlink(missing_ok=True)  # another run may share the folder


def save_files(folder: str | Path, policy: Policy, profile: Profile | None) -> None:
    """Write the policy and the profile into `folder`, each atomically. Without a profile, remove an older one."""
    path, profile_path = Path(folder) / POLICY_FILE, Path(folder) / PROFILE_FILE
    if profile is not None:
        profile.save(profile_path)
    elif not _is_file_of(path, policy):
        profile_path.unlink(missing_ok=True)
    policy.save(path)


def _is_file_of(path: Path, policy: Policy) -> bool:
    """Return True if the file `path` contains `policy`."""
    try:
        return Policy.load(path) == policy
    except (AdaccError, FileNotFoundError):
        return False


def save_history(folder: str | Path, history: list[dict[str, Any]]) -> None:
    """Write the history of the run, for reports."""
    write_json(Path(folder) / HISTORY_FILE, history)


def save_in_checkpoint(folder: Path, saved: Saved, profile: Profile | None) -> None:
    """Write the run's state into the checkpoint `folder`, from which `drop_files` has removed the files of earlier
    runs, and the policy in use with its `profile`, which reports read."""
    save_files(folder, saved.policies[0], profile)
    policies = [policy.to_json() for policy in saved.policies]
    write_json(folder / STATE_FILE, {"version": STATE_VERSION, **fields_of(saved), "policies": policies}, indent=None)


def load_from_checkpoint(folder: str | Path, config: AdaccConfig) -> Saved | None:
    """Return the state of the run that wrote the checkpoint `folder`, or None if it has none, or a damaged one.

    Policies that were made under other settings than `config` are left out, with a line in the log.
    """
    path = Path(folder) / STATE_FILE
    if not path.is_file():
        if (Path(folder) / POLICY_FILE).is_file():
            announce("Adacc: %s is missing: the run begins without the policies of the checkpoint", path)
        return None
    try:
        record = read_json(path, AdaccError, "state")
        if record["version"] != STATE_VERSION:
            raise AdaccError(f"it has format version {record['version']!r}, not {STATE_VERSION}")
        policies = [Policy.from_json(policy, "it") for policy in record["policies"]]
        names = [each.name for each in fields(Saved) if each.name != "policies"]
        saved = Saved(policies=policies, **{name: record[name] for name in names})
    except (AdaccError, KeyError, TypeError, ValueError, AttributeError) as error:
        announce("Adacc: %s is not used: solving again (%s: %s)", path, type(error).__name__, error)
        return None
    settings = config.describe_changes()
    if saved.settings == settings:
        return saved
    announce("Adacc: %s was saved under %s, and not under %s: solving again", folder, saved.settings, settings)
    return replace(saved, policies=())
