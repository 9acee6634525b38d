"""One small model of each of four families for measurements: GPT-2, LLaMA, T5 and BERT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    T5Config,
)

Batch = dict[str, torch.Tensor]

ATTENTIONS = ("sdpa", "eager")
PRECISIONS = ("fp32", "bf16")
"""Names of precisions. bf16 is autocast over float32 weights, as with the Trainer's `bf16=True`."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a family's model and of its batch. The vocabulary is small, so that the blocks determine the peak."""

    width: int = 128
    layers: int = 4
    """Number of transformer blocks. Half of a T5's blocks are in its encoder."""
    heads: int = 4
    vocabulary: int = 256
    batch: int = 4
    tokens: int = 128

    def example(self, device: str = "cpu", seed: int = 0) -> Batch:
        """Return random tokens with themselves as labels. The encoder-decoder reads the same tokens on both sides."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(5, self.vocabulary, (self.batch, self.tokens), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids.clone()}


def _gpt2(size: Size) -> PretrainedConfig:
    return GPT2Config(
        n_layer=size.layers,
        n_embd=size.width,
        n_head=size.heads,
        n_positions=size.tokens,
        vocab_size=size.vocabulary,
        bos_token_id=0,
        eos_token_id=0,
    )


def _llama(size: Size) -> PretrainedConfig:
    return LlamaConfig(**_llama_settings(size))


def _qwen3(size: Size) -> PretrainedConfig:
    return Qwen3Config(**_llama_settings(size), head_dim=size.width // size.heads)


def _llama_settings(size: Size) -> dict[str, Any]:
    """Return the settings that LLaMA and the models derived from it share."""
    return {
        "num_hidden_layers": size.layers,
        "hidden_size": size.width,
        "intermediate_size": 3 * size.width,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": size.tokens,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _t5(size: Size) -> PretrainedConfig:
    return T5Config(
        num_layers=size.layers // 2,
        num_decoder_layers=size.layers - size.layers // 2,
        d_model=size.width,
        d_ff=4 * size.width,
        num_heads=size.heads,
        d_kv=size.width // size.heads,
        vocab_size=size.vocabulary,
        decoder_start_token_id=0,  # type: ignore[call-arg]  # accepted by every configuration, but not declared
    )


def _bert(size: Size) -> PretrainedConfig:
    return BertConfig(
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_attention_heads=size.heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.tokens,
    )


@dataclass(frozen=True, kw_only=True)
class Family:
    """Maker of a family's configuration, and the model class."""

    config: Callable[[Size], PretrainedConfig]
    auto_class: type[AutoModelForCausalLM | AutoModelForSeq2SeqLM | AutoModelForMaskedLM]

    def model(self, size: Size, attention: str, device: str = "cpu", seed: int = 0) -> PreTrainedModel:
        """Return the model in train mode, with dropout if the family has it, without a cache of keys and values."""
        config = self.config(size)
        config.use_cache = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.auto_class.from_config(config, attn_implementation=attention)
        if self.auto_class is AutoModelForCausalLM:
            # Transformers cannot derive the loss from GPT2LMHeadModel's name: it would pick this default, with a
            # warning.
            model.loss_type = "ForCausalLM"
        return model.to(device).train()


QWEN3 = Family(config=_qwen3, auto_class=AutoModelForCausalLM)
"""A fifth family, for measurements of long sequences."""
FAMILIES = {
    "gpt2": Family(config=_gpt2, auto_class=AutoModelForCausalLM),
    "llama": Family(config=_llama, auto_class=AutoModelForCausalLM),
    "t5": Family(config=_t5, auto_class=AutoModelForSeq2SeqLM),
    "bert": Family(config=_bert, auto_class=AutoModelForMaskedLM),
}


@contextmanager
def in_precision(precision: str, device: str) -> Iterator[None]:
    """Enter one of PRECISIONS. Raise ValueError for another name."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown: choose from {', '.join(PRECISIONS)}")
    with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16"):
        yield
