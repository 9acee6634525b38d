"""Small GPT-2 models and batches to measure on: bytes of the standard library's text, nothing to download."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

Batch = dict[str, torch.Tensor]

TEXT_BYTES = 4 * 2**20
"""How much text is read: a demo model sees a fraction of it in a few hundred steps."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A GPT-2 with random weights and the size of its batches. All else is GPT2Config's default: dropout is 0.1."""

    width: int
    layers: int
    batch: int
    tokens: int
    heads: int = 4
    attention: str = "sdpa"
    vocabulary: int = 256
    """Tokens are bytes, so at least 256."""

    def __str__(self) -> str:
        return (
            f"width {self.width} x {self.layers} layers x batch {self.batch} x {self.tokens} tokens, {self.attention}"
        )

    def model(self, device: str = "cpu", seed: int = 0) -> PreTrainedModel:
        """The model in train mode; weights depend on the seed alone, torch's generator is left as it was."""
        config = GPT2Config(
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            n_positions=self.tokens,
            vocab_size=self.vocabulary,
            # GPT2Config's own end of text lies outside a small vocabulary.
            bos_token_id=None,
            eos_token_id=None,
            # As in training: a cache of keys and values costs time, and checkpointing switches it off.
            use_cache=False,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=self.attention)
        # Transformers cannot tell it from GPT2LMHeadModel's name: it takes this one, and warns.
        model.loss_type = "ForCausalLM"
        return model.to(device).train()

    def batches(self, device: str = "cpu", seed: int = 0) -> Iterator[Batch]:
        """Batches without end, [B, T] ids and labels at random places of the text."""
        text = library_bytes()
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(text) - self.tokens, (self.batch,), generator=generator)
            ids = torch.stack([text[start : start + self.tokens] for start in starts.tolist()]).long().to(device)
            yield {"input_ids": ids, "labels": ids.clone()}


DEMO = Workload(width=256, layers=6, batch=8, tokens=256, vocabulary=512)
"""The recipe's demo model: bound by arithmetic."""

LAUNCH_BOUND = Workload(width=32, layers=12, batch=2, tokens=16)
"""Operators so small that calling them is what takes the time."""


@cache
def library_bytes() -> torch.Tensor:
    """uint8 [TEXT_BYTES]: the running Python's own modules, in alphabetical order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8)
