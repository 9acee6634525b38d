"""Small models and batches to measure on: bytes of the standard library's text, nothing to download."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel

from adacc_hf.eval.trials.families import FAMILIES, Batch, Size

TEXT_BYTES = 4 * 2**20
"""How much text is read: a demo model sees a fraction of it in a few hundred steps."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with random weights and the size of its batches. All else is the default of its configuration."""

    width: int
    layers: int
    """Transformer blocks in all; a T5 has half of them in its encoder."""
    batch: int
    tokens: int
    heads: int = 4
    attention: str = "sdpa"
    vocabulary: int = 256
    """Tokens are bytes, so at least 256."""
    family: str = "gpt2"
    """A key of FAMILIES. All but LLaMA have dropout 0.1."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r} is none of {', '.join(FAMILIES)}: choose one of them")

    def __str__(self) -> str:
        return (
            f"width {self.width} x {self.layers} layers x batch {self.batch} x {self.tokens} tokens, {self.attention}"
        )

    def model(self, device: str = "cpu", seed: int = 0) -> PreTrainedModel:
        """The model in train mode; weights depend on the seed alone, torch's generator is left as it was."""
        return FAMILIES[self.family].model(self.size, self.attention, device, seed)

    @property
    def size(self) -> Size:
        """What a family needs to know of it."""
        return Size(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            vocabulary=self.vocabulary,
            batch=self.batch,
            tokens=self.tokens,
        )

    def batches(self, device: str = "cpu", seed: int = 0) -> Iterator[Batch]:
        """Batches without end, [B, T] ids and labels at random places of the text."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            ids = random_text(self.batch, self.tokens, generator).to(device)
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


def random_text(batch: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Draw ids [batch, tokens]: bytes of the library's text, each row from a random place."""
    text = library_bytes()
    starts = torch.randint(len(text) - tokens, (batch,), generator=generator).tolist()
    return torch.stack([text[start : start + tokens] for start in starts]).long()
