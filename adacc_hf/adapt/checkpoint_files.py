"""Files of a run: policy, profile and history in the run's folder, and the state for resuming in each checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from adacc_hf.adapt.policy_limits import excluded_action
from adacc_hf.adapt.profile_updates import SwitchedOff, in_all_blocks, lossy_options
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import (
    COMPILED_FILE,
    FIRST_STEPS_FILE,
    HISTORY_FILE,
    POLICY_FILE,
    PRICES_FILE,
    PROFILE_FILE,
    SEARCHED_FILE,
    STATE_FILE,
    read_json,
    write_json,
)
from adacc_hf.artifacts.memory_simulator import recording_peak_bytes
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.torch_glue.batch_shapes import BatchShapes, shapes_from_json, shapes_to_json
from adacc_hf.torch_glue.distributed import num_ranks
from adacc_hf.torch_glue.progress import announce

log = logging.getLogger(__name__)

STATE_VERSION = 2
UNSETTLED = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
"""Fields of a model's config that loading and the Trainer change, and from which no operator of a block follows."""
REQUIRED_FIELDS = {"policy_step", "memory_budget", "tightened", "history", "losses", "tracking_ms"}
"""Fields of `Saved` that are in every checkpoint. Other fields may be missing in older checkpoints, and then get their
defaults."""
SIZE_POLICIES = "shape_policies"
"""Key of the size policies (policies of one batch size each) in a checkpoint. The first release used this name."""


FILES = {"profile": PROFILE_FILE, "prices": PRICES_FILE, "searched": SEARCHED_FILE}
"""Names of the files with the profiles of a `SavedSizePolicy`, keyed by field."""


@dataclass(frozen=True, kw_only=True)
class SavedSizePolicy:
    """Record in a checkpoint of a run's policy for one batch size, with the policy's state."""

    policy: Policy
    profile: Profile | None
    shapes: BatchShapes | None = None
    due: int | None = None
    """Step after which a policy that the solver is computing replaces this policy, or None if the solver does not
    run."""
    num_tracked: int = 0
    memory_budget: str | float | int | None = None
    """Memory budget for later policies at this batch size. None (in older checkpoints) stands for the budget of the
    run."""
    prices: Profile | None = None
    """Profile with the current bytes, times and errors of codecs. None if these numbers are still the numbers in
    `profile`, from which the policy was made."""
    searched: Profile | None = None
    """Profile for which the solver ran last. None if the solver ran last for `profile`."""
    is_provisional: bool = False
    """True if the policy was chosen to need little memory, and is to be replaced once the memory of a step has been
    measured."""
    is_told: bool = False
    """True if the profile was not measured, but predicted from the profile of another batch size."""
    is_borrowed: bool = False
    """True if the policy was made for another batch size, and a solver run may find a faster policy for this size."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON record of the fields that are not saved in separate files."""
        plain = {name: getattr(self, name) for name in _record_fields(self, "policy", *FILES)}
        files = [name for name in FILES if getattr(self, name) is not None]
        return plain | {"shapes": shapes_to_json(self.shapes), "files": files}

    @classmethod
    def load(cls, folder: Path, number: int, record: dict[str, Any]) -> SavedSizePolicy:
        """Load the policy of one batch size from the checkpoint in `folder`. `number` is part of its file names.

        `record` is the result of `to_json`. Fields that older checkpoints lack get their defaults. Raises
        FileNotFoundError if a file is missing that was written.
        """
        policy = Policy.load(folder / _numbered_file(POLICY_FILE, number))
        # Without a record, a policy of the solver had a profile: only a policy that was passed in has none.
        written = record.get("files", ["profile"] if "memory_budget" in dict(policy.facts) else [])
        values: dict[str, Any] = {}
        for name, file in FILES.items():
            path = folder / _numbered_file(file, number)
            values[name] = Profile.load(path) if path.is_file() or name in written else None
        return cls(
            policy=policy,
            **values,
            **{name: record[name] for name in _record_fields(cls, "policy", "shapes", *FILES) if name in record},
            shapes=shapes_from_json(record.get("shapes")),
        )

    def save(self, folder: Path, number: int) -> None:
        """Write the profiles into `folder`, and then the policy. `number` is part of the file names."""
        for name, prices in ((PRICES_FILE, self.prices), (SEARCHED_FILE, self.searched)):
            if prices is not None:
                prices.save(folder / _numbered_file(name, number))
        save_files(folder, self.policy, self.profile, number)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """State of a run in a checkpoint, for resuming."""

    size_policies: list[SavedSizePolicy]
    """Policies of one batch size each. The first one is the policy in use."""
    policy_step: int | None = None
    """Number of the step from which tracking steps are counted. None means the step at which the run resumes."""
    memory_budget: str | float | int | None = None
    """Budget in the run's config. None if the checkpoint has a policy file, but no file with the run's state."""
    host_memory: str | float | int | None = None
    """The setting `host_memory` in the run's config."""
    tightened: float | int | None = None
    """Smaller budget for new policies, if a step ran out of memory under `memory_budget`, else None."""
    history: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    suspicion: str | None = None
    """Reason to check gradients in the next step (see `LossGuard.suspicion`). None if no check is due."""
    switched_off: list[SwitchedOff] = field(default_factory=list)
    """Codecs that new policies must not use, because these codecs degraded gradients."""
    is_unproven: bool = False
    """True if codecs were switched off, and no step has run yet under the next policy, which avoids these codecs."""
    tracking_ms: float = 0.0
    step: int | None = None
    """Number of finished steps. None in older checkpoints. Adapters for the Trainer ignore this number, because the
    Trainer counts steps itself."""
    missing_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by which the measured memory of a step exceeded the profile's prediction, by part of the step, such as a
    block's backward."""
    counted_elements: int = 0
    """Number of elements in the largest micro-batch of the step whose memory gave `missing_bytes`."""
    num_ranks: int = field(default_factory=num_ranks)
    """Number of ranks of the run. A sharded model has another part on each rank, so another number of ranks needs new
    profiles."""
    num_micro: int | None = None
    """Micro-batches per step that the profiles count. None in older checkpoints."""
    model_settings: dict[str, str] = field(default_factory=dict)
    """Settings on which the operators of blocks depend (`model_settings`). Empty in older checkpoints."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON record of all fields except the policies and profiles, which are saved in separate files."""
        return {
            "version": STATE_VERSION,
            **{name: getattr(self, name) for name in _record_fields(self, "size_policies")},
            "switched_off": [list(codec) for codec in self.switched_off],
            SIZE_POLICIES: [size_policy.to_json() for size_policy in self.size_policies],
        }

    @classmethod
    def load(cls, folder: Path, record: dict[str, Any]) -> Saved:
        """Load the state from a checkpoint. `record` is the result of `to_json`. Older records lack some keys."""
        size_policies = [
            SavedSizePolicy.load(folder, number, fields) for number, fields in enumerate(record[SIZE_POLICIES], start=1)
        ]
        if not size_policies:
            raise ValueError(f"{SIZE_POLICIES!r} is empty")
        names = [n for n in _record_fields(cls, "size_policies", "switched_off") if n in record or n in REQUIRED_FIELDS]
        return cls(
            size_policies=size_policies,
            switched_off=_switched_off_codecs(record, size_policies),
            **{name: record[name] for name in names},
        )


def drop_files(folder: str | Path) -> None:
    """Remove the files of an earlier run from the checkpoint `folder`.

    Policies are removed first, because a checkpoint without a policy is ignored.
    """
    names = (POLICY_FILE, COMPILED_FILE, STATE_FILE, PROFILE_FILE, PRICES_FILE, SEARCHED_FILE, HISTORY_FILE)
    for pattern in (*names, *(name.replace(".json", "_[0-9]*.json") for name in names)):
        for path in Path(folder).glob(pattern):
            path.unlink(missing_ok=True)  # another run may share the folder


def save_files(folder: str | Path, policy: Policy, profile: Profile | None, number: int = 1) -> None:
    """Write the policy and the profile into `folder`, each atomically.

    Without a profile, the profile of another policy is removed. A `number` above 1 is added to the file names:
    adacc_policy.json becomes adacc_policy_2.json.
    """
    path, profile_path = (Path(folder) / _numbered_file(name, number) for name in (POLICY_FILE, PROFILE_FILE))
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


def save_first_steps(folder: str | Path, records: list[dict[str, Any]]) -> None:
    """Write the times of the run's first steps (`FirstSteps.records`), for reports."""
    write_json(Path(folder) / FIRST_STEPS_FILE, records)


def save_in_checkpoint(folder: Path, saved: Saved) -> None:
    """Write the run's state into the checkpoint `folder`, from which `drop_files` has removed the files of earlier
    runs.

    The file of the first policy is written last. If this file is missing, a resumed run reads no other file, so an
    incomplete state is never read.
    """
    if not folder.is_dir():
        log.warning("Adacc: no policy saved, because there is no folder %s; a resumed run will profile again", folder)
        return
    write_json(folder / STATE_FILE, saved.to_json())
    for number, size_policy in reversed(list(enumerate(saved.size_policies, start=1))):
        size_policy.save(folder, number)


def load_from_checkpoint(folder: str | Path, config: AdaccConfig, host_limit_bytes: int = 0) -> Saved | None:
    """Return the state of the run that wrote the checkpoint `folder`.

    Return None if the checkpoint has no policy, if a file is damaged or missing, or if its policies are for another
    `memory_budget`, `host_memory` or number of ranks, use actions that the config excludes, store more than
    `host_limit_bytes` in host memory, or leave no room in the budget to record the operators of blocks. A message with
    the reason is logged.
    """
    memory_budget, host_memory = config.memory_budget, config.host_memory
    folder = Path(folder)
    if not (folder / POLICY_FILE).is_file():
        return None
    try:
        saved = _load_run_state(folder)
    except (AdaccError, FileNotFoundError) as error:
        announce("Adacc: %s is not used: profiling again (%s)", folder, error)
        return None
    solved_for = dict(saved.size_policies[0].policy.facts).get("memory_budget", memory_budget)
    saved_budget = solved_for if saved.memory_budget is None else saved.memory_budget
    if saved_budget != memory_budget:
        announce("Adacc: %s has memory_budget=%r, not %r: profiling again", folder, saved_budget, memory_budget)
        return None
    if saved.host_memory != host_memory:
        announce("Adacc: %s has host_memory=%r, not %r: profiling again", folder, saved.host_memory, host_memory)
        return None
    reasons = (excluded_action(size_policy.policy, config) for size_policy in saved.size_policies)
    reason = next(filter(None, reasons), None)
    if reason is not None:
        announce("Adacc: %s has a policy that %s: profiling again", folder, reason)
        return None
    host_bytes = max(size_policy.policy.predicted_host_bytes for size_policy in saved.size_policies)
    if host_bytes > host_limit_bytes:
        announce(
            "Adacc: %s has policies with %s in host memory, and host_memory=%r allows %s of the memory that is free "
            "now: profiling again",
            folder,
            format_bytes(host_bytes),
            host_memory,
            format_bytes(host_limit_bytes),
        )
        return None
    if saved.num_ranks != num_ranks():
        announce("Adacc: %s was written by %d ranks, not %d: profiling again", folder, saved.num_ranks, num_ranks())
        return None
    if not _has_room_to_record(saved.size_policies[0], config):
        announce(
            "Adacc: memory_budget=%r has no room to record the operators of a whole block, which %s does not contain: "
            "profiling again, from small parts of the first batch",
            memory_budget,
            folder,
        )
        return None
    return saved


def model_settings(model: nn.Module, precision: str) -> dict[str, str]:
    """Return the settings of `model` on which the operators of its blocks depend, for comparison with a resumed run.

    `precision` is the training loop's mixed precision.
    """
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    text = json.dumps({name: value for name, value in values.items() if name not in UNSETTLED}, default=str)
    return {
        "precision": " ".join([precision, *sorted({str(parameter.dtype) for parameter in model.parameters()})]),
        "attention": str(getattr(config, "_attn_implementation", "")),
        "config": hashlib.sha1(text.encode()).hexdigest(),
    }


def _has_room_to_record(first: SavedSizePolicy, config: AdaccConfig) -> bool:
    """Return True if the budget has room for the first step of a run that resumes with the policy `first`, in which
    the first block of each kind is recorded."""
    if first.profile is None:
        return True
    budget = Budget.resolve(config.memory_budget, first.profile, config)
    return not budget.limits_peak or recording_peak_bytes(first.profile, first.policy) <= budget.nbytes


def _record_fields(record: Any, *excluded: str) -> list[str]:
    return [field.name for field in fields(record) if field.name not in excluded]


def _load_run_state(folder: Path) -> Saved:
    """Load the state of a run from a checkpoint. If the folder has only a policy file, the state consists of this
    policy."""
    if not (folder / STATE_FILE).is_file():
        return Saved(size_policies=[SavedSizePolicy.load(folder, 1, {})])
    record = read_json(folder / STATE_FILE, AdaccError, "state")
    try:
        if record["version"] != STATE_VERSION:
            raise AdaccError(f"{folder / STATE_FILE} has format version {record['version']!r}, not {STATE_VERSION}")
        return Saved.load(folder, record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AdaccError(f"{folder / STATE_FILE} is damaged ({type(error).__name__}: {error})") from error


def _switched_off_codecs(record: dict[str, Any], size_policies: list[SavedSizePolicy]) -> list[SwitchedOff]:
    """Return the codecs that a run had switched off when it wrote a checkpoint with this `record`."""
    if "switched_off" in record:
        return [(block, activation, codec) for block, activation, codec in record["switched_off"]]
    # Older checkpoints list blocks instead. All lossy codecs were switched off for the kinds of these blocks.
    profiles = [size_policy.profile for size_policy in size_policies if size_policy.profile is not None]
    blocks = record["exact_blocks"]
    return sorted(set().union(*(in_all_blocks(profile, lossy_options(profile, blocks)) for profile in profiles)))


def _numbered_file(name: str, number: int) -> str:
    """Return the file name with `number` added: ("adacc_policy.json", 2) -> "adacc_policy_2.json"."""
    return name if number == 1 else name.replace(".json", f"_{number}.json")
