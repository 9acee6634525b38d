"""The policy and the profile that a run keeps beside its checkpoints, and in each of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adacc_hf.adapt.profile_updates import SwitchedOff, in_all_blocks, lossy_options
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import (
    COMPILED_FILE,
    HISTORY_FILE,
    POLICY_FILE,
    PRICES_FILE,
    PROFILE_FILE,
    SEARCHED_FILE,
    STATE_FILE,
    read_json,
    write_json,
)
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.torch_glue.batch_shapes import BatchShapes, shapes_from_json, shapes_to_json
from adacc_hf.torch_glue.distributed import num_ranks

log = logging.getLogger(__name__)

STATE_VERSION = 2
_OLDEST = ("policy_step", "memory_budget", "tightened", "history", "losses", "tracking_ms")
"""Plain fields of `Saved` that checkpoints have had from the beginning."""
_LATER = ("suspicion", "is_unproven", "step", "missing_bytes", "counted_elements")
"""Plain fields that older checkpoints lack."""


@dataclass(frozen=True, kw_only=True)
class SavedSizePolicy:
    """What a run needs to go on at one size of batch."""

    policy: Policy
    profile: Profile | None
    shapes: BatchShapes | None = None
    due: int | None = None
    """The step at whose end a new policy is to be taken over, solved from this profile."""
    num_tracked: int = 0
    memory_budget: str | float | int | None = None
    """The budget of new policies at this size; None, in older checkpoints, for that of the whole run."""
    prices: Profile | None = None
    """Today's prices, if they have moved since the policy was made from those of `profile`."""
    searched: Profile | None = None
    """The prices for which the solver ran last, if they are not those of `profile`."""
    is_provisional: bool = False
    """Whether the policy is that of least memory, until a whole step was counted."""
    is_told: bool = False
    """Whether the profile was estimated from that of another size."""

    def to_json(self) -> dict[str, Any]:
        """What of it has no file of its own."""
        return {
            "shapes": shapes_to_json(self.shapes),
            "due": self.due,
            "num_tracked": self.num_tracked,
            "memory_budget": self.memory_budget,
            "is_provisional": self.is_provisional,
            "is_told": self.is_told,
        }

    @classmethod
    def load(cls, folder: Path, number: int, record: dict[str, Any]) -> SavedSizePolicy:
        """The shape policy of that number in a checkpoint, where `record` is what `to_json` gave; older ones lack
        some."""
        files = [folder / _numbered(name, number) for name in (PROFILE_FILE, PRICES_FILE, SEARCHED_FILE)]
        profile, prices, searched = (Profile.load(file) if file.is_file() else None for file in files)
        return cls(
            policy=Policy.load(folder / _numbered(POLICY_FILE, number)),
            profile=profile,
            shapes=shapes_from_json(record.get("shapes")),
            due=record.get("due"),
            num_tracked=record.get("num_tracked", 0),
            memory_budget=record.get("memory_budget"),
            prices=prices,
            searched=searched,
            is_provisional=record.get("is_provisional", False),
            is_told=record.get("is_told", False),
        )

    def save(self, folder: Path, number: int) -> None:
        """Write what has files of its own, the policy last."""
        for name, prices in ((PRICES_FILE, self.prices), (SEARCHED_FILE, self.searched)):
            if prices is not None:
                prices.save(folder / _numbered(name, number))
        save_files(folder, self.policy, self.profile, number)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a run needs to go on: the shape policy in force comes first."""

    shape_policies: list[SavedSizePolicy]
    policy_step: int | None = None
    """The step from which tracking is counted; None for the step at which the run resumes."""
    memory_budget: str | float | int | None = None
    """The budget that the run was given; None if only its policy is known."""
    tightened: float | int | None = None
    """The budget of policies for other sizes, if a step ran out of memory under the given one."""
    history: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    suspicion: str | None = None
    """What the run was to look into in its next step."""
    switched_off: list[SwitchedOff] = field(default_factory=list)
    """Codecs that are not used any more, since they degraded gradients."""
    is_unproven: bool = False
    """Whether a policy without some of them was still to come."""
    tracking_ms: float = 0.0
    step: int | None = None
    """Steps that were over; older checkpoints do not tell, and the Trainer has its own number."""
    missing_bytes: dict[str, int] = field(default_factory=dict)
    """What a counted step took at its moments beside its profile."""
    counted_elements: int = 0
    """Elements of the largest micro-batch of that step."""
    num_ranks: int = field(default_factory=num_ranks)
    """Ranks of the run: among more of them each holds less of what is divided."""

    def to_json(self) -> dict[str, Any]:
        """All of it but for what shape policies have in files of their own."""
        plain = {name: getattr(self, name) for name in (*_OLDEST, *_LATER, "num_ranks")}
        return {
            "version": STATE_VERSION,
            **plain,
            "switched_off": [list(codec) for codec in self.switched_off],
            "shape_policies": [size_policy.to_json() for size_policy in self.shape_policies],
        }

    @classmethod
    def load(cls, folder: Path, record: dict[str, Any]) -> Saved:
        """What was in a checkpoint, where `record` is what `to_json` gave; older ones lack some of it."""
        shape_policies = [
            SavedSizePolicy.load(folder, number, fields)
            for number, fields in enumerate(record["shape_policies"], start=1)
        ]
        if not shape_policies:
            raise ValueError("it has no shape policy")
        return cls(
            shape_policies=shape_policies,
            switched_off=_switched_off(record, shape_policies),
            **{name: record[name] for name in _LATER if name in record},
            num_ranks=record.get("num_ranks", num_ranks()),  # older checkpoints do not tell
            **{name: record[name] for name in _OLDEST},
        )


@contextmanager
def going_on(folder: str | Path, consequence: str) -> Iterator[None]:
    """Say that files could not be written into `folder`, which is no reason to lose a run."""
    try:
        yield
    except OSError as error:
        log.warning("Adacc: not all files were written into %s (%s): %s", folder, error, consequence)


def drop_files(folder: str | Path) -> None:
    """Remove what an earlier run left in the checkpoint `folder`, policies first: without one nothing else is read."""
    names = (POLICY_FILE, COMPILED_FILE, STATE_FILE, PROFILE_FILE, PRICES_FILE, SEARCHED_FILE, HISTORY_FILE)
    for pattern in (*names, *(name.replace(".json", "_[0-9]*.json") for name in names)):
        for path in Path(folder).glob(pattern):
            path.unlink(missing_ok=True)  # another run may share the folder


def save_files(folder: str | Path, policy: Policy, profile: Profile | None, number: int = 1) -> None:
    """Write both into `folder`, each whole or not at all; those of further shape policies are numbered."""
    if profile is not None:
        profile.save(Path(folder) / _numbered(PROFILE_FILE, number))
    policy.save(Path(folder) / _numbered(POLICY_FILE, number))


def save_history(folder: str | Path, history: list[dict[str, Any]]) -> None:
    """Write what happened so far, for reports."""
    write_json(Path(folder) / HISTORY_FILE, history)


def save_in_checkpoint(folder: Path, saved: Saved) -> None:
    """Write all of it into `folder`, a checkpoint that has none of these files.

    The first policy comes last: a run that resumes reads nothing without it, so that it reads all or nothing.
    """
    if not folder.is_dir():
        log.warning("Adacc: no policy saved, since there is no %s; a run that resumes will profile again", folder)
        return
    write_json(folder / STATE_FILE, saved.to_json())
    for number, size_policy in reversed(list(enumerate(saved.shape_policies, start=1))):
        size_policy.save(folder, number)


def load_from_checkpoint(folder: str | Path, memory_budget: str | float | int) -> Saved | None:
    """What the run that wrote the checkpoint `folder` had; None if it had no policy, or one for another budget or
    another number of ranks.

    Raises PolicyMismatchError or AdaccError for a damaged file, FileNotFoundError for one that is missing.
    """
    folder = Path(folder)
    if not (folder / POLICY_FILE).is_file():
        return None
    try:
        saved = _load(folder)
    except (AdaccError, FileNotFoundError) as error:
        raise type(error)(
            f"{error}. To have the resumed run profile again, delete {POLICY_FILE} and {PROFILE_FILE} in {folder}"
        ) from error
    solved_for = dict(saved.shape_policies[0].policy.facts).get("memory_budget", memory_budget)
    earlier = solved_for if saved.memory_budget is None else saved.memory_budget
    if earlier != memory_budget:
        log.info("Adacc: %s was solved for memory_budget=%r, not %r: solving anew", folder, earlier, memory_budget)
        return None
    if saved.num_ranks != num_ranks():
        log.info("Adacc: %s was written by %d ranks, not %d: profiling anew", folder, saved.num_ranks, num_ranks())
        return None
    return saved


def _load(folder: Path) -> Saved:
    if not (folder / STATE_FILE).is_file():
        return Saved(shape_policies=[SavedSizePolicy.load(folder, 1, {})])
    record = read_json(folder / STATE_FILE, AdaccError, "state")
    try:
        if record["version"] != STATE_VERSION:
            raise AdaccError(f"{folder / STATE_FILE} has format version {record['version']!r}, not {STATE_VERSION}")
        return Saved.load(folder, record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AdaccError(f"{folder / STATE_FILE} is damaged ({type(error).__name__}: {error})") from error


def _switched_off(record: dict[str, Any], shape_policies: list[SavedSizePolicy]) -> list[SwitchedOff]:
    if "switched_off" in record:
        return [(block, activation, codec) for block, activation, codec in record["switched_off"]]
    # Older checkpoints name blocks whose kinds were not compressed with loss at all.
    profiles = [size_policy.profile for size_policy in shape_policies if size_policy.profile is not None]
    blocks = record["exact_blocks"]
    return sorted(set().union(*(in_all_blocks(profile, lossy_options(profile, blocks)) for profile in profiles)))


def _numbered(name: str, number: int) -> str:
    """("adacc_policy.json", 2) -> "adacc_policy_2.json"."""
    return name if number == 1 else name.replace(".json", f"_{number}.json")
