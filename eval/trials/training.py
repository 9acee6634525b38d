"""Training with the Trainer on the bytes of a text, with validation losses along the way."""

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
from adacc_hf.eval.trials.model_under_test import Subject, library_bytes

HELD_OUT = 0.1
"""Fraction of the text, at its end, that is used for validation only."""

SAVED_AFTER_STEPS = 200
"""Steps between checkpoints. Shorter trainings save no checkpoint: after an interruption, they start again."""


class ByteSequences(Dataset[dict[str, torch.Tensor]]):
    """Data set of `count` sequences of bytes at positions of the text that depend on the seed. Labels equal inputs."""

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
    """Return training text and validation text in uint8. Raise ValueError if the file is too short for training."""
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
    """Train once. Return the validation losses [(step, loss)], and the training losses.

    `folder` has the Trainer's checkpoints, from which an interrupted training resumes. The folder is deleted at the
    end.
    """
    torch.set_num_threads(threads)
    trial_subject = Subject(**subject)
    training, validation = read_text(text, trial_subject.tokens)
    callbacks, overrides = method_callbacks(method, str(budget))
    torch.manual_seed(trial_subject.seed)
    trainer = Trainer(
        model=trial_subject.model(),
        args=_arguments(trial_subject, folder, steps, eval_every, learning_rate, overrides),
        train_dataset=ByteSequences(training, trial_subject.tokens, steps * trial_subject.batch, trial_subject.seed),
        eval_dataset=ByteSequences(validation, trial_subject.tokens, eval_sequences, trial_subject.seed + 1),
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
