"""Tiny architectures for text with mixtures of experts or recurrent states."""

from __future__ import annotations

from adacc_hf.eval.zoo.architecture import Table
from adacc_hf.eval.zoo.parts import (
    ALTERNATING,
    BART_LIKE,
    COMMON,
    EXPERTS,
    GROUPED,
    HEADED,
    IDS,
    LATENT,
    LINEAR,
    LOCAL_EXPERTS,
    MAMBA,
    ROUTED,
    STATE_SPACE,
    T5_LIKE,
    text,
    two_texts,
)

EXPERTS_AND_STATES: Table = {
    "mixture of experts": {
        "mixtral": ("MixtralForCausalLM", LOCAL_EXPERTS, text),
        "qwen2_moe": ("Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 16}, text),
        "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 8}, text),
        "olmoe": ("OlmoeForCausalLM", EXPERTS, text),
        "phimoe": ("PhimoeForCausalLM", LOCAL_EXPERTS, text),
        "granitemoe": ("GraniteMoeForCausalLM", LOCAL_EXPERTS, text),
        "gpt_oss": ("GptOssForCausalLM", {**LOCAL_EXPERTS, **ALTERNATING, "head_dim": 8}, text),
        "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT, text),
        "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT, text),
        "mistral4": ("Mistral4ForCausalLM", {**LATENT, "first_k_dense_replace": 0}, text),
        "glm4_moe": ("Glm4MoeForCausalLM", {**HEADED, **ROUTED}, text),
        "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", LATENT, text),
        "dots1": ("Dots1ForCausalLM", {**HEADED, **ROUTED, "n_shared_experts": 1}, text),
        "llama4_text": (
            "Llama4ForCausalLM",
            {**HEADED, "intermediate_size_mlp": 64, "num_local_experts": 4, "interleave_moe_layer_step": 2,
             "attention_chunk_size": 8, "no_rope_layers": [1, 0]},
            text,
        ),
        "ernie4_5_moe": (
            "Ernie4_5_MoeForCausalLM",
            {**GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
             "moe_layer_start_index": 1},
            text,
        ),
        "exaone_moe": (
            "ExaoneMoeForCausalLM",
            {**HEADED, **ALTERNATING, **ROUTED, "num_experts": 4, "num_shared_experts": 1,
             "mlp_layer_types": ["dense", "sparse"]},
            text,
        ),
        "afmoe": (
            "AfmoeForCausalLM",
            {**EXPERTS, **ALTERNATING, "head_dim": 8, "num_dense_layers": 1, "num_shared_experts": 1},
            text,
        ),
        "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {**HEADED, "num_experts": 4, "moe_topk": 2}, text),
        "flex_olmo": ("FlexOlmoForCausalLM", EXPERTS, text),
        "jetmoe": (
            "JetMoeForCausalLM",
            {**IDS, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8,
             "intermediate_size": 64, "max_position_embeddings": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
            text,
        ),
        "minimax_m2": ("MiniMaxM2ForCausalLM", {**LOCAL_EXPERTS, "head_dim": 8}, text),
        "minimax": ("MiniMaxForCausalLM", {**LOCAL_EXPERTS, "head_dim": 8, "block_size": 8}, text),
        "switch_transformers": (
            "SwitchTransformersForConditionalGeneration",
            {**T5_LIKE, "num_experts": 4, "expert_capacity": 8, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1,
             "num_sparse_decoder_layers": 1},
            two_texts,
        ),
        "nllb-moe": (
            "NllbMoeForConditionalGeneration",
            {**BART_LIKE, "num_experts": 4, "expert_capacity": 8, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
            two_texts,
        ),
    },
    "state space": {
        "mamba": ("MambaForCausalLM", STATE_SPACE, text),
        "mamba2": (
            "Mamba2ForCausalLM", {**STATE_SPACE, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}, text,
        ),
        "falcon_mamba": ("FalconMambaForCausalLM", STATE_SPACE, text),
        "jamba": (
            "JambaForCausalLM",
            {**GROUPED, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
             "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False},
            text,
        ),
        "bamba": ("BambaForCausalLM", {**GROUPED, **MAMBA, "attn_layer_indices": [1]}, text),
        "zamba2": (
            "Zamba2ForCausalLM",
            {**COMMON, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"],
             "n_mamba_heads": 8, "mamba_d_state": 4, "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1,
             "use_mem_rope": True, "adapter_rank": 4},
            text,
        ),
        "nemotron_h": (
            "NemotronHForCausalLM",
            {**HEADED, **ROUTED, "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8,
             "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 1, "chunk_size": 8,
             "moe_shared_expert_intermediate_size": 16},
            text,
        ),
        "falcon_h1": ("FalconH1ForCausalLM", {**HEADED, **MAMBA, "mamba_d_ssm": 64, "mamba_n_groups": 1}, text),
        "granitemoehybrid": (
            "GraniteMoeHybridForCausalLM",
            {**LOCAL_EXPERTS, **MAMBA, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]},
            text,
        ),
        "recurrent_gemma": (
            "RecurrentGemmaForCausalLM",
            {**HEADED, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
            text,
        ),
        "rwkv": ("RwkvForCausalLM", {**STATE_SPACE, "attention_hidden_size": 32, "context_length": 64}, text),
        "lfm2": ("Lfm2ForCausalLM", {**GROUPED, "layer_types": ["conv", "full_attention"]}, text),
        "lfm2_moe": (
            "Lfm2MoeForCausalLM", {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}, text,
        ),
        "qwen3_next": (
            "Qwen3NextForCausalLM", {**EXPERTS, **LINEAR, "head_dim": 8, "shared_expert_intermediate_size": 16}, text,
        ),
        "qwen3_5_text": ("Qwen3_5ForCausalLM", {**HEADED, **LINEAR}, text),
        "olmo_hybrid": ("OlmoHybridForCausalLM", {**GROUPED, **LINEAR, "num_key_value_heads": 4}, text),
        "kimi_linear": (
            "KimiLinearForCausalLM",
            {**LATENT, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4,
             "linear_num_heads": 4, "linear_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
            text,
        ),
    },
}  # fmt: skip
