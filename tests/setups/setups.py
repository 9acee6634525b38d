"""Twelve public training set-ups, scaled down to 3 or 4 blocks, each written as its user would write it.

A builder takes the model's width, the training arguments that all set-ups share, and the callbacks, and returns a
Trainer. Structure, batch sizes and gradient accumulation are those of the public script or recipe. Models are built
from configurations with random weights.
"""

from collections.abc import Callable, Iterable
from typing import Any

import local_data
import torch
import transformers
from datasets import Dataset
from local_data import VOCABULARY_SIZE, Draw, rows
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)  # fmt: skip
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

Builder = Callable[[int, dict[str, Any], list[TrainerCallback]], Trainer]
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def decoder_sizes(width: int) -> dict[str, Any]:
    """Return the sizes of a decoder in LLaMA's shape: 4 blocks, grouped queries, a gated MLP."""
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        **TOKENS,
    }


def encoder_sizes(width: int) -> dict[str, int]:
    """Return the sizes of an encoder in BERT's shape."""
    return {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 4, "num_attention_heads": 4}


def built(name: str, arguments: dict[str, Any] | None = None, **sizes: Any) -> Any:
    """Return a model of Transformers with random weights."""
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**sizes), **arguments or {})


def accumulated(options: dict[str, Any], num_micro: int = 2, bf16: bool = True) -> dict[str, Any]:
    return {"gradient_accumulation_steps": num_micro, "bf16": bf16, **options}


def lora(**settings: Any) -> LoraConfig:
    """Return a LoRA configuration for all linear layers of a causal language model."""
    return LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": [*ATTENTION, *MLP], **settings})


def padded(sequences: Iterable[Any], value: float) -> torch.Tensor:
    """Return one tensor of sequences of several lengths."""
    return pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True, padding_value=value)


def run_clm_gpt2(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """Transformers' run_clm.py: texts are joined and cut into blocks of one size."""
    ids = rows(lambda draw: {"input_ids": draw.ids(128, 128)})
    sizes = {"n_embd": width, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY_SIZE}
    return Trainer(
        model=built("GPT2LMHeadModel", **sizes, bos_token_id=1, eos_token_id=1),
        args=TrainingArguments(per_device_train_batch_size=8, **options),
        train_dataset=[{**row, "labels": row["input_ids"]} for row in ids],
        data_collator=default_data_collator,
        callbacks=callbacks,
    )


def vit(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """Transformers' run_image_classification.py: 196 patches, as 224 pixels have in ViT-B/16."""

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pixel_values = torch.stack([torch.tensor(example["pixel_values"]) for example in examples])
        return {"pixel_values": pixel_values, "labels": torch.tensor([example["labels"] for example in examples])}

    return Trainer(
        model=built("ViTForImageClassification", **encoder_sizes(width), image_size=112, patch_size=8, num_labels=10),
        args=TrainingArguments(per_device_train_batch_size=8, **options),
        train_dataset=rows(lambda draw: {"pixel_values": draw.array(3, 112, 112), "labels": draw.label(10)}),
        data_collator=collate,
        callbacks=callbacks,
    )


def run_summarization_t5(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """Transformers' run_summarization.py: long texts, and targets of less than 32 tokens."""
    sizes = {"d_model": width, "d_kv": width // 4, "d_ff": 4 * width, "num_layers": 2, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = built("T5ForConditionalGeneration", vocab_size=VOCABULARY_SIZE, **sizes, **tokens)
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(per_device_train_batch_size=4, **options),
        train_dataset=rows(lambda draw: {"input_ids": draw.ids(24, 200), "labels": draw.ids(8, 20)}),
        data_collator=DataCollatorForSeq2Seq(local_data.tokenizer(), model=model),
        callbacks=callbacks,
    )


def sft_handbook(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """alignment-handbook's SFT with LoRA (zephyr-7b-sft-qlora): chats, under bfloat16 autocast."""

    def chat(draw: Draw) -> dict[str, Any]:
        question, answer = draw.text(5, 60), draw.text(20, 160)
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    return SFTTrainer(
        model=built("MistralForCausalLM", **decoder_sizes(width)),
        args=SFTConfig(per_device_train_batch_size=4, max_length=256, **accumulated(options)),
        train_dataset=Dataset.from_list(rows(chat)),
        processing_class=local_data.tokenizer(),
        peft_config=lora(r=16, lora_alpha=16, lora_dropout=0.05),
        callbacks=callbacks,
    )


def dpo_handbook(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """alignment-handbook's DPO with LoRA (zephyr-7b-dpo-qlora): the reference is the model without its adapters."""

    def preference(draw: Draw) -> dict[str, Any]:
        return {"prompt": draw.text(5, 40), "chosen": draw.text(20, 120), "rejected": draw.text(20, 120)}

    return DPOTrainer(
        model=built("MistralForCausalLM", **decoder_sizes(width)),
        args=DPOConfig(per_device_train_batch_size=2, beta=0.01, max_length=256, **accumulated(options)),
        train_dataset=Dataset.from_list(rows(preference)),
        processing_class=local_data.tokenizer(),
        peft_config=lora(r=16, lora_alpha=16, lora_dropout=0.05),
        callbacks=callbacks,
    )


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    """Reward completions with many different words."""
    return [float(len(set(completion.split()))) for completion in completions]


def grpo_open_r1(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """open-r1's GRPO: four completions per prompt, generated by the model that is trained."""
    return GRPOTrainer(
        model=built("Qwen2ForCausalLM", **decoder_sizes(width)),
        reward_funcs=distinct_words,
        args=GRPOConfig(
            per_device_train_batch_size=4, num_generations=4, max_completion_length=32, **accumulated(options)
        ),
        train_dataset=Dataset.from_list(rows(lambda draw: {"prompt": draw.text(10, 90)})),
        processing_class=local_data.tokenizer(),
        callbacks=callbacks,
    )


def lora_llama_factory(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """LLaMA-Factory's llama3_lora_sft.yaml: one text per micro-batch, padded to a multiple of 8."""

    def answered(draw: Draw) -> dict[str, Any]:
        prompt, answer = draw.ids(10, 80), draw.ids(20, 200)
        return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}

    model = get_peft_model(built("LlamaForCausalLM", **decoder_sizes(width)), lora(r=8, lora_alpha=16))
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(per_device_train_batch_size=1, **accumulated(options, 8)),
        train_dataset=rows(answered),
        data_collator=DataCollatorForSeq2Seq(local_data.tokenizer(), pad_to_multiple_of=8),
        callbacks=callbacks,
    )


def lora_packed_axolotl(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """axolotl's LoRA with sample_packing: texts fill rows of 256 tokens, and their positions begin at 0."""

    def packed(draw: Draw) -> dict[str, Any]:
        ids: list[int] = []
        positions: list[int] = []
        while len(ids) < 256:
            text = draw.ids(16, 160)[: 256 - len(ids)]
            ids += text
            positions += range(len(text))
        return {"input_ids": ids, "labels": ids, "position_ids": positions}

    settings = {"r": 32, "lora_alpha": 16, "lora_dropout": 0.05}
    return Trainer(
        model=get_peft_model(built("LlamaForCausalLM", **decoder_sizes(width)), lora(**settings)),
        args=TrainingArguments(per_device_train_batch_size=2, **accumulated(options)),
        train_dataset=rows(packed),
        data_collator=default_data_collator,
        callbacks=callbacks,
    )


def llava_lora(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """LLaVA's finetune_lora.sh: LoRA in the language model, the projector trained, the vision tower frozen."""
    image, image_token, num_patches = 48, local_data.SPECIAL_TOKENS.index("<image>"), 36
    vision = transformers.CLIPVisionConfig(
        **{**encoder_sizes(width), "num_hidden_layers": 3}, image_size=image, patch_size=8
    )
    text = transformers.LlamaConfig(**decoder_sizes(width))
    language_layers = rf".*language_model.*\.({'|'.join([*ATTENTION, *MLP])})"
    settings = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "modules_to_save": ["multi_modal_projector"]}
    llava = built(
        "LlavaForConditionalGeneration", vision_config=vision, text_config=text, image_token_index=image_token
    )
    model = get_peft_model(llava, lora(target_modules=language_layers, **settings))

    def answered(draw: Draw) -> dict[str, Any]:
        prompt, answer = [image_token] * num_patches + draw.ids(5, 30), draw.ids(10, 120)
        labels = [-100] * len(prompt) + answer
        return {"input_ids": prompt + answer, "labels": labels, "pixel_values": draw.array(3, image, image)}

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        input_ids = padded((example["input_ids"] for example in examples), 0)
        return {
            "input_ids": input_ids,
            "attention_mask": (input_ids != 0).long(),
            "labels": padded((example["labels"] for example in examples), -100),
            "pixel_values": torch.stack([torch.tensor(example["pixel_values"]) for example in examples]),
        }

    return Trainer(
        model=model,
        args=TrainingArguments(per_device_train_batch_size=4, **accumulated(options)),
        train_dataset=rows(answered),
        data_collator=collate,
        callbacks=callbacks,
    )


def whisper(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """Transformers' run_speech_recognition_seq2seq.py: sounds of one length, transcripts of several."""
    num_frames = 400
    sizes: dict[str, Any] = {"d_model": width, "max_source_positions": num_frames // 2, "max_target_positions": 64}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 4 * width}
    tokens = {"vocab_size": VOCABULARY_SIZE, "decoder_start_token_id": 2, **TOKENS}
    model = built("WhisperForConditionalGeneration", **sizes, **tokens)

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        features = torch.stack([torch.tensor(example["input_features"]) for example in examples])
        return {"input_features": features, "labels": padded((example["labels"] for example in examples), -100)}

    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(per_device_train_batch_size=4, **accumulated(options, bf16=False)),
        train_dataset=rows(lambda draw: {"input_features": draw.array(80, num_frames), "labels": draw.ids(5, 50)}),
        data_collator=collate,
        callbacks=callbacks,
    )


def wav2vec2_ctc(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """Transformers' run_speech_recognition_ctc.py: sounds of several lengths, a frozen feature encoder."""
    convolutions = {"conv_dim": (width // 2,) * 7, "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "layer"}
    settings = {"do_stable_layer_norm": True, "layerdrop": 0.0, "ctc_loss_reduction": "mean"}
    model = built("Wav2Vec2ForCTC", vocab_size=32, **encoder_sizes(width), **convolutions, **settings)
    model.freeze_feature_encoder()

    def spoken(draw: Draw) -> dict[str, Any]:
        labels = [label % 31 + 1 for label in draw.ids(5, 20)]
        return {"input_values": draw.array(8000 + draw.label(24000)), "labels": labels}

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        sounds = [example["input_values"] for example in examples]
        return {
            "input_values": padded(sounds, 0.0),
            "attention_mask": padded(([1] * len(sound) for sound in sounds), 0),
            "labels": padded((example["labels"] for example in examples), -100),
        }

    return Trainer(
        model=model,
        args=TrainingArguments(per_device_train_batch_size=4, **accumulated(options, bf16=False)),
        train_dataset=rows(spoken),
        data_collator=collate,
        callbacks=callbacks,
    )


class TripletTrainer(Trainer):
    """SentenceTransformerTrainer with MultipleNegativesRankingLoss: each step calls the encoder once per column."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        anchors, positives, negatives = (self._embed(model, inputs, column) for column in TRIPLET)
        scores = 20 * functional.normalize(anchors, dim=1) @ functional.normalize(torch.cat([positives, negatives])).T
        loss = functional.cross_entropy(scores, torch.arange(len(anchors), device=scores.device))
        return (loss, {}) if return_outputs else loss

    @staticmethod
    def _embed(model: Any, inputs: dict[str, Any], column: str) -> torch.Tensor:
        """Return the mean of the tokens' embeddings."""
        mask = inputs[f"{column}_attention_mask"]
        hidden = model(input_ids=inputs[f"{column}_input_ids"], attention_mask=mask).last_hidden_state
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


TRIPLET = ("anchor", "positive", "negative")


def triplets(width: int, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """sentence-transformers' training on triplets: short questions, longer passages."""

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {}
        for column in TRIPLET:
            batch[f"{column}_input_ids"] = padded((example[column] for example in examples), 0)
            batch[f"{column}_attention_mask"] = (batch[f"{column}_input_ids"] != 0).long()
        return batch

    return TripletTrainer(
        model=built("BertModel", {"add_pooling_layer": False}, vocab_size=VOCABULARY_SIZE, **encoder_sizes(width)),
        args=TrainingArguments(per_device_train_batch_size=16, remove_unused_columns=False, **options),
        train_dataset=rows(
            lambda draw: {"anchor": draw.ids(6, 24), "positive": draw.ids(20, 120), "negative": draw.ids(20, 120)}
        ),
        data_collator=collate,
        callbacks=callbacks,
    )


SETUPS: dict[str, Builder] = {
    "run_clm-gpt2": run_clm_gpt2,
    "vit": vit,
    "run_summarization-t5": run_summarization_t5,
    "sft-handbook": sft_handbook,
    "dpo-handbook": dpo_handbook,
    "grpo-open-r1": grpo_open_r1,
    "lora-llama-factory": lora_llama_factory,
    "lora-packed-axolotl": lora_packed_axolotl,
    "llava-lora": llava_lora,
    "whisper": whisper,
    "wav2vec2-ctc": wav2vec2_ctc,
    "triplets": triplets,
}
