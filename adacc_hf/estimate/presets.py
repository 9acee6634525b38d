"""Model sizes by name: the GPT models of the paper's Table 3, LLaMA, T5 and small demos. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def _gpt2(**sizes: Any) -> dict[str, Any]:
    # The tokenizer sets the special token ids. GPT2Config's default id would lie outside a small vocabulary.
    tokens = {"bos_token_id": None, "eos_token_id": None}
    return {"model_type": "gpt2", "n_positions": 1024, "vocab_size": 50257, **tokens, **sizes}


def _llama(**sizes: Any) -> dict[str, Any]:
    tokens = {"bos_token_id": None, "eos_token_id": None}
    shape = {"max_position_embeddings": 4096, "vocab_size": 128_256, "tie_word_embeddings": True}
    return {"model_type": "llama", **shape, **tokens, **sizes}


def _t5(**sizes: Any) -> dict[str, Any]:
    return {"model_type": "t5", "d_kv": 64, "vocab_size": 32_128, "decoder_start_token_id": 0, **sizes}


PRESETS: dict[str, dict[str, Any]] = {
    # 4.9 million parameters. With a vocabulary of 2048 instead of 512 the loss did not fall within a hundred steps.
    "demo": _gpt2(n_layer=6, n_embd=256, n_head=4, n_positions=256, vocab_size=512),
    # OpenAI's names count 117 and 345 million parameters. With the embeddings counted in full, there are 124.4 and
    # 354.8 million.
    "gpt2-117m": _gpt2(n_layer=12, n_embd=768, n_head=12),
    "gpt2-345m": _gpt2(n_layer=24, n_embd=1024, n_head=16),
    # The paper gives only the total, 4.7 billion; 40 layers of width 3072 make 4.69 billion.
    "gpt2-4.7b": _gpt2(n_layer=40, n_embd=3072, n_head=24),
    # Llama 3.2 1B, as published: 1.24 billion.
    "llama-1b": _llama(
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    # LLaMA-3 8B and 70B, as published: 8.03 and 70.6 billion.
    "llama3-8b": _llama(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    ),
    "llama3-70b": _llama(
        num_hidden_layers=80,
        hidden_size=8192,
        intermediate_size=28_672,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    ),
    # T5 11B, as published: 11.3 billion, in feed-forward layers of 64 times the width.
    "t5-11b": _t5(num_layers=24, d_model=1024, d_ff=65_536, num_heads=128, d_kv=128),
    # T5 Base, as published: 222.9 million.
    "t5-base": _t5(num_layers=12, d_model=768, d_ff=3072, num_heads=12),
    "demo-llama": _llama(
        num_hidden_layers=6,
        hidden_size=256,
        intermediate_size=688,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        vocab_size=512,
    ),
    "demo-t5": _t5(num_layers=3, d_model=256, d_ff=1024, num_heads=4, vocab_size=512),
}
"""Arguments of `AutoConfig.for_model`. Others are the architecture's defaults: GPT-2 and T5 have dropout 0.1."""


def check_model(name: str) -> None:
    """Raise ValueError unless `name` is a preset, or a folder or hub id with a config.json. Does not import torch."""
    if name in PRESETS or (Path(name) / "config.json").is_file():
        return
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, "config.json")
    except (OSError, ValueError) as error:
        raise ValueError(unknown_model(name, error)) from error


def unknown_model(name: str, error: Exception) -> str:
    """Return the error for a model `name` whose configuration could not be loaded because of `error`."""
    reason = str(error).strip().partition("\n")[0]
    names = ", ".join(PRESETS)
    return f"--model={name} is not a preset ({names}), and could not be loaded as a hub id or folder: {reason}"
