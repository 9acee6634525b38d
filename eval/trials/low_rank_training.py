"""One training of a small LLaMA on bytes by an optimizer of low rank. Runs in a process of its own."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adacc_hf.eval.records.records import Figures
from adacc_hf.eval.trials.low_rank import METHODS, StepPeak
from adacc_hf.eval.trials.training import ByteSequences, logged, read_text

MEASURED_STEP = 30
"""Adacc has its policy by then, and no method draws a subspace."""


@dataclass(frozen=True, kw_only=True)
class TextScale:
    """The model and its training."""

    width: int = 192
    inner: int = 512
    layers: int = 4
    heads: int = 4
    batch: int = 8
    tokens: int = 64
    steps: int = 1000
    eval_every: int = 200
    eval_sequences: int = 128

    def model(self, seed: int) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=self.tokens,
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()


def train_on_text(scale: Figures, method: str, rate: float, seed: int, threads: int = 1) -> Figures:
    """Validation losses [(step, loss)] of one training, the peak bytes of one of its steps, and its parameters."""
    torch.set_num_threads(threads)
    what = TextScale(**scale)
    training, validation = read_text(None, what.tokens)
    peak = StepPeak(min(MEASURED_STEP, what.steps))
    model = what.model(seed)
    # The held-out sequences are the same for all seeds.
    held_out = ByteSequences(validation, what.tokens, what.eval_sequences, 0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = METHODS[method].trainer(
            model,
            folder,
            data=ByteSequences(training, what.tokens, what.steps * what.batch, seed),
            held_out=held_out,
            callbacks=[peak],
            learning_rate=rate,
            **_arguments(what, seed),
        )
        trainer.train()
    return {
        "curve": logged(trainer, "eval_loss"),
        "peak_bytes": peak.peak_bytes,
        "parameters": sum(p.numel() for p in what.model(seed).parameters()),
    }


def _arguments(scale: TextScale, seed: int) -> dict[str, Any]:
    return {
        "max_steps": scale.steps,
        "per_device_train_batch_size": scale.batch,
        "per_device_eval_batch_size": 32,
        "lr_scheduler_type": "cosine",
        "warmup_steps": scale.steps // 10,
        "eval_strategy": "steps",
        "eval_steps": scale.eval_every,
        "logging_steps": scale.eval_every,
        "save_strategy": "no",
        "seed": seed,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
