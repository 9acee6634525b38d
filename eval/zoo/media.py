"""Tiny architectures for images, videos and audio."""

from __future__ import annotations

from adacc_hf.eval.zoo.architecture import Table, row
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
        "vit": row("ViTForImageClassification", image, IMAGE),
        "deit": row("DeiTForImageClassification", image, IMAGE),
        "beit": row("BeitForImageClassification", image, IMAGE),
        "dinov2": row("Dinov2ForImageClassification", image, IMAGE),
        "ijepa": row("IJepaForImageClassification", image, IMAGE),
        "siglip_vision_model": row("SiglipForImageClassification", image, vision_config=IMAGE),
        "vit_mae": row("ViTMAEForPreTraining", bare_image, IMAGE, decoder_hidden_size=16, decoder_num_hidden_layers=2,
            decoder_num_attention_heads=2, decoder_intermediate_size=32),
        "swin": row("SwinForImageClassification", large_image, image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
            num_heads=[2, 4], window_size=4, drop_path_rate=0.0),
        "segformer": row("SegformerForImageClassification", large_image, num_encoder_blocks=2, depths=[2, 2],
            sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[2, 4],
            mlp_ratios=[2, 2], drop_path_rate=0.0),
        "videomae": row("VideoMAEForVideoClassification", video, IMAGE, num_frames=4, tubelet_size=2),
        "timesformer": row("TimesformerForVideoClassification", video, IMAGE, num_frames=4),
        "clip": row("CLIPModel", image_and_text, text_config=COMMON, vision_config=IMAGE, projection_dim=16),
    },
    "speech": {
        "whisper": row("WhisperForConditionalGeneration", mel_and_text, BART_LIKE, max_source_positions=16,
            max_target_positions=32, num_mel_bins=8),
        "speech_to_text": row("Speech2TextForConditionalGeneration", frames_and_text, BART_LIKE,
            max_source_positions=32, max_target_positions=32, input_feat_per_channel=8, conv_channels=16),
        "wav2vec2": row("Wav2Vec2ForCTC", wave, WAVE),
        "hubert": row("HubertForCTC", wave, WAVE),
        "wavlm": row("WavLMForCTC", wave, WAVE, num_buckets=8, max_bucket_distance=16),
        "unispeech": row("UniSpeechForCTC", wave, WAVE),
        "wav2vec2-conformer": row("Wav2Vec2ConformerForCTC", wave, WAVE, conv_depthwise_kernel_size=5),
        "audio-spectrogram-transformer": row("ASTForAudioClassification", spectrogram, SIZES, intermediate_size=64,
            patch_size=4, frequency_stride=4, time_stride=4, max_length=32, num_mel_bins=16),
    },
}  # fmt: skip
