"""Tiny architectures for images, videos and audio."""

from __future__ import annotations

from adacc_hf.eval.zoo.architecture import Table
from adacc_hf.eval.zoo.parts import (
    BART_LIKE,
    COMMON,
    IMAGE,
    SIZES,
    WAVE,
    bare_image,
    frames_and_text,
    image,
    image_and_text,
    large_image,
    mel_and_text,
    spectrogram,
    video,
    wave,
)

MEDIA: Table = {
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
}  # fmt: skip
