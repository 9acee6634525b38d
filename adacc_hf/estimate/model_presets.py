"""Model configurations by name (a preset, a hub id or a folder), and models built from them."""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from adacc_hf.estimate.presets import PRESETS, unknown_model


def load_config(name: str) -> PretrainedConfig:
    """Return the configuration of a preset, a hub id or a config folder. Raises ValueError for an unknown name."""
    if name in PRESETS:
        return AutoConfig.for_model(**PRESETS[name])
    try:
        config = AutoConfig.from_pretrained(name)
    except StrictDataclassError as error:
        raise ValueError(f"--model={name} has a configuration with an invalid value: {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(unknown_model(name, error)) from error
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


def build_model(
    name: str, config: PretrainedConfig, vocab_size: int, eos_token_id: int, attn_implementation: str, pretrained: bool
) -> PreTrainedModel:
    """Build the model in float32, with random weights from torch's current seed, or the hub's weights if `pretrained`.

    `vocab_size` and `eos_token_id` are from the tokenizer. A model with random weights uses both numbers. Raises
    ValueError if the vocabulary of a pretrained model is smaller than `vocab_size`.
    """
    if pretrained:
        return _pretrained_model(name, config, vocab_size, attn_implementation)
    text_config = config.get_text_config()
    text_config.vocab_size = vocab_size
    text_config.bos_token_id = text_config.eos_token_id = eos_token_id
    return fresh_model(config, attn_implementation)


def fresh_model(config: PretrainedConfig, attn_implementation: str | None, dtype: str = "float32") -> PreTrainedModel:
    """Build the classifier or language model of `config`, with random weights from torch's current seed.

    If `attn_implementation` is None, Transformers chooses the attention implementation. Raises ValueError if the
    architecture has neither a classifier nor a language model, or does not have this attention implementation.
    """
    auto_class: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if is_classifier(config):
        auto_class = AutoModelForSequenceClassification
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


def _pretrained_model(
    name: str, config: PretrainedConfig, vocab_size: int, attn_implementation: str
) -> PreTrainedModel:
    if name in PRESETS:
        raise ValueError(f"--from_pretrained needs a hub id or folder with weights; --model={name} is a preset")
    model_vocab_size = config.get_text_config().vocab_size
    if vocab_size > model_vocab_size:
        raise ValueError(
            f"--tokenizer has {vocab_size} tokens but --model={name} embeds only {model_vocab_size}; use the model's "
            f"own tokenizer"
        )
    return AutoModelForCausalLM.from_pretrained(name, dtype="float32", attn_implementation=attn_implementation)
