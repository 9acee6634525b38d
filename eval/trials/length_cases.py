"""Small models for training on batches whose size changes at every step, and makers of these batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from adacc_hf import AdaccConfig
from adacc_hf.eval.trials.workload import Batch, random_text

MODES = {"Adacc": AdaccConfig(), "Adacc lossless": AdaccConfig(actions=("retain", "recompute"))}
"""Configurations that meet a budget, by title: all actions, or only the actions that leave gradients bit-equal."""

Size = tuple[int, ...]
"""Sizes that change from batch to batch. All cases have tokens. T5 also has the decoder's tokens, and Qwen2-VL the rows
and columns of an image's tokens."""

VOCABULARY = 260
"""Byte values, and the special tokens of images."""
IMAGE_TOKEN, VISION_START, VISION_END, VIDEO_TOKEN = range(256, VOCABULARY)
PATCH, MERGED, FRAMES = 4, 2, 2
"""Image sizes of Qwen2-VL: pixels along the side of a patch, patches along the side of a token, frames in a patch."""
MEL_BINS, SOUND_TOKENS = 80, 128
"""Audio sizes of Whisper, whose audio inputs have one fixed length."""
IGNORED = -100
"""Label of a token that the loss ignores."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of models and batches, and the number of training steps."""

    width: int = 128
    layers: int = 4
    """Number of blocks. In a model with an encoder, half of them are in the encoder."""
    heads: int = 4
    batch: int = 2
    shortest: int = 40
    longest: int = 260
    """Number of tokens of the longest batch. The shortest batch has `shortest` tokens."""
    steps: int = 60

    def lengths(self, generator: torch.Generator) -> list[int]:
        """Draw a different number of tokens for each step: one from each of `steps` equal parts of the range, shuffled.

        Their median is close to their mean, so the median step time is close to the step time of a batch of the mean
        length. Raise ValueError if the range has fewer lengths than steps.
        """
        span = self.longest + 1 - self.shortest
        if span < self.steps:
            raise ValueError(
                f"steps={self.steps}: each step needs a length of its own, and there are {span} lengths from "
                f"{self.shortest} to {self.longest}: ask for {span} steps or fewer"
            )
        bounds = [self.shortest + span * step // self.steps for step in range(self.steps + 1)]
        sorted_lengths = [int(torch.randint(low, high, (), generator=generator)) for low, high in pairwise(bounds)]
        return [sorted_lengths[index] for index in torch.randperm(self.steps, generator=generator)]


def middle(sizes: Sequence[Size]) -> Size:
    """Return the mean of `sizes`, the fixed size that is compared with all of them."""
    return tuple(round(statistics.mean(column)) for column in zip(*sizes, strict=True))


@dataclass(frozen=True, kw_only=True)
class LengthCase:
    """A model, and the maker of its batches of any size."""

    title: str
    model_class: str
    """Name of a class of Transformers."""
    settings: Callable[[Scale], dict[str, Any]] = field(repr=False)
    """Settings of the model's configuration. All others keep their defaults, dropout too."""
    batch: Callable[[Scale, Size, torch.Generator], Batch] = field(repr=False)
    sizes: Callable[[Sequence[int], torch.Generator], list[Size]] = field(
        default=lambda lengths, generator: [Size((length,)) for length in lengths], repr=False
    )
    """Function from numbers of tokens to sizes."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further arguments of the model's constructor."""

    def model(self, scale: Scale, device: str, seed: int) -> PreTrainedModel:
        """Return the model in train mode. The weights depend on the seed alone. torch's generator keeps its state."""
        model_class = getattr(transformers, self.model_class)
        config = model_class.config_class(**self.settings(scale), use_cache=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model_class._from_config(config, attn_implementation="sdpa", **self.options)
        if self.model_class == "GPT2LMHeadModel":
            model.loss_type = "ForCausalLM"  # the default, which Transformers would pick with a warning
        return model.to(device).train()

    def draw(self, scale: Scale, seed: int) -> list[Size]:
        """Draw a different size for each step's batch."""
        generator = torch.Generator().manual_seed(seed)
        return self.sizes(scale.lengths(generator), generator)

    def make_batch(self, scale: Scale, size: Size, device: str, seed: int) -> Batch:
        """Return a batch with labels. Another seed gives other values of the same shapes."""
        batch = self.batch(scale, size, torch.Generator().manual_seed(seed))
        return {name: tensor.to(device) for name, tensor in batch.items()}


def _text(scale: Scale, size: Size, generator: torch.Generator) -> Batch:
    ids = random_text(scale.batch, size[0], generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _padded_text(scale: Scale, size: Size, generator: torch.Generator) -> Batch:
    """Return text whose first row has full length. The other rows end between half the length and one token before
    it."""
    (length,) = size
    ends = torch.randint(length // 2, length, (scale.batch, 1), generator=generator)
    ends[0] = length
    mask = torch.arange(length).expand(scale.batch, length) < ends
    ids = random_text(scale.batch, length, generator).masked_fill(~mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, IGNORED)}


def _two_texts(scale: Scale, size: Size, generator: torch.Generator) -> Batch:
    return {
        "input_ids": random_text(scale.batch, size[0], generator),
        "labels": random_text(scale.batch, size[1], generator),
    }


def _two_lengths(lengths: Sequence[int], generator: torch.Generator) -> list[Size]:
    order = torch.randperm(len(lengths), generator=generator).tolist()
    return [(length, lengths[index]) for length, index in zip(lengths, order, strict=True)]


def _sound_and_text(scale: Scale, size: Size, generator: torch.Generator) -> Batch:
    features = torch.randn(scale.batch, MEL_BINS, 2 * SOUND_TOKENS, generator=generator)
    return {"input_features": features, "labels": random_text(scale.batch, size[0], generator)}


def _image_and_text(scale: Scale, size: Size, generator: torch.Generator) -> Batch:
    """Return text with one image in each row, right after the first token."""
    length, rows, columns = size
    ids = random_text(scale.batch, length, generator)
    ids[:, 1 : 1 + rows * columns] = IMAGE_TOKEN
    is_image = ids == IMAGE_TOKEN
    num_patches = scale.batch * rows * columns * MERGED**2
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(is_image, IGNORED),
        "pixel_values": torch.randn(num_patches, 3 * FRAMES * PATCH**2, generator=generator),
        "image_grid_thw": torch.tensor([[1, MERGED * rows, MERGED * columns]] * scale.batch),
        "mm_token_type_ids": is_image.long(),
    }


def _with_image(lengths: Sequence[int], generator: torch.Generator) -> list[Size]:
    """Return sizes of images with random sides that take up at most half of the text."""
    sizes: list[Size] = []
    for length in lengths:
        longest = max(2, math.isqrt(length // 2))
        rows, columns = torch.randint(2, longest + 1, (2,), generator=generator).tolist()
        sizes.append((length, rows, columns))
    return sizes


IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _common(scale: Scale) -> dict[str, Any]:
    return {
        **IDS,
        "hidden_size": scale.width,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": scale.heads,
        "intermediate_size": 3 * scale.width,
        "max_position_embeddings": scale.longest,
    }


def _grouped(scale: Scale) -> dict[str, Any]:
    return {**_common(scale), "num_key_value_heads": max(1, scale.heads // 2)}


def _gpt2(scale: Scale) -> dict[str, Any]:
    sizes = {"n_embd": scale.width, "n_layer": scale.layers, "n_head": scale.heads, "n_positions": scale.longest}
    return {**IDS, **sizes}


def _mistral(scale: Scale) -> dict[str, Any]:
    return {**_grouped(scale), "sliding_window": (scale.shortest + scale.longest) // 2}


def _t5(scale: Scale) -> dict[str, Any]:
    return {
        **IDS,
        "d_model": scale.width,
        "d_kv": scale.width // scale.heads,
        "d_ff": 4 * scale.width,
        "num_layers": scale.layers // 2,
        "num_decoder_layers": scale.layers // 2,
        "num_heads": scale.heads,
        "decoder_start_token_id": 0,
    }


def _experts(scale: Scale) -> dict[str, Any]:
    head = {"head_dim": scale.width // scale.heads}
    return {
        **_grouped(scale), **head, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": scale.width,
    }  # fmt: skip


def _whisper(scale: Scale) -> dict[str, Any]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", scale.layers // 2),
            ("ffn_dim", 4 * scale.width),
            ("attention_heads", scale.heads),
        )
    }
    lengths = {"max_source_positions": SOUND_TOKENS, "max_target_positions": scale.longest, "num_mel_bins": MEL_BINS}
    return {**IDS, **sides, **lengths, "d_model": scale.width, "decoder_start_token_id": 1}


def _qwen2_vl(scale: Scale) -> dict[str, Any]:
    eighth = scale.width // scale.heads // 8
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2 * eighth, eighth, eighth]}
    vision_sizes = {"hidden_size": scale.width, "embed_dim": scale.width, "num_heads": scale.heads, "mlp_ratio": 4}
    patch_sizes = {"in_channels": 3, "patch_size": PATCH, "spatial_merge_size": MERGED, "temporal_patch_size": FRAMES}
    return {
        "text_config": {**_grouped(scale), "model_type": "qwen2_vl_text", "rope_parameters": rope, "use_cache": False},
        "vision_config": {**vision_sizes, **patch_sizes, "depth": scale.layers // 2},
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": VIDEO_TOKEN,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }


def _case(title: str, model_class: str, settings: Any, batch: Any, **more: Any) -> LengthCase:
    return LengthCase(title=title, model_class=model_class, settings=settings, batch=batch, **more)


LENGTH_CASES = {
    "gpt2": _case("GPT-2", "GPT2LMHeadModel", _gpt2, _text),
    "llama": _case("LLaMA", "LlamaForCausalLM", _grouped, _text),
    "llama_padded": _case("LLaMA, padded", "LlamaForCausalLM", _grouped, _padded_text),
    "t5": _case("T5, two lengths", "T5ForConditionalGeneration", _t5, _two_texts, sizes=_two_lengths),
    "bert": _case("BERT, padded", "BertForMaskedLM", _common, _padded_text),
    "mistral": _case("Mistral, sliding window", "MistralForCausalLM", _mistral, _text),
    "moe_grouped": _case(
        "Qwen3-MoE, grouped products", "Qwen3MoeForCausalLM", _experts, _text,
        options={"experts_implementation": "grouped_mm"},
    ),
    "moe_loop": _case(
        "Qwen3-MoE, loop over experts", "Qwen3MoeForCausalLM", _experts, _text,
        options={"experts_implementation": "eager"},
    ),
    "whisper": _case("Whisper", "WhisperForConditionalGeneration", _whisper, _sound_and_text),
    "qwen2_vl": _case(
        "Qwen2-VL, images of any size", "Qwen2VLForConditionalGeneration", _qwen2_vl, _image_and_text,
        sizes=_with_image,
    ),
}  # fmt: skip
"""Cases by their name on the command line. Mistral's sliding window is shorter than half of the sizes."""
