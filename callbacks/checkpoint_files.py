"""The policy and the profile that a run keeps beside its checkpoints, and in each of them."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import TrainerState, TrainingArguments

from adacc_hf.errors import AdaccError
from adacc_hf.policy import Policy
from adacc_hf.profile import Profile

log = logging.getLogger(__name__)

POLICY_FILE = "adacc_policy.json"
PROFILE_FILE = "adacc_profile.json"


def save_files(folder: str | Path, policy: Policy, profile: Profile | None) -> None:
    """Write both into `folder`, each whole or not at all."""
    if profile is not None:
        profile.save(Path(folder) / PROFILE_FILE)
    policy.save(Path(folder) / POLICY_FILE)


def save_in_checkpoint(args: TrainingArguments, state: TrainerState, policy: Policy, profile: Profile | None) -> None:
    """Write both into the checkpoint of the present step."""
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    if folder.is_dir():
        save_files(folder, policy, profile)
    else:
        log.warning("Adacc: no policy saved, since there is no %s; a run that resumes will profile again", folder)


def load_from_checkpoint(folder: str | Path, memory_budget: str | float | int) -> tuple[Policy, Profile | None] | None:
    """What the run that wrote the checkpoint `folder` had; None if it had no policy, or one for another budget.

    Raises PolicyMismatchError or AdaccError for a damaged file.
    """
    policy_file, profile_file = (Path(folder) / name for name in (POLICY_FILE, PROFILE_FILE))
    if not policy_file.is_file():
        return None
    try:
        policy = Policy.load(policy_file)
        profile = Profile.load(profile_file) if profile_file.is_file() else None
    except AdaccError as error:
        raise type(error)(
            f"{error}. To have the resumed run profile again, delete {POLICY_FILE} and {PROFILE_FILE} in {folder}"
        ) from error
    earlier = dict(policy.facts).get("memory_budget", memory_budget)
    if earlier != memory_budget:
        log.info("Adacc: %s was solved for memory_budget=%r, not %r: solving anew", policy_file, earlier, memory_budget)
        return None
    return policy, profile
