"""The command line: the recipe's own settings, all TrainingArguments, and defaults that fit the chosen model."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import HfArgumentParser, TrainingArguments

from adacc_hf.estimate.model_presets import PRESETS

Method = Literal["none", "full", "quantization", "adacc", "adacc_no_outlier", "compact", "adacc_compact", "compare"]


@dataclass(kw_only=True)
class ModelArguments:
    """Which model is trained."""

    model: str = field(
        default="demo",
        metadata={"help": f"{', '.join(PRESETS)}, or the hub id or folder of a causal language model's config."},
    )
    from_pretrained: bool = field(
        default=False, metadata={"help": "Start from the weights of a hub id or folder instead of random ones."}
    )
    attn_implementation: Literal["sdpa", "eager"] = field(
        default="sdpa", metadata={"help": "Attention in one fused operator, or in the single steps of the paper."}
    )


@dataclass(kw_only=True)
class DataArguments:
    """Which text it is trained on."""

    dataset: str = field(
        default="stdlib",
        metadata={
            "help": "pile (streamed from the hub), stdlib (the source text of the running Python's standard library, "
            "no download), or a file: .txt (documents end at lines holding only <|endoftext|>, or else at blank "
            'lines), .jsonl or .jsonl.zst with rows {"text": ...}; or a folder of such files.'
        },
    )
    pile_id: str = field(
        default="monology/pile-uncopyrighted",
        metadata={"help": "Hub id or folder streamed by --dataset pile; rows have a text column."},
    )
    tokenizer: str = field(
        default="train",
        metadata={"help": "Hub id or folder of a tokenizer, or train: byte-level BPE on the chosen text, cached."},
    )
    vocab_size: int = field(default=50257, metadata={"help": "Tokens of a trained tokenizer; at least 257."})
    tokenizer_documents: int = field(
        default=20_000, metadata={"help": "Training documents that a trained tokenizer reads at most."}
    )
    seq_len: int | None = field(
        default=None, metadata={"help": "Tokens per sequence; left out, the longest the model can take."}
    )
    validation_fraction: float = field(
        default=0.05, metadata={"help": "Share of the documents held out, between 0 and 1 (stdlib and files)."}
    )
    validation_documents: int = field(
        default=2000, metadata={"help": "First documents of the stream held out (--dataset pile)."}
    )
    max_eval_sequences: int = field(default=1000, metadata={"help": "Validation sequences used at most."})
    cloze_passages: int = field(
        default=0,
        metadata={"help": "Cloze passages made of held-out documents, left in the run folder for `adacc eval cloze`."},
    )
    cache_dir: str = field(
        default="runs/cache", metadata={"help": "Folder for prepared text and trained tokenizers; safe to delete."}
    )

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"--validation_fraction={self.validation_fraction} must lie between 0 and 1, say 0.05")
        for name in ("tokenizer_documents", "validation_documents", "max_eval_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)} must be at least 1")
        if self.cloze_passages < 0:
            raise ValueError(f"--cloze_passages={self.cloze_passages} must be 0 (none) or more, say 500")


@dataclass(kw_only=True)
class MethodArguments:
    """How activations are kept for the backward pass."""

    method: Method = field(
        default="adacc",
        metadata={
            "help": "none: keep all; full: recompute whole blocks (gradient checkpointing); quantization: compress "
            "all to per-token INT4; adacc: choose per activation; adacc_no_outlier: the same, outliers not set apart; "
            "compact: CompAct's optimizer; adacc_compact: both; "
            "compare: train once per method with the same seed and data, adacc at half and at a quarter of plain's "
            "activation bytes, and print one table."
        },
    )
    memory_budget: str = field(
        default="auto",
        metadata={
            "help": "Of adacc methods: auto (the device's free memory), a fraction of plain training's activation "
            "bytes such as 0.5, or an absolute peak such as 20GiB or 21474836480."
        },
    )
    compact_rank: str = field(
        default="0.25",
        metadata={
            "help": "Of compact and adacc_compact: a part of each layer's inputs, such as 0.25, or a number of them, "
            "such as 8. CompAct's paper pretrains with --learning_rate 0.01."
        },
    )
    report: bool = field(
        default=True, metadata={"help": "Leave report.md and report.html with the policy in the run folder."}
    )


@dataclass(frozen=True, kw_only=True)
class RecipeArguments:
    """All settings of one run."""

    model: ModelArguments
    data: DataArguments
    method: MethodArguments
    training: TrainingArguments


# The demo: every method trains in half a minute on 2 CPU cores, and the loss falls by more than half a nat.
_DEMO_DEFAULTS = {
    "vocab_size": PRESETS["demo"].vocab_size,
    "max_eval_sequences": 32,
    "memory_budget": "0.5",
    "max_steps": 28,
    "per_device_train_batch_size": 4,
    "learning_rate": 7e-4,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 6,
    "logging_steps": 7,
}
# GPT-2's usual pre-training settings, for the larger presets and the hub's models.
_PRETRAINING_DEFAULTS = {
    "max_steps": 10_000,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 500,
    "weight_decay": 0.1,
    "save_total_limit": 2,
}


def parse_arguments(argv: list[str]) -> RecipeArguments:
    """The settings on the command line, completed by the defaults of the chosen model.

    Raises ValueError for a setting out of range; argparse itself exits with status 2 for one that it cannot parse.
    """
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, MethodArguments, TrainingArguments), description=__doc__, allow_abbrev=False
    )
    parser.set_defaults(**_defaults_for(argv))
    model, data, method, training = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    _check_resume(training.resume_from_checkpoint)
    return RecipeArguments(model=model, data=data, method=method, training=training)


def _defaults_for(argv: list[str]) -> dict[str, object]:
    """The defaults that depend on --model and --method, which are therefore read first."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--model", default="demo")
    early.add_argument("--method", default="adacc")
    known, _ = early.parse_known_args(argv)
    defaults = _DEMO_DEFAULTS if known.model == "demo" else _PRETRAINING_DEFAULTS
    # The Trainer's own default pins memory, and warns where there is no device to pin it for.
    machine = {"dataloader_pin_memory": torch.cuda.is_available()}
    return {**defaults, **machine, "output_dir": f"runs/{Path(known.model).name}-{known.method}"}


def _check_resume(checkpoint: str | None) -> None:
    if checkpoint is not None and not Path(checkpoint, "trainer_state.json").is_file():
        raise FileNotFoundError(
            f"--resume_from_checkpoint={checkpoint} is no checkpoint folder (it has no trainer_state.json); "
            "name a checkpoint-<step> folder of an earlier run"
        )
