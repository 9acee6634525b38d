"""The architectures that are checked: tiny random configurations of Transformers' own model classes, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

BATCH, TOKENS, TARGETS, VOCABULARY = 2, 16, 12, 100
DROPOUT = 0.1
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row of the table: what to build and what to feed it."""

    name: str
    """The model type of Transformers."""
    family: str
    model_class: str
    config_class: str
    settings: Mapping[str, Any]
    batch: Callable[[torch.Generator], Batch] = field(repr=False)
    block_classes: tuple[str, ...] | None = None
    """Its layers, where they are no GradientCheckpointingLayer of Transformers."""

    def build(self, seed: int = 0) -> nn.Module:
        """The model in train mode with random weights: dropout on, caches off, sdpa where it has it."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config_class)(**self.settings)
        for part in _configs(config):
            _set_up(part, given=_names(self.settings))
        return getattr(transformers, self.model_class)._from_config(config).train()

    def make_batch(self, seed: int) -> Batch:
        """A batch with labels; every seed gives other values of the same shapes."""
        return self.batch(torch.Generator().manual_seed(seed))


def _configs(config: Any) -> list[Any]:
    """`config` and every configuration inside it: T5's decoder reads `use_cache` from a copy of its own."""
    parts = [value for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig)]
    return [config, *(inner for part in parts for inner in _configs(part))]


def _names(settings: Mapping[str, Any]) -> set[str]:
    """The names that `settings` and the mappings in it give a value to."""
    inner = [_names(value) for value in settings.values() if isinstance(value, Mapping)]
    return set(settings).union(*inner)


def _set_up(config: Any, given: set[str]) -> None:
    """Switch caches off, and every dropout on that the settings do not name; layerdrop, which skips blocks, off."""
    config.use_cache = False
    for name, value in vars(config).items():
        is_rate = isinstance(value, (int, float)) and not isinstance(value, bool) and name not in given
        if is_rate and "layerdrop" in name:
            setattr(config, name, 0.0)
        elif is_rate and ("dropout" in name or "pdrop" in name):
            setattr(config, name, DROPOUT)


def _tokens(generator: torch.Generator, length: int = TOKENS) -> torch.Tensor:
    """[BATCH, length] tokens that are none of the special ones."""
    return torch.randint(5, VOCABULARY - 5, (BATCH, length), generator=generator)


def text(generator: torch.Generator) -> Batch:
    ids = _tokens(generator)
    return {"input_ids": ids, "labels": ids}


def padded_text(generator: torch.Generator) -> Batch:
    """Text whose second sentence ends in four padding tokens."""
    ids, mask = _tokens(generator), torch.ones(BATCH, TOKENS, dtype=torch.long)
    ids[1, -4:], mask[1, -4:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def two_texts(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, TARGETS)}


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
    return {"input_ids": _tokens(generator), "pixel_values": pixels, "return_loss": True}


def mel_and_text(generator: torch.Generator) -> Batch:
    features = torch.randn(BATCH, 8, 32, generator=generator)
    return {"input_features": features, "labels": _tokens(generator, TARGETS)}


def frames_and_text(generator: torch.Generator) -> Batch:
    features = torch.randn(BATCH, 32, 8, generator=generator)
    return {"input_features": features, "labels": _tokens(generator, TARGETS)}


def wave(generator: torch.Generator) -> Batch:
    return {"input_values": torch.randn(BATCH, 640, generator=generator), "labels": _tokens(generator, 4)}


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
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
STATE_SPACE = {**IDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}

_TABLE: dict[str, dict[str, tuple[str, dict[str, Any], Callable[[torch.Generator], Batch]]]] = {
    "decoder": {
        "gpt2": ("GPT2LMHeadModel", {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, text),
        "llama": ("LlamaForCausalLM", GROUPED, padded_text),
        "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 8}, text),
        "ministral": ("MinistralForCausalLM", {**HEADED, "sliding_window": 8}, text),
        "qwen2": ("Qwen2ForCausalLM", GROUPED, padded_text),
        "qwen3": ("Qwen3ForCausalLM", HEADED, text),
        "gemma": ("GemmaForCausalLM", HEADED, text),
        "gemma2": ("Gemma2ForCausalLM", {**HEADED, **ALTERNATING}, text),
        "gemma3_text": ("Gemma3ForCausalLM", {**HEADED, **ALTERNATING}, text),
        "phi": ("PhiForCausalLM", COMMON, text),
        "phi3": ("Phi3ForCausalLM", GROUPED, text),
        "gpt_neo": (
            "GPTNeoForCausalLM",
            {**IDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
             "window_size": 8, "max_position_embeddings": 64},
            text,
        ),
        "gpt_neox": ("GPTNeoXForCausalLM", COMMON, text),
        "gptj": (
            "GPTJForCausalLM",
            {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
            text,
        ),
        "gpt_bigcode": (
            "GPTBigCodeForCausalLM", {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, text,
        ),
        "codegen": (
            "CodeGenForCausalLM",
            {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
            text,
        ),
        "opt": ("OPTForCausalLM", {**COMMON, "ffn_dim": 64, "word_embed_proj_dim": 32}, padded_text),
        "bloom": ("BloomForCausalLM", {**IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, padded_text),
        "falcon": ("FalconForCausalLM", COMMON, text),
        "mpt": (
            "MptForCausalLM",
            # The configuration declares attn_pdrop an int, so that only 0 and 1 pass its checks.
            {**IDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "attn_config": {"attn_pdrop": 0}},
            text,
        ),
        "stablelm": ("StableLmForCausalLM", GROUPED, text),
        "starcoder2": ("Starcoder2ForCausalLM", GROUPED, text),
        "olmo": ("OlmoForCausalLM", GROUPED, text),
        "olmo2": ("Olmo2ForCausalLM", GROUPED, text),
        "olmo3": ("Olmo3ForCausalLM", {**GROUPED, **ALTERNATING}, text),
        "granite": ("GraniteForCausalLM", GROUPED, text),
        "cohere": ("CohereForCausalLM", GROUPED, text),
        "cohere2": ("Cohere2ForCausalLM", {**GROUPED, **ALTERNATING}, text),
        "glm": ("GlmForCausalLM", HEADED, text),
        "glm4": ("Glm4ForCausalLM", HEADED, text),
        "persimmon": ("PersimmonForCausalLM", COMMON, text),
        "biogpt": ("BioGptForCausalLM", COMMON, text),
        "xglm": (
            "XGLMForCausalLM",
            {**IDS, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "max_position_embeddings": 64},
            text,
        ),
        "smollm3": ("SmolLM3ForCausalLM", {**GROUPED, "no_rope_layers": [1, 0]}, text),
        "exaone4": ("Exaone4ForCausalLM", {**GROUPED, **ALTERNATING}, text),
        "helium": ("HeliumForCausalLM", HEADED, text),
        "nemotron": ("NemotronForCausalLM", HEADED, text),
        "diffllama": ("DiffLlamaForCausalLM", {**GROUPED, "attention_dropout": 0.0}, text),
        "bitnet": ("BitNetForCausalLM", GROUPED, text),
        "apertus": ("ApertusForCausalLM", GROUPED, text),
        "arcee": ("ArceeForCausalLM", GROUPED, text),
        "seed_oss": ("SeedOssForCausalLM", HEADED, text),
        "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", HEADED, text),
    },
    "encoder": {
        "bert": ("BertForMaskedLM", COMMON, padded_text),
        "roberta": ("RobertaForMaskedLM", COMMON, padded_text),
        "electra": ("ElectraForMaskedLM", {**COMMON, "embedding_size": 32}, padded_text),
        "albert": ("AlbertForMaskedLM", {**COMMON, "embedding_size": 16}, padded_text),
        "distilbert": (
            "DistilBertForMaskedLM",
            {**IDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
            padded_text,
        ),
        "deberta": (
            "DebertaForMaskedLM", {**COMMON, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, padded_text,
        ),
        "deberta-v2": (
            "DebertaV2ForMaskedLM", {**COMMON, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, padded_text,
        ),
        "modernbert": (
            "ModernBertForMaskedLM",
            {**COMMON, "cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 8},
            padded_text,
        ),
        "esm": ("EsmForMaskedLM", {**COMMON, "mask_token_id": 4}, padded_text),
        "roformer": ("RoFormerForMaskedLM", COMMON, padded_text),
        "convbert": ("ConvBertForMaskedLM", {**COMMON, "embedding_size": 32, "head_ratio": 2}, padded_text),
        "ernie": ("ErnieForMaskedLM", COMMON, padded_text),
        "megatron-bert": ("MegatronBertForMaskedLM", COMMON, padded_text),
        "rembert": (
            "RemBertForMaskedLM", {**COMMON, "input_embedding_size": 16, "output_embedding_size": 16}, padded_text,
        ),
        "mobilebert": (
            "MobileBertForMaskedLM",
            {**COMMON, "embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
            padded_text,
        ),
        "layoutlm": ("LayoutLMForMaskedLM", COMMON, padded_text),
        "fnet": ("FNetForMaskedLM", COMMON, text),
        "nystromformer": (
            "NystromformerForMaskedLM",
            {**COMMON, "num_landmarks": TOKENS, "segment_means_seq_len": TOKENS},
            padded_text,
        ),
        "big_bird": ("BigBirdForMaskedLM", {**COMMON, "attention_type": "original_full"}, padded_text),
        "longformer": ("LongformerForMaskedLM", {**COMMON, "attention_window": 4}, padded_text),
    },
    "encoder-decoder": {
        "t5": ("T5ForConditionalGeneration", T5_LIKE, two_texts),
        "mt5": ("MT5ForConditionalGeneration", T5_LIKE, two_texts),
        "umt5": ("UMT5ForConditionalGeneration", T5_LIKE, two_texts),
        "longt5": ("LongT5ForConditionalGeneration", {**T5_LIKE, "local_radius": 3}, two_texts),
        "bart": ("BartForConditionalGeneration", BART_LIKE, two_texts),
        "mbart": ("MBartForConditionalGeneration", BART_LIKE, two_texts),
        "pegasus": ("PegasusForConditionalGeneration", BART_LIKE, two_texts),
        "marian": ("MarianMTModel", BART_LIKE, two_texts),
        "blenderbot": ("BlenderbotForConditionalGeneration", BART_LIKE, two_texts),
        "m2m_100": ("M2M100ForConditionalGeneration", BART_LIKE, two_texts),
        "plbart": ("PLBartForConditionalGeneration", BART_LIKE, two_texts),
        "led": (
            "LEDForConditionalGeneration",
            {**BART_LIKE, "attention_window": 4, "max_encoder_position_embeddings": 64,
             "max_decoder_position_embeddings": 64},
            two_texts,
        ),
        "prophetnet": (
            "ProphetNetForConditionalGeneration",
            {**STARTED, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2,
             "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64,
             "decoder_ffn_dim": 64, "max_position_embeddings": 64},
            two_texts,
        ),
    },
    "vision": {
        "vit": ("ViTForImageClassification", IMAGE, image),
        "deit": ("DeiTForImageClassification", IMAGE, image),
        "beit": ("BeitForImageClassification", IMAGE, image),
        "dinov2": ("Dinov2ForImageClassification", IMAGE, image),
        "ijepa": ("IJepaForImageClassification", IMAGE, image),
        "siglip_vision_model": ("SiglipForImageClassification", {"vision_config": IMAGE}, image),
        "vit_mae": (
            "ViTMAEForPreTraining",
            {**IMAGE, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2,
             "decoder_intermediate_size": 32},
            bare_image,
        ),
        "swin": (
            "SwinForImageClassification",
            {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
             "window_size": 4, "drop_path_rate": 0.0},
            large_image,
        ),
        "segformer": (
            "SegformerForImageClassification",
            {"num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
             "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
             "drop_path_rate": 0.0},
            large_image,
        ),
        "videomae": ("VideoMAEForVideoClassification", {**IMAGE, "num_frames": 4, "tubelet_size": 2}, video),
        "timesformer": ("TimesformerForVideoClassification", {**IMAGE, "num_frames": 4}, video),
        "clip": ("CLIPModel", {"text_config": COMMON, "vision_config": IMAGE, "projection_dim": 16}, image_and_text),
    },
    "speech": {
        "whisper": (
            "WhisperForConditionalGeneration",
            {**BART_LIKE, "max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8},
            mel_and_text,
        ),
        "speech_to_text": (
            "Speech2TextForConditionalGeneration",
            {**BART_LIKE, "max_source_positions": 32, "max_target_positions": 32, "input_feat_per_channel": 8,
             "conv_channels": 16},
            frames_and_text,
        ),
        "wav2vec2": ("Wav2Vec2ForCTC", WAVE, wave),
        "hubert": ("HubertForCTC", WAVE, wave),
        "wavlm": ("WavLMForCTC", {**WAVE, "num_buckets": 8, "max_bucket_distance": 16}, wave),
        "unispeech": ("UniSpeechForCTC", WAVE, wave),
        "wav2vec2-conformer": ("Wav2Vec2ConformerForCTC", {**WAVE, "conv_depthwise_kernel_size": 5}, wave),
        "audio-spectrogram-transformer": (
            "ASTForAudioClassification",
            {**SIZES, "intermediate_size": 64, "patch_size": 4, "frequency_stride": 4, "time_stride": 4,
             "max_length": 32, "num_mel_bins": 16},
            spectrogram,
        ),
    },
    "mixture of experts": {
        "mixtral": ("MixtralForCausalLM", LOCAL_EXPERTS, text),
        "qwen2_moe": ("Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 16}, text),
        "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 8}, text),
        "olmoe": ("OlmoeForCausalLM", EXPERTS, text),
        "phimoe": ("PhimoeForCausalLM", LOCAL_EXPERTS, text),
        "granitemoe": ("GraniteMoeForCausalLM", LOCAL_EXPERTS, text),
        "gpt_oss": ("GptOssForCausalLM", {**LOCAL_EXPERTS, **ALTERNATING, "head_dim": 8}, text),
        "deepseek_v3": (
            "DeepseekV3ForCausalLM",
            {**COMMON, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
             "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8,
             "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
            text,
        ),
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
        "bamba": (
            "BambaForCausalLM",
            {**GROUPED, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4,
             "mamba_chunk_size": 8},
            text,
        ),
        "recurrent_gemma": (
            "RecurrentGemmaForCausalLM",
            {**HEADED, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
            text,
        ),
        "rwkv": ("RwkvForCausalLM", {**STATE_SPACE, "attention_hidden_size": 32, "context_length": 64}, text),
        "lfm2": ("Lfm2ForCausalLM", {**GROUPED, "layer_types": ["conv", "full_attention"]}, text),
        "qwen3_next": (
            "Qwen3NextForCausalLM",
            {**EXPERTS, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
             "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
             "linear_key_head_dim": 8, "linear_value_head_dim": 8},
            text,
        ),
    },
}  # fmt: skip


BLOCK_CLASSES = {"albert": ("AlbertLayer",)}


def _config_class(model_class: str) -> str:
    """The configuration of a model class, as Transformers names it on the class itself."""
    return getattr(transformers, model_class).config_class.__name__


def architectures() -> dict[str, Architecture]:
    """Every architecture of the table, by name, in the table's order."""
    return {
        name: Architecture(
            name=name,
            family=family,
            model_class=model_class,
            config_class=_config_class(model_class),
            settings=settings,
            batch=batch,
            block_classes=BLOCK_CLASSES.get(name),
        )
        for family, rows in _TABLE.items()
        for name, (model_class, settings, batch) in rows.items()
    }
