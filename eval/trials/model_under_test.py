"""Subject of a trial: a model by preset, its batch of the standard library's text, its precision and training step."""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adacc_hf.estimate.presets import checked_seq_len, context_length, fresh_model, load_config
from adacc_hf.eval.records.command_line import positive_int
from adacc_hf.torch_glue.memory import backward, forward_loss

Batch = dict[str, torch.Tensor]

TEXT_BYTES = 4 * 2**20
"""Length of the text. A demo model sees a fraction of it in a few hundred steps."""
PRECISIONS = ("fp32", "bf16")
LONGEST_DEFAULT = 1024
"""Default tokens per sequence, as for the paper's GPT models. Models with a shorter context get their context
length."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Model and its batch. All trials of one subject have the same weights and tokens."""

    preset: str
    """Name of a preset, or hub id or folder of a config."""
    batch: int
    tokens: int
    device: str = "cpu"
    precision: str = "fp32"
    """fp32, or bf16: float32 weights under autocast."""
    attention: str = "sdpa"
    seed: int = 0

    def model(self) -> PreTrainedModel:
        """Return the model in train mode. The weights depend on the seed alone. torch's generator keeps its state."""
        config = load_config(self.preset)
        # As in training: a cache of keys and values costs time, and checkpointing disables it.
        config.use_cache = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = fresh_model(config, self.attention)
        if not config.is_encoder_decoder:
            model.loss_type = "ForCausalLM"
        # Transformers' decorator around `to` has a type without self.
        return model.to(self.device).train()  # type: ignore[arg-type]

    def example(self) -> Batch:
        """Return [B, T] ids and labels: bytes of the standard library's text, from positions that depend on the
        seed."""
        ids = random_text(self.batch, self.tokens, torch.Generator().manual_seed(self.seed)).to(self.device)
        return {"input_ids": ids, "labels": ids.clone()}

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager of the forward pass."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16)

    def loss(self, model: nn.Module | Callable[..., Any], batch: Batch) -> torch.Tensor:
        with self.autocast():
            return forward_loss(model, batch)

    def train_step(self, model: nn.Module | Callable[..., Any], batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        """Run forward, backward and optimizer step."""
        backward(self.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Add the options that define a subject, except its batch size."""
    parser.add_argument("--preset", default="demo", help="preset, or hub id or folder of a config (default: demo)")
    parser.add_argument(
        "--tokens",
        type=positive_int,
        help=f"tokens per sequence (default: the model's context, at most {LONGEST_DEFAULT})",
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="bf16 is autocast over fp32 weights")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")


def subject_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a Subject from the command line. Raise ValueError for options that the preset does not
    support."""
    config = load_config(arguments.preset)
    longest = context_length(config) or LONGEST_DEFAULT
    tokens = checked_seq_len(min(longest, LONGEST_DEFAULT) if arguments.tokens is None else arguments.tokens, config)
    return {
        "preset": arguments.preset,
        "tokens": tokens,
        "device": arguments.device,
        "precision": arguments.precision,
        "attention": arguments.attention,
        "seed": arguments.seed,
    }


@cache
def library_bytes() -> torch.Tensor:
    """Return uint8 [TEXT_BYTES]: the running Python's own modules, in alphabetical order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8)


def random_text(batch: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Draw ids [batch, tokens]: bytes of the library's text, each row from a random position."""
    text = library_bytes()
    starts = torch.randint(len(text) - tokens, (batch,), generator=generator).tolist()
    return torch.stack([text[start : start + tokens] for start in starts]).long()


def first_sequences(batch: Batch, count: int) -> Batch:
    """Return the first `count` rows of every tensor."""
    return {name: tensor[:count] for name, tensor in batch.items()}
