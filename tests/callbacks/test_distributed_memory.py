"""One of two gloo ranks runs out of memory while it profiles; this file is the script of each rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import adacc_hf.adapt.policy_builder as builder_module
import adacc_hf.adapt.run_profiler as profiler_module
from adacc_hf import AdaccCallback, profile_model
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.profile_cache import CachingMeasurement
from adacc_hf.torch_glue.distributed import end_process_if_out_of_memory

MESSAGE = "rank out of memory. Tried to allocate 7 GiB"


def fail_on_rank_1(original: Any, number: int) -> Any:
    """`original`, whose `number`-th call on rank 1 finds no memory."""
    calls = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == number:
            raise torch.OutOfMemoryError(MESSAGE)
        return original(*args, **kwargs)

    return call


def failing(name: str, number: int) -> Any:
    """The function `name` that profiles, whose `number`-th call on rank 1 finds no memory."""
    return mock.patch.object(profiler_module, name, fail_on_rank_1(getattr(profiler_module, name), number))


def first_profile(toys: Any, folder: Path) -> str:
    """The error that a run ends with."""
    trainer = toys.tiny_trainer(folder, [AdaccCallback(**toys.LOSSLESS)], per_device_train_batch_size=2)
    with failing("estimate_profile", 1), pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    return str(caught.value)


def smaller_batch(toys: Any, folder: Path) -> dict[str, Any]:
    """What Accelerate makes of the same error: both ranks begin anew with fewer samples."""
    callback = AdaccCallback(**toys.LOSSLESS)
    trainer = toys.tiny_trainer(folder, [callback], per_device_train_batch_size=4, auto_find_batch_size=True)
    with failing("estimate_profile", 1):
        trainer.train()
    has_policy = callback.policy is not None
    return {"steps": trainer.state.global_step, "batch": trainer._train_batch_size, "has_policy": has_policy}


def later_profile(toys: Any, folder: Path) -> dict[str, Any]:
    """What a run does whose second size of batch cannot be profiled on one rank."""
    from test_controller import InOrder, run_lengths

    callback = AdaccCallback(**toys.LOSSLESS)

    def make(callbacks: Any, **settings: Any) -> Any:
        return toys.tiny_trainer(folder, callbacks, per_device_train_batch_size=2, **settings)

    late = mock.patch.object(builder_module.PolicyBuilder, "before_first_step", return_value=None)
    with late, failing("profile_model", 2):
        trainer = run_lengths(make, [16] * 4 + [32] * 16, [callback], trainer_class=InOrder)
    reasons = [event["reason"] for event in callback.history if event["event"] == "memory" and "reason" in event]
    return {"steps": trainer.state.global_step, "reasons": reasons}


def sharded(toys: Any, name: str) -> str:
    """The error of profiling under FSDP2 when memory runs out in the reading `name`, as the callback would see it."""
    model = toys.tiny_model().train()
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model.transformer.h, model):
        fully_shard(module, mesh=mesh)
    ids = torch.zeros(2, 8, dtype=torch.long)
    failing = mock.patch.object(CachingMeasurement, name, fail_on_rank_1(getattr(Measurement, name), 1))
    try:
        with failing, end_process_if_out_of_memory():
            profile_model(model, {"input_ids": ids, "labels": ids})
    except torch.OutOfMemoryError as error:
        return str(error)
    return "none"


def run_rank(folder: Path) -> None:
    import conftest as toys  # a script's own folder is where it imports from

    torch.set_num_threads(1)
    found: dict[str, Any] = {
        test.__name__: test(toys, folder / "run") for test in (first_profile, smaller_batch, later_profile)
    }
    found["verify"] = sharded(toys, "verify")
    toys.leave_what_was_found(folder, found)


def run_until_it_ends() -> None:
    import conftest as toys

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sharded(toys, "backward")


def test_all_ranks_hear_of_one_that_has_no_memory_to_profile_in(run_two_ranks) -> None:
    for found in run_two_ranks(__file__):
        assert found["first_profile"].startswith(f"rank 1: OutOfMemoryError: {MESSAGE}")
        assert "was profiling a batch of input_ids 2x32, labels 2x32" in found["first_profile"]
        assert found["smaller_batch"] == {"steps": 5, "batch": 3, "has_policy": True}, "nine tenths of 4"
        reason = "input_ids 2x32, labels 2x32: there is no memory to profile them in"
        assert found["later_profile"] == {"steps": 20, "reasons": [reason]}
        assert found["verify"] == f"rank 1: OutOfMemoryError: {MESSAGE}"


def test_a_rank_whose_parts_others_wait_for_ends_and_the_launcher_stops_them(tmp_path) -> None:
    """Backward gathers parameters: no word can be sent from its midst."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, __file__], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "RankFailedError: rank 1 ran out of memory where the other ranks wait for its part" in done.stderr


if __name__ == "__main__":
    run_rank(Path(sys.argv[1])) if len(sys.argv) > 1 else run_until_it_ends()
