"""Tiny architectures for text with images or audio."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from adacc_hf.eval.zoo.architecture import Batch, MakeBatch, Table, row
from adacc_hf.eval.zoo.parts import (
    ALTERNATING,
    BART_LIKE,
    BATCH,
    COMMON,
    EXPERTS,
    GROUPED,
    HEADED,
    IDS,
    IMAGE,
    LINEAR,
    ROUTED,
    SIZES,
    TOKENS,
    VOCABULARY,
    tokens,
)  # fmt: skip

IMAGE_TOKEN, SOUND_TOKEN = 96, 97
"""Placeholder tokens of images and audio, which do not occur in text."""
NAMED_TOKENS = {"vision_start_token_id": 97, "vision_end_token_id": 98, "video_token_id": 99}
PIXELS = (BATCH, 3, 16, 16)
PATCHES, PATCH_VALUES = BATCH * 16, 3 * 2 * 4 * 4


def with_images(
    num_places: int, pixels: tuple[int, ...], derived: Callable[[torch.Tensor], Batch] = lambda ids: {}
) -> MakeBatch:
    """Return a function that makes sequences with one image each, as `num_places` tokens.

    `derived` adds tensors computed from the ids.
    """

    def make(generator: torch.Generator) -> Batch:
        ids = tokens(generator)
        ids[:, 1 : 1 + num_places] = IMAGE_TOKEN
        values = torch.randn(pixels, generator=generator)
        return {"input_ids": ids, "labels": ids.clone(), "pixel_values": values, **derived(ids)}

    return make


def _image_places(ids: torch.Tensor) -> torch.Tensor:
    return (ids == IMAGE_TOKEN).long()


def _patched(ids: torch.Tensor) -> Batch:
    """Return the tensors for one image of 1 x 4 x 4 patches in each sequence."""
    return {"image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH), "mm_token_type_ids": _image_places(ids)}


def _sized(ids: torch.Tensor) -> Batch:
    return {"image_sizes": torch.tensor([[16, 16]] * BATCH)}


def _tiled(ids: torch.Tensor) -> Batch:
    """Return the masks of images of one tile, with room for two."""
    return {
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1, 0]]] * BATCH),
        "cross_attention_mask": torch.tensor([1, 0]).expand(BATCH, TOKENS, 1, 2),
    }


def _in_rows(ids: torch.Tensor) -> Batch:
    """Return the positions of the patches of one 4 x 4 image in each sequence."""
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(BATCH, 16, 2)
    return {"image_position_ids": places, "mm_token_type_ids": _image_places(ids)}


def _masked(ids: torch.Tensor) -> Batch:
    """Return the tensors for one image of 4 x 4 patches in each sequence, with an all-ones mask."""
    sizes, mask = torch.tensor([[4, 4]] * BATCH), torch.ones(BATCH, 16, dtype=torch.long)
    return {"spatial_shapes": sizes, "pixel_attention_mask": mask}


def image_patches(generator: torch.Generator) -> Batch:
    """Return flattened patches, each with its row and column before its values, and the text to predict from them."""
    places = torch.cartesian_prod(torch.arange(1.0, 5.0), torch.arange(1.0, 5.0)).expand(BATCH, 16, 2)
    values = torch.randn(BATCH, 16, 48, generator=generator)
    return {"flattened_patches": torch.cat([places, values], dim=-1), "labels": tokens(generator)}


def with_sounds(num_places: int, derived: Mapping[str, torch.Tensor]) -> MakeBatch:
    """Return a function that makes sequences with one audio clip of 16 frames each, as `num_places` tokens, and with
    the tensors `derived`."""

    def make(generator: torch.Generator) -> Batch:
        ids = tokens(generator)
        ids[:, 1 : 1 + num_places] = SOUND_TOKEN
        features = torch.randn(BATCH, 8, 16, generator=generator)
        text = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        return {**text, "input_features": features, **derived}

    return make


def spectra_and_text(generator: torch.Generator) -> Batch:
    """Return sequences with one audio clip of 16 spectra each, as eight tokens."""
    batch = with_sounds(8, {"input_features_mask": torch.ones(BATCH, 8, dtype=torch.bool)})(generator)
    return {**batch, "input_features": torch.randn(BATCH, 16, 8, generator=generator)}


def _text(model_type: str, sizes: Mapping[str, Any] = GROUPED, /, **settings: Any) -> dict[str, Any]:
    return {**sizes, "model_type": model_type, **settings}


FOUR = {**IMAGE, "patch_size": 8}
"""Settings of an image of four patches."""
CLIP = {**FOUR, "model_type": "clip_vision_model"}
SIGLIP = {**IMAGE, "model_type": "siglip_vision_model", "vision_use_head": False}
SIGLIP_OF_FOUR = {**SIGLIP, "patch_size": 8}
THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
ALL_ROTATED = {"rope_parameters": {**THREE_AXES["rope_parameters"], "partial_rotary_factor": 1.0}}
MERGING = {
    "depth": 2, "num_heads": 4, "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "hidden_size": 32,
}  # fmt: skip
MERGING_MLP = {**MERGING, "out_hidden_size": 32, "intermediate_size": 64}
DEEP_STACKED = {**MERGING_MLP, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
QWEN = {"image_token_id": IMAGE_TOKEN, **NAMED_TOKENS}
GLM = {
    "image_token_id": IMAGE_TOKEN, "image_start_token_id": 97, "image_end_token_id": 98, "video_token_id": 99,
    "video_start_token_id": 3, "video_end_token_id": 4,
}  # fmt: skip
QUERYING = {"qformer_config": {**COMMON, "encoder_hidden_size": 32}, "num_query_tokens": 4}

IN_PATCHES = with_images(4, (PATCHES, PATCH_VALUES), _patched)
ONE_IMAGE = with_images(4, PIXELS)
LIST_OF_IMAGES = with_images(4, (BATCH, 1, 3, 16, 16))
IN_TILES = with_images(10, (BATCH, 2, 3, 16, 16), _sized)

MULTIMODAL: Table = {
    "vision-language": {
        "llava": row("LlavaForConditionalGeneration", ONE_IMAGE, text_config=_text("llama"), vision_config=CLIP,
            image_token_index=IMAGE_TOKEN),
        "vipllava": row("VipLlavaForConditionalGeneration", ONE_IMAGE, text_config=_text("llama"), vision_config=CLIP,
            image_token_index=IMAGE_TOKEN, vision_feature_layers=[-1, -2]),
        "llava_next": row("LlavaNextForConditionalGeneration", IN_TILES, text_config=_text("llama"), vision_config=CLIP,
            image_token_index=IMAGE_TOKEN, image_grid_pinpoints=[[16, 16]]),
        "llava_onevision": row("LlavaOnevisionForConditionalGeneration", IN_TILES, text_config=_text("qwen2"),
            vision_config=SIGLIP_OF_FOUR, image_token_index=IMAGE_TOKEN, video_token_index=97,
            image_grid_pinpoints=[[16, 16]]),
        "qwen2_vl": row("Qwen2VLForConditionalGeneration", IN_PATCHES, QWEN,
            text_config=_text("qwen2_vl_text", **THREE_AXES),
            vision_config={**MERGING, "embed_dim": 32, "mlp_ratio": 2}),
        "qwen2_5_vl": row("Qwen2_5_VLForConditionalGeneration", IN_PATCHES, QWEN,
            text_config=_text("qwen2_5_vl_text", **THREE_AXES),
            vision_config={**MERGING_MLP, "window_size": 16, "fullatt_block_indexes": [1]}),
        "qwen3_vl": row("Qwen3VLForConditionalGeneration", IN_PATCHES, QWEN,
            text_config=_text("qwen3_vl_text", HEADED, **THREE_AXES), vision_config=DEEP_STACKED),
        "qwen3_vl_moe": row("Qwen3VLMoeForConditionalGeneration", IN_PATCHES, QWEN,
            text_config=_text("qwen3_vl_moe_text", EXPERTS, head_dim=8, **THREE_AXES), vision_config=DEEP_STACKED),
        "qwen3_5": row("Qwen3_5ForConditionalGeneration", IN_PATCHES, QWEN,
            text_config=_text("qwen3_5_text", HEADED, **LINEAR, **ALL_ROTATED), vision_config=DEEP_STACKED),
        "qwen3_5_moe": row("Qwen3_5MoeForConditionalGeneration", IN_PATCHES, QWEN, text_config=_text("qwen3_5_moe_text",
            EXPERTS, head_dim=8, shared_expert_intermediate_size=16, **LINEAR, **ALL_ROTATED),
            vision_config=DEEP_STACKED),
        "glm4v": row("Glm4vForConditionalGeneration", IN_PATCHES, GLM, text_config=_text("glm4v_text", **ALL_ROTATED),
            vision_config={**MERGING_MLP, "image_size": 16}),
        "glm4v_moe": row("Glm4vMoeForConditionalGeneration", IN_PATCHES, GLM,
            text_config=_text("glm4v_moe_text", **ROUTED, **ALL_ROTATED),
            vision_config={**MERGING_MLP, "image_size": 16}),
        "smolvlm": row("SmolVLMForConditionalGeneration", LIST_OF_IMAGES, text_config=_text("llama"),
            vision_config=IMAGE, image_token_id=IMAGE_TOKEN, pad_token_id=0),
        "idefics2": row("Idefics2ForConditionalGeneration", LIST_OF_IMAGES, text_config=_text("mistral"),
            vision_config=IMAGE, image_token_id=IMAGE_TOKEN, perceiver_config={"hidden_size": 32,
            "resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 8,
            "num_key_value_heads": 2}),
        "idefics3": row("Idefics3ForConditionalGeneration", LIST_OF_IMAGES, text_config=_text("llama"),
            vision_config=IMAGE, image_token_id=IMAGE_TOKEN, pad_token_id=0),
        "paligemma": row("PaliGemmaForConditionalGeneration",
            with_images(4, PIXELS, lambda ids: {"token_type_ids": 1 - _image_places(ids)}),
            text_config=_text("gemma", HEADED), vision_config={**SIGLIP_OF_FOUR, "projection_dim": 32},
            image_token_index=IMAGE_TOKEN, projection_dim=32),
        "gemma3": row("Gemma3ForConditionalGeneration",
            with_images(4, PIXELS, lambda ids: {"token_type_ids": _image_places(ids)}),
            text_config=_text("gemma3_text", HEADED, **ALTERNATING), vision_config=SIGLIP,
            image_token_index=IMAGE_TOKEN, boi_token_index=97, eoi_token_index=98, mm_tokens_per_image=4),
        "gemma4": row("Gemma4ForConditionalGeneration", with_images(4, (BATCH, 16, 48), _in_rows),
            text_config=_text("gemma4_text", HEADED, **ALTERNATING, vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8), vision_config={**SIZES, "intermediate_size": 64, "num_key_value_heads": 4,
            "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 16}, audio_config=None,
            image_token_id=IMAGE_TOKEN, video_token_id=97, audio_token_id=98),
        "llama4": row("Llama4ForConditionalGeneration", ONE_IMAGE, text_config=_text("llama4_text", HEADED,
            intermediate_size_mlp=64, num_local_experts=4, interleave_moe_layer_step=2, attention_chunk_size=8,
            no_rope_layers=[1, 0]), vision_config={**IMAGE, "intermediate_size": 128, "vision_output_dim": 32,
            "projector_input_dim": 32, "projector_output_dim": 32, "rope_parameters": {"rope_type": "default",
            "rope_theta": 1e4}}, image_token_index=IMAGE_TOKEN, boi_token_index=97, eoi_token_index=98),
        "internvl": row("InternVLForConditionalGeneration", ONE_IMAGE, text_config=_text("qwen2"), vision_config=IMAGE,
            image_token_id=IMAGE_TOKEN),
        "aya_vision": row("AyaVisionForConditionalGeneration", ONE_IMAGE, text_config=_text("cohere2", **ALTERNATING),
            vision_config=SIGLIP, image_token_index=IMAGE_TOKEN),
        "cohere2_vision": row("Cohere2VisionForConditionalGeneration", ONE_IMAGE,
            text_config=_text("cohere2", **ALTERNATING), vision_config=SIGLIP, image_token_id=IMAGE_TOKEN,
            alignment_intermediate_size=64),
        "lfm2_vl": row("Lfm2VlForConditionalGeneration", with_images(4, (BATCH, 16, 48), _masked),
            text_config=_text("lfm2", layer_types=["conv", "full_attention"]),
            vision_config={**IMAGE, "model_type": "siglip2_vision_model", "num_patches": 16},
            image_token_id=IMAGE_TOKEN),
        "deepseek_vl": row("DeepseekVLForConditionalGeneration", ONE_IMAGE, text_config=_text("llama"),
            vision_config=SIGLIP_OF_FOUR, image_token_id=IMAGE_TOKEN),
        "mistral3": row("Mistral3ForConditionalGeneration", with_images(4, PIXELS, _sized),
            text_config=_text("mistral"), vision_config={**IMAGE, "model_type": "pixtral", "head_dim": 8},
            image_token_index=IMAGE_TOKEN),
        "mllama": row("MllamaForConditionalGeneration", with_images(1, (BATCH, 1, 2, 3, 16, 16), _tiled),
            text_config=_text("mllama_text_model", cross_attention_layers=[1], rope_parameters={"rope_type": "default",
            "rope_theta": 1e4}), vision_config={"hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1,
            "attention_heads": 4, "intermediate_size": 64, "vision_output_dim": 64, "image_size": 16, "patch_size": 4,
            "max_num_tiles": 2, "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2], [2,
            1]]}, image_token_index=IMAGE_TOKEN),
        "blip-2": row("Blip2ForConditionalGeneration", ONE_IMAGE, QUERYING,
            text_config={**COMMON, "model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32}, vision_config=IMAGE,
            image_token_index=IMAGE_TOKEN),
        "instructblip": row("InstructBlipForConditionalGeneration",
            with_images(4, PIXELS, lambda ids: {"qformer_input_ids": ids[:, 8:]}), QUERYING, text_config=_text("llama"),
            vision_config=IMAGE, image_token_index=IMAGE_TOKEN),
        "florence2": row("Florence2ForConditionalGeneration", with_images(5, PIXELS),
            text_config={**BART_LIKE, "model_type": "bart"}, vision_config={"depths": [1, 1], "patch_size": [7, 3],
            "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True], "embed_dim": [16, 32],
            "num_heads": [2, 4], "num_groups": [2, 4], "window_size": 4, "drop_path_rate": 0.0, "projection_dim": 32},
            image_token_id=IMAGE_TOKEN),
        "kosmos-2": row("Kosmos2ForConditionalGeneration",
            with_images(4, PIXELS, lambda ids: {"image_embeds_position_mask": _image_places(ids)}), text_config={**IDS,
            "embed_dim": 32, "layers": 2, "ffn_dim": 64, "attention_heads": 4, "max_position_embeddings": 64},
            vision_config=IMAGE, latent_query_num=4),
        "git": row("GitForCausalLM", with_images(0, PIXELS), COMMON, vision_config=IMAGE),
        "pix2struct": row("Pix2StructForConditionalGeneration", image_patches,
            text_config={**IDS, "hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
            vision_config={**SIZES, "patch_embed_hidden_size": 48, "d_ff": 64, "d_kv": 8, "seq_len": 16}),
        "ovis2": row("Ovis2ForConditionalGeneration", ONE_IMAGE, text_config=_text("qwen2"),
            vision_config={**IMAGE, "vocab_size": 32, "num_visual_indicator_tokens": 5, "hidden_stride": 2},
            image_token_id=IMAGE_TOKEN, visual_indicator_token_ids=[97, 98, 99, 3, 4], vocab_size=VOCABULARY,
            hidden_size=32),
        "janus": row("JanusForConditionalGeneration", ONE_IMAGE, text_config=_text("llama"),
            vision_config={**FOUR, "projection_dim": 32, "num_image_tokens": 4}, vq_config={"base_channels": 32,
            "num_embeddings": 16, "channel_multiplier": [1, 1], "num_patches": 4, "num_res_blocks": 1,
            "projection_dim": 32, "image_token_embed_dim": 32, "embed_dim": 8, "latent_channels": 8,
            "num_hidden_layers": 1}, image_token_id=IMAGE_TOKEN),
    },
    "audio-language": {
        "qwen2_audio": row("Qwen2AudioForConditionalGeneration",
            with_sounds(4, {"feature_attention_mask": torch.ones(BATCH, 16, dtype=torch.long)}),
            text_config=_text("qwen2"), audio_config={"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 8}, audio_token_index=SOUND_TOKEN),
        "voxtral": row("VoxtralForConditionalGeneration", with_sounds(2, {}), text_config=_text("llama"),
            audio_config={**SIZES, "intermediate_size": 128, "num_mel_bins": 8, "max_source_positions": 8},
            audio_token_id=SOUND_TOKEN),
        "granite_speech": row("GraniteSpeechForConditionalGeneration", spectra_and_text, text_config=_text("granite"),
            encoder_config={"input_dim": 8, "num_layers": 2, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 4,
            "dim_head": 8, "output_dim": 8, "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 5},
            projector_config={**COMMON, "model_type": "blip_2_qformer", "encoder_hidden_size": 32},
            audio_token_index=SOUND_TOKEN, has_lora_adapter=False, downsample_rate=2, window_size=8),
    },
}  # fmt: skip
