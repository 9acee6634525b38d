"""Shared parts of tiny architectures: settings of configurations, and makers of batches."""

from __future__ import annotations

import torch

from adacc_hf.eval.zoo.architecture import Batch

BATCH, TOKENS, TARGETS, VOCABULARY = 2, 16, 12, 100


def tokens(generator: torch.Generator, length: int = TOKENS) -> torch.Tensor:
    """Draw [BATCH, length] tokens, none of which is a special token."""
    return torch.randint(5, VOCABULARY - 5, (BATCH, length), generator=generator)


def text(generator: torch.Generator) -> Batch:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def padded_text(generator: torch.Generator) -> Batch:
    """Return text whose second sequence ends in four padding tokens."""
    ids, mask = tokens(generator), torch.ones(BATCH, TOKENS, dtype=torch.long)
    ids[1, -4:], mask[1, -4:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def two_texts(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator), "labels": tokens(generator, TARGETS)}


def image(generator: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1])}


def bare_image(generator: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator)}


def large_image(generator: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1])}


def video(generator: torch.Generator) -> Batch:
    pixels = torch.randn(BATCH, 4, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def image_and_text(generator: torch.Generator) -> Batch:
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return {"input_ids": tokens(generator), "pixel_values": pixels, "return_loss": True}


def mel_and_text(generator: torch.Generator) -> Batch:
    features = torch.randn(BATCH, 8, 32, generator=generator)
    return {"input_features": features, "labels": tokens(generator, TARGETS)}


def frames_and_text(generator: torch.Generator) -> Batch:
    features = torch.randn(BATCH, 32, 8, generator=generator)
    return {"input_features": features, "labels": tokens(generator, TARGETS)}


def wave(generator: torch.Generator) -> Batch:
    return {"input_values": torch.randn(BATCH, 640, generator=generator), "labels": tokens(generator, 4)}


def spectrogram(generator: torch.Generator) -> Batch:
    return {"input_values": torch.randn(BATCH, 32, 16, generator=generator), "labels": torch.tensor([0, 1])}


IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {**IDS, **SIZES, "intermediate_size": 64, "max_position_embeddings": 64}
GROUPED = {**COMMON, "num_key_value_heads": 2}
HEADED = {**GROUPED, "head_dim": 8}
STARTED = {**IDS, "decoder_start_token_id": 1}
T5_LIKE = {**IDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
TOWERS = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
BART_LIKE = {
    **STARTED, **TOWERS, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
IMAGE = {**SIZES, "intermediate_size": 64, "image_size": 16, "patch_size": 4}
WAVE = {
    **COMMON, "conv_dim": (16, 16), "conv_kernel": (10, 4), "conv_stride": (5, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "ctc_zero_infinity": True,
}  # fmt: skip
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    **COMMON, **ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8}
STATE_SPACE = {**IDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
