"""Model configurations by name (a preset, a hub id or a folder), and models built from them.

The presets are the GPT models of the paper's Table 3, LLaMA, T5 and small demos. Wrong names are refused before torch
is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def _gpt2(**sizes: Any) -> dict[str, Any]:
    # The tokenizer sets the special token ids. GPT2Config's default id would lie outside a small vocabulary.
    tokens = {"bos_token_id": None, "eos_token_id": None}
    return {"model_type": "gpt2", "n_positions": 1024, "vocab_size": 50257, **tokens, **sizes}


def _llama(
    *,
    layers: int,
    width: int,
    inner: int,
    heads: int,
    kv_heads: int,
    context: int = 8192,
    vocabulary: int = 128_256,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


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
    "llama-1b": _llama(layers=16, width=2048, inner=8192, heads=32, kv_heads=8, context=4096, tied=True),
    # LLaMA-3 8B and 70B, as published: 8.03 and 70.6 billion.
    "llama3-8b": _llama(layers=32, width=4096, inner=14_336, heads=32, kv_heads=8),
    "llama3-70b": _llama(layers=80, width=8192, inner=28_672, heads=64, kv_heads=8),
    # T5 11B, as published: 11.3 billion, in feed-forward layers of 64 times the width.
    "t5-11b": _t5(num_layers=24, d_model=1024, d_ff=65_536, num_heads=128, d_kv=128),
    # T5 Base, as published: 222.9 million.
    "t5-base": _t5(num_layers=12, d_model=768, d_ff=3072, num_heads=12),
    "demo-llama": _llama(layers=6, width=256, inner=688, heads=4, kv_heads=2, context=256, vocabulary=512, tied=True),
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
        raise ValueError(_unknown_model(name, error)) from error


def _unknown_model(name: str, error: Exception) -> str:
    """Return the error for a model `name` whose configuration could not be loaded because of `error`."""
    reason = str(error).strip().partition("\n")[0]
    names = ", ".join(PRESETS)
    return f"--model={name} is not a preset ({names}), and could not be loaded as a hub id or folder: {reason}"


def load_config(name: str) -> PretrainedConfig:
    """Return the configuration of a preset, a hub id or a config folder. Raises ValueError for an unknown name."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if name in PRESETS:
        return AutoConfig.for_model(**PRESETS[name])
    try:
        config = AutoConfig.from_pretrained(name)
    except StrictDataclassError as error:
        raise ValueError(f"--model={name} has a configuration with an invalid value: {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(_unknown_model(name, error)) from error
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0  # T5Config().save_pretrained leaves it out
    return config


def context_length(config: PretrainedConfig) -> int | None:
    """Return the model's maximum sequence length in tokens, or None if its position encoding sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def checked_seq_len(seq_len: int | None, config: PretrainedConfig, option: str = "--seq_len") -> int:
    """Return `seq_len`, or the model's context length if `seq_len` is None.

    Raises ValueError if the length is not between 2 and the context length. The error names the command-line `option`.
    """
    longest = context_length(config)
    length = longest if seq_len is None else seq_len
    if length is None:
        raise ValueError(f"{option} must be set, because the model's configuration has no context length")
    if length < 2 or (longest is not None and length > longest):
        allowed = "at least 2" if longest is None else f"2 to {longest}, the model's context"
        raise ValueError(f"{option}={length} is outside its range ({allowed}); change it or choose another --model")
    return length


def fresh_model(
    config: PretrainedConfig, attn_implementation: str | None, dtype: str = "float32", has_images: bool = False
) -> PreTrainedModel:
    """Build the classifier or language model of `config`, or its vision-language model if `has_images`, with random
    weights from torch's current seed.

    If `attn_implementation` is None, Transformers chooses the attention implementation. Raises ValueError if the
    architecture has no such model, or does not have this attention implementation.
    """
    import transformers

    auto_class: Any = transformers.AutoModelForCausalLM
    if has_images:
        auto_class = transformers.AutoModelForImageTextToText
    elif is_classifier(config):
        auto_class = transformers.AutoModelForSequenceClassification
    elif config.is_encoder_decoder:
        auto_class = transformers.AutoModelForSeq2SeqLM
    try:
        return auto_class.from_config(config, attn_implementation=attn_implementation, dtype=dtype)
    except ValueError as error:
        if "does not support an attention implementation" in str(error):
            raise ValueError(
                f"attention {attn_implementation} is not implemented for {type(config).__name__}: choose eager"
            ) from error
        if "Unrecognized configuration class" not in str(error):  # followed by the names of all classes
            raise
        raise ValueError(
            f"{type(config).__name__} has no {auto_class.__name__}: choose a language model, or the language model of "
            f"a model with images or sound, which is the text_config in its config.json; --images N plans images"
        ) from error


def is_classifier(config: PretrainedConfig) -> bool:
    """Return True if the architecture in `config` is a sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
