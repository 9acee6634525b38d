"""Small models and batches to measure on: bytes of the standard library's text, nothing to download."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
)

Batch = dict[str, torch.Tensor]

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
    """A key of FAMILIES. GPT-2 and T5 have dropout 0.1, LLaMA none."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r} is none of {', '.join(FAMILIES)}: choose one of them")

    def __str__(self) -> str:
        return (
            f"width {self.width} x {self.layers} layers x batch {self.batch} x {self.tokens} tokens, {self.attention}"
        )

    def model(self, device: str = "cpu", seed: int = 0) -> PreTrainedModel:
        """The model in train mode; weights depend on the seed alone, torch's generator is left as it was."""
        config = FAMILIES[self.family](self)
        # As in training: a cache of keys and values costs time, and checkpointing switches it off.
        config.use_cache = False
        auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto_class.from_config(config, attn_implementation=self.attention)
        if not config.is_encoder_decoder:
            # Transformers cannot tell it from the name of every class: it takes this one, and warns.
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


def _gpt2(workload: Workload) -> PretrainedConfig:
    return GPT2Config(
        n_embd=workload.width,
        n_layer=workload.layers,
        n_head=workload.heads,
        n_positions=workload.tokens,
        vocab_size=workload.vocabulary,
        # GPT2Config's own end of text lies outside a small vocabulary.
        bos_token_id=None,
        eos_token_id=None,
    )


def _llama(workload: Workload) -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=workload.width,
        # As published: two thirds of four times the width, since the gate has a matrix of its own.
        intermediate_size=8 * workload.width // 3,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.heads,
        max_position_embeddings=workload.tokens,
        vocab_size=workload.vocabulary,
        bos_token_id=None,
        eos_token_id=None,
    )


def _t5(workload: Workload) -> PretrainedConfig:
    return T5Config(
        d_model=workload.width,
        d_kv=workload.width // workload.heads,
        d_ff=4 * workload.width,
        num_layers=workload.layers // 2,
        num_decoder_layers=workload.layers - workload.layers // 2,
        num_heads=workload.heads,
        vocab_size=workload.vocabulary,
        decoder_start_token_id=0,
    )


FAMILIES: dict[str, Callable[[Workload], PretrainedConfig]] = {"gpt2": _gpt2, "llama": _llama, "t5": _t5}

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
