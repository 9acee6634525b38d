"""Small models and batches for measurements: bytes of the standard library's text, without downloads."""

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
"""Length of the text. A demo model sees a fraction of it in a few hundred steps."""


@dataclass(frozen=True, kw_only=True)
class Workload(Size):
    """Model with random weights, and the size of its batches. Other settings are defaults of its configuration.

    Tokens are bytes, so the vocabulary has at least 256 entries.
    """

    attention: str = "sdpa"
    family: str = "gpt2"
    """Key of FAMILIES. All families but LLaMA have dropout 0.1."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r} is unknown: choose from {', '.join(FAMILIES)}")

    def __str__(self) -> str:
        return (
            f"width {self.width} x {self.layers} layers x batch {self.batch} x {self.tokens} tokens, {self.attention}"
        )

    def model(self, device: str = "cpu", seed: int = 0) -> PreTrainedModel:
        """Return the model in train mode. The weights depend on the seed alone. torch's generator keeps its state."""
        return FAMILIES[self.family].model(self, self.attention, device, seed)

    def batches(self, device: str = "cpu", seed: int = 0) -> Iterator[Batch]:
        """Yield batches without end: [B, T] ids and labels at random positions of the text."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            ids = random_text(self.batch, self.tokens, generator).to(device)
            yield {"input_ids": ids, "labels": ids.clone()}


DEMO = Workload(width=256, layers=6, batch=8, tokens=256, vocabulary=512)
"""The recipe's demo model, which is compute-bound."""


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
