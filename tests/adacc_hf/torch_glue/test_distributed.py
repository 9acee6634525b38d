"""Agreement between ranks: alone, and with two gloo processes. This file is also the script of these processes."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_runs import run_forked

from adacc_hf import Profile
from adacc_hf.artifacts.errors import InfeasibleBudgetError, RankFailedError
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.distributed import broadcast_from_first_rank, common_profile, fail_together, num_ranks


class UnsendableError(RuntimeError):
    """An error that cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.where = lambda: None


def raising(error: Exception):
    def make():
        raise error

    return make


def run_rank(rank: int, folder: Path) -> None:
    """Run one of the two processes. A failed assert fails the process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    assert num_ranks() == 2
    profiles = [Profile.load(folder / f"profile{index}.json") for index in range(2)]
    check_least(rank, profiles)
    check_result(rank, profiles[0])
    check_errors(rank)
    dist.destroy_process_group()


def check_least(rank: int, profiles) -> None:
    common = common_profile(profiles[rank])
    assert common.available_bytes == 1000
    assert common == replace(profiles[0], available_bytes=1000)


def check_result(rank: int, profile) -> None:
    solver_calls = []

    def solve():
        solver_calls.append(rank)
        return uniform_policy(profile, "recompute")

    assert broadcast_from_first_rank(solve) == uniform_policy(profile, "recompute")
    assert solver_calls == ([0] if rank == 0 else [])
    assert broadcast_from_first_rank(lambda: None if rank == 0 else 1 / 0) is None


def check_errors(rank: int) -> None:
    with pytest.raises(InfeasibleBudgetError, match="too small") as error_info:
        broadcast_from_first_rank(raising(InfeasibleBudgetError("too small", 7)))
    assert error_info.value.smallest_budget_bytes == 7
    message = "rank 0 failed with UnsendableError: odd"
    kind, message = (UnsendableError, "^odd$") if rank == 0 else (RankFailedError, message)
    with pytest.raises(kind, match=message):
        broadcast_from_first_rank(raising(UnsendableError("odd")))
    memory = pytest.raises(torch.OutOfMemoryError, match=r"^rank 1 failed with OutOfMemoryError: full$")
    with memory, fail_together():
        raise (UnsendableError("odd"), torch.OutOfMemoryError("full"))[rank]


def test_a_digest_tells_actions_apart_and_nothing_else(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=2)
    policies = [uniform_policy(profile, action) for action in ("retain", "compress", "recompute")]
    assert len({policy.digest for policy in policies}) == 3
    other = replace(policies[0], predicted_overhead_ms=9.0, facts=(("seconds", 1.0),))
    assert other.digest == policies[0].digest
    assert replace(policies[0], head="chunked").digest != policies[0].digest


def test_two_ranks_agree(tmp_path, profile_of, tape_builder):
    tape = tape_builder()
    tape.operator("mul", [tape.value("input", 4)], [("out", 4)], 1.0, save=[-1])
    for index, size in enumerate((3000, 1000)):
        profile_of([tape.kind()], [0], available_bytes=size, static_bytes=64 * (index + 1)).save(
            tmp_path / f"profile{index}.json"
        )
    process = run_forked(__file__, str(tmp_path), num_ranks=2, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr


if __name__ == "__main__":
    run_rank(int(os.environ["RANK"]), Path(sys.argv[1]))
