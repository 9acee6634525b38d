"""AdaccLightningCallback with two gloo ranks under Lightning's DDP. This file is also the script that the ranks run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")


def train_both(folder: Path, accumulate: int) -> dict[str, Any]:
    """Train with and without the callback, and resume a run. Return this rank's comparison."""
    import test_lightning as toys  # a script imports from its own folder only
    import torch
    from torch.utils.data import DataLoader

    def fit(callbacks: list[Any], max_steps: int = 6, ckpt_path: Path | None = None) -> tuple[Any, Any]:
        settings = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": accumulate, "max_steps": max_steps}
        module, trainer = toys.Module(), toys.make_lightning_trainer(folder, callbacks, **settings)
        torch.manual_seed(1)
        trainer.fit(module, DataLoader(toys.batches(24), batch_size=None), ckpt_path=ckpt_path)
        return module, trainer

    plain, _ = fit([])
    callback, resumed = (toys.AdaccLightningCallback(**toys.HALF) for _ in range(2))
    module, trainer = fit([callback])
    trainer.save_checkpoint(folder / "six.ckpt")
    fit([resumed], max_steps=8, ckpt_path=folder / "six.ckpt")
    weights = plain.state_dict()
    return {
        "is_equal": module.losses == plain.losses
        and all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items()),
        "policy": callback.policy.digest,
        "resumed_policy": resumed.policy.digest,
        "policy_steps": [event["step"] for event in resumed.history if event["event"] == "policy"],
        "recomputed": callback.policy.action_counts()["recompute"],
    }


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_train_as_without_the_callback(tmp_path, accumulate):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(accumulate)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-8000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["is_equal"]
    assert first["recomputed"] > 0
    assert first["resumed_policy"] == first["policy"]
    assert first["policy_steps"] == [2, 8]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    result = train_both(folder, int(sys.argv[2]))
    rank = os.environ.get("LOCAL_RANK", "0")  # Lightning starts this script again for the second rank
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
