"""Training by the Trainer on the bytes of a text, and the validation losses on the way."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from adacc_hf.callbacks.paper_methods import method_callbacks
from adacc_hf.eval.records.records import Figures
from adacc_hf.eval.trials.model_under_test import Subject
from adacc_hf.eval.trials.workload import library_bytes

HELD_OUT = 0.1
"""Share of the text, its end, that is for validation alone."""

SAVED_AFTER_STEPS = 200
"""Shorter trainings are not worth a checkpoint on the way: they are started anew."""


class ByteSequences(Dataset[dict[str, torch.Tensor]]):
    """`count` sequences of bytes at places of the text that depend on the seed; labels are the inputs."""

    def __init__(self, text: torch.Tensor, tokens: int, count: int, seed: int) -> None:
        self.text, self.tokens = text, tokens
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(text) - tokens + 1, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.text[self.starts[index] : self.starts[index] + self.tokens].long()
        return {"input_ids": ids, "labels": ids.clone()}


def read_text(path: str | None, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 training text and validation text. Raises ValueError for a file too short to train on."""
    text = library_bytes() if path is None else torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    split = int(len(text) * (1.0 - HELD_OUT))
    if min(split, len(text) - split) < tokens:
        raise ValueError(f"--text={path} has {len(text)} bytes, too few for --tokens={tokens}: pass more text")
    return text[:split], text[split:]


def train_curve(
    subject: Figures,
    method: str,
    folder: str,
    steps: int,
    eval_every: int,
    eval_sequences: int,
    learning_rate: float,
    budget: str | float | int,
    text: str | None = None,
    threads: int = 1,
) -> Figures:
    """The validation losses of one training, [(step, loss)], and its last training loss.

    `folder` holds the Trainer's checkpoints, from which a training that was cut short goes on; it is gone at the end.
    """
    torch.set_num_threads(threads)
    what = Subject(**subject)
    training, validation = read_text(text, what.tokens)
    callbacks, overrides = method_callbacks(method, str(budget))
    torch.manual_seed(what.seed)
    trainer = Trainer(
        model=what.model(),
        args=_arguments(what, folder, steps, eval_every, learning_rate, overrides),
        train_dataset=ByteSequences(training, what.tokens, steps * what.batch, what.seed),
        eval_dataset=ByteSequences(validation, what.tokens, eval_sequences, what.seed + 1),
        callbacks=callbacks,
    )
    checkpoint = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    trainer.train(resume_from_checkpoint=checkpoint)
    figures = {"curve": logged(trainer, "eval_loss"), "training_curve": logged(trainer, "loss")}
    shutil.rmtree(folder, ignore_errors=True)
    return figures


def _arguments(
    subject: Subject, folder: str, steps: int, eval_every: int, learning_rate: float, overrides: dict[str, Any]
) -> TrainingArguments:
    is_long = steps > SAVED_AFTER_STEPS
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=subject.batch,
        per_device_eval_batch_size=subject.batch,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(steps // 5, 500),
        adam_beta2=0.95,
        weight_decay=0.1,
        eval_strategy="steps",
        eval_steps=eval_every,
        logging_steps=eval_every,
        save_strategy="steps" if is_long else "no",
        save_steps=max(SAVED_AFTER_STEPS // eval_every, 1) * eval_every,
        save_total_limit=1,
        seed=subject.seed,
        bf16=subject.precision == "bf16",
        use_cpu=subject.device == "cpu",
        dataloader_pin_memory=subject.device != "cpu",
        report_to="none",
        disable_tqdm=True,
        **overrides,
    )


def logged(trainer: Trainer, name: str) -> Sequence[tuple[int, float]]:
    return [(int(entry["step"]), entry[name]) for entry in trainer.state.log_history if name in entry]
