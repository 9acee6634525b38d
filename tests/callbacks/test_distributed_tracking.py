"""Two gloo ranks whose data differ keep one policy while outliers move; this file is the script of each rank."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from adacc_hf import AdaccCallback

NUM_STEPS = 8
COMPRESS = {"actions": ("retain", "compress"), "min_compress_bytes": 4096, "memory_budget": 0.45, "tracking": 1}


class MoveOutliers(TrainerCallback):
    """Outlier channels that come and go, other ones on each rank: the weights differ, as data would have them differ.

    The rank's number is added, so that no rank finds the most channels at every step.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for block in model.transformer.h:
            block.ln_2.bias.data.zero_()[: (state.global_step + args.process_index) % 4] = 30.0


class NotePolicy(TrainerCallback):
    """The policy that each step ran under."""

    def __init__(self, adacc: AdaccCallback) -> None:
        self.adacc = adacc
        self.policies: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.policies.append(str(self.adacc.policy))


def run_rank(folder: Path) -> None:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("toys", Path(__file__).with_name("conftest.py"))
    toys = importlib.util.module_from_spec(spec)
    sys.modules["toys"] = toys
    spec.loader.exec_module(toys)
    adacc = AdaccCallback(**COMPRESS)
    noted = NotePolicy(adacc)
    trainer = Trainer(
        model=toys.tiny_model(),
        args=TrainingArguments(
            output_dir=str(folder / "run"),
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            max_steps=NUM_STEPS,
            logging_steps=1,
            per_device_train_batch_size=2,
            save_strategy="no",
            seed=3,
        ),
        train_dataset=toys.Tokens(),
        callbacks=[adacc, noted, MoveOutliers()],
    )
    trainer.train()
    found = {
        "policies": noted.policies,
        "history": [{k: v for k, v in e.items() if "_ms" not in k and "measured" not in k} for e in adacc.history],
    }
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


def test_ranks_with_different_data_keep_the_same_policy_at_every_step(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, __file__, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert one["policies"] == other["policies"]
    assert one["history"] == other["history"]
    changes = [event for event in one["history"] if event["event"] == "change"]
    assert len(changes) >= 3, "outliers move at every step"
    assert len(set(one["policies"])) > len(changes), "a policy before there is one, the first one, and the changed ones"
    assert max(max(e["num_outliers"].values()) for e in one["history"] if e["event"] == "tracking") >= 3


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
