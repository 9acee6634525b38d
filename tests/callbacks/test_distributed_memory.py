"""One of two gloo ranks runs out of memory while it profiles. This file is also the script of the ranks."""

from __future__ import annotations

import os
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
from adacc_hf.price.caching_measurement import CachingMeasurement
from adacc_hf.price.measurement import Measurement
from adacc_hf.torch_glue.distributed import end_process_if_out_of_memory

MESSAGE = "rank out of memory. Tried to allocate 7 GiB"


def fail_on_rank_1(original: Any, number: int) -> Any:
    """Return `original` wrapped so that its `number`-th call on rank 1 runs out of memory."""
    calls = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == number:
            raise torch.OutOfMemoryError(MESSAGE)
        return original(*args, **kwargs)

    return call


def failing(name: str, number: int) -> Any:
    """Return a patch of the profiling function `name`: its `number`-th call on rank 1 runs out of memory."""
    return mock.patch.object(profiler_module, name, fail_on_rank_1(getattr(profiler_module, name), number))


def first_profile(toys: Any, folder: Path) -> str:
    """Return the text of the error that ends the run."""
    trainer = toys.tiny_trainer(folder, [AdaccCallback(**toys.LOSSLESS)], per_device_train_batch_size=2)
    with failing("estimate_profile", 1), pytest.raises(torch.OutOfMemoryError) as error_info:
        trainer.train()
    return str(error_info.value)


def smaller_batch(toys: Any, folder: Path) -> dict[str, Any]:
    """Return the outcome of Accelerate's retry: both ranks restart with fewer samples."""
    callback = AdaccCallback(**toys.LOSSLESS)
    trainer = toys.tiny_trainer(folder, [callback], per_device_train_batch_size=4, auto_find_batch_size=True)
    with failing("estimate_profile", 1):
        trainer.train()
    has_policy = callback.policy is not None
    return {"steps": trainer.state.global_step, "batch": trainer._train_batch_size, "has_policy": has_policy}


def later_profile(toys: Any, folder: Path) -> dict[str, Any]:
    """Return the outcome of a run whose second batch size cannot be profiled on one rank."""
    from run_builders import InOrder, run_lengths

    callback = AdaccCallback(**toys.LOSSLESS)

    def make(callbacks: Any, **settings: Any) -> Any:
        return toys.tiny_trainer(folder, callbacks, per_device_train_batch_size=2, **settings)

    late_policy = mock.patch.object(builder_module.PolicyBuilder, "before_first_step", return_value=None)
    with late_policy, failing("profile_batch", 2):
        trainer = run_lengths(make, [16] * 4 + [32] * 16, [callback], trainer_class=InOrder)
    reasons = [event["reason"] for event in callback.history if event["event"] == "memory" and "reason" in event]
    return {"steps": trainer.state.global_step, "reasons": reasons}


def sharded(toys: Any, name: str) -> str:
    """Return the error of profiling under FSDP2 if memory runs out in the reading `name`, as the callback receives
    it."""
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
    import trainer_builders as toys

    torch.set_num_threads(1)
    results: dict[str, Any] = {
        test.__name__: test(toys, folder / "run") for test in (first_profile, smaller_batch, later_profile)
    }
    results["verify"] = sharded(toys, "verify")
    toys.write_rank_results(folder, results)


def run_backward_shards() -> None:
    import trainer_builders as toys

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sharded(toys, "backward")


def test_all_ranks_hear_of_one_that_has_no_memory_to_profile_in(run_two_ranks) -> None:
    for results in run_two_ranks(__file__):
        assert results["first_profile"].startswith(f"rank 1: OutOfMemoryError: {MESSAGE}")
        assert "was profiling a batch of input_ids 2x32, labels 2x32" in results["first_profile"]
        assert results["smaller_batch"] == {"steps": 5, "batch": 3, "has_policy": True}, "nine tenths of 4"
        reason = "input_ids 2x32, labels 2x32: there is not enough memory to profile them"
        assert results["later_profile"] == {"steps": 20, "reasons": [reason]}
        assert results["verify"] == f"rank 1: OutOfMemoryError: {MESSAGE}"


def test_a_rank_whose_parts_others_wait_for_ends_and_the_launcher_stops_them(tmp_path) -> None:
    """Backward gathers parameters, and a rank in the middle of it cannot notify the others."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    builders = Path(__file__).parents[1] / "builders"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(builders), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run([*torchrun, __file__], capture_output=True, text=True, timeout=280, env=environment)
    assert process.returncode != 0
    assert "RankFailedError: rank 1 ran out of memory while the other ranks wait for its part" in process.stderr


if __name__ == "__main__":
    run_rank(Path(sys.argv[1])) if len(sys.argv) > 1 else run_backward_shards()
