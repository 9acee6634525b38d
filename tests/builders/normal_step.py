"""Script that trains a small GPT-2 for 24 steps. `run_forked` runs it, with counted times."""

import json
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from adacc_hf import AdaccCallback

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = tuple(f"{ROOT}/{folder}/" for folder in ("adacc_hf", "callbacks", "kernels"))
FIRST = 6
"""Number of the first step that counts. Steps with a profile take long under a profiler of Python."""
steps: list[set[str]] = []


class StepMarker(TrainerCallback):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        steps.append(set())
        if len(steps) == FIRST:
            sys.setprofile(note_file)


def note_file(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and steps:
        steps[-1].add(frame.f_code.co_filename)


NO_DROPOUT = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
"""No dropout, so that the policy has no use for masks as bits, which run the codecs' files too."""

torch.set_num_threads(1)
torch.manual_seed(0)
config = GPT2Config(n_layer=4, n_embd=64, n_head=4, n_positions=64, vocab_size=256, eos_token_id=0, **NO_DROPOUT)
model = GPT2LMHeadModel(config)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (64, 64))]
arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=24, per_device_train_batch_size=8, report_to="none", save_strategy="no",
    disable_tqdm=True, logging_steps=1000,
)  # fmt: skip
callbacks = [StepMarker(), AdaccCallback(memory_budget=0.4, actions=("retain", "recompute"))]
trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
trainer.train()
sys.setprofile(None)
print(json.dumps([sum(file.startswith(FOLDERS) for file in files) for files in steps[FIRST - 1 :]]))
