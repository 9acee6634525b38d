"""Command line of the recipe: the recipe's own settings, all TrainingArguments, and defaults for the chosen model."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import HfArgumentParser, TrainingArguments

from adacc_hf.estimate.presets import PRESETS

Method = Literal["none", "full", "quantization", "adacc", "adacc_no_outlier", "compact", "adacc_compact", "compare"]


@dataclass(kw_only=True)
class ModelArguments:
    """Settings of the model that the recipe trains."""

    model: str = field(
        default="demo",
        metadata={"help": f"{', '.join(PRESETS)}, or the hub id or folder of a causal language model's config."},
    )
    from_pretrained: bool = field(
        default=False, metadata={"help": "Start from the weights of a hub id or folder instead of random ones."}
    )
    attn_implementation: Literal["sdpa", "eager"] = field(
        default="sdpa",
        metadata={"help": "Attention in one fused operator (sdpa), or in separate operators as in the paper (eager)."},
    )


@dataclass(kw_only=True)
class DataArguments:
    """Settings of the training text and its tokenizer."""

    dataset: str = field(
        default="stdlib",
        metadata={
            "help": "pile (streamed from the hub), stdlib (the source text of the running Python's standard library, "
            "no download), or a file: .txt (documents are separated by blank lines), "
            '.jsonl or .jsonl.zst with rows {"text": ...}; or a folder of such files.'
        },
    )
    pile_id: str = field(
        default="monology/pile-uncopyrighted",
        metadata={"help": "Hub id or folder streamed by --dataset pile; rows have a text column."},
    )
    tokenizer: str = field(
        default="train",
        metadata={
            "help": "Hub id or folder of a tokenizer, or train to train a byte-level BPE on the chosen text (cached)."
        },
    )
    vocab_size: int = field(default=50257, metadata={"help": "Vocabulary size of a trained tokenizer; at least 257."})
    tokenizer_documents: int = field(
        default=20_000, metadata={"help": "Maximum number of training documents for a trained tokenizer."}
    )
    seq_len: int | None = field(
        default=None, metadata={"help": "Tokens per sequence (default: the model's context length)."}
    )
    validation_fraction: float = field(
        default=0.05, metadata={"help": "Fraction of the documents held out, between 0 and 1 (stdlib and files)."}
    )
    validation_documents: int = field(
        default=2000, metadata={"help": "Number of documents held out, from the start of the stream (--dataset pile)."}
    )
    max_eval_sequences: int = field(default=1000, metadata={"help": "Maximum number of validation sequences."})
    cache_dir: str = field(
        default="runs/cache", metadata={"help": "Folder for prepared text and trained tokenizers; safe to delete."}
    )

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"--validation_fraction={self.validation_fraction} must lie between 0 and 1, say 0.05")
        for name in ("tokenizer_documents", "validation_documents", "max_eval_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)} must be at least 1")


@dataclass(kw_only=True)
class MethodArguments:
    """Settings of the method by which the recipe stores activations for the backward pass."""

    method: Method = field(
        default="adacc",
        metadata={
            "help": "none: retain all activations; full: recompute whole blocks (gradient checkpointing); "
            "quantization: compress all activations to per-token INT4; adacc: choose per activation; "
            "adacc_no_outlier: adacc without separate outlier channels; compact: CompAct's optimizer; "
            "adacc_compact: adacc and compact together; compare: train once per method with the same seed and data, "
            "adacc at half and at a quarter of plain training's activation bytes, and print one table."
        },
    )
    memory_budget: str = field(
        default="auto",
        metadata={
            "help": "Budget of adacc methods: auto (the device's free memory), a fraction of plain training's "
            "activation bytes such as 0.5, or an absolute peak such as 20GiB or 21474836480."
        },
    )
    compact_rank: str = field(
        default="0.25",
        metadata={
            "help": "Rank of compact and adacc_compact: a fraction of each layer's inputs, such as 0.25, or a number "
            "of them, such as 8. CompAct's paper pretrains with --learning_rate 0.01."
        },
    )
    report: bool = field(
        default=True, metadata={"help": "Write report.md and report.html with the policy into the run folder."}
    )


@dataclass(frozen=True, kw_only=True)
class RecipeArguments:
    """All settings of one run of the recipe, by group."""

    model: ModelArguments
    data: DataArguments
    method: MethodArguments
    training: TrainingArguments


# For the demo: every method trains in half a minute on 2 CPU cores, and the loss falls by more than half a nat.
_DEMO_DEFAULTS = {
    "vocab_size": PRESETS["demo"]["vocab_size"],
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


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Formatter of a recipe's `--help` that keeps the line breaks of the description and adds the defaults."""


def parse_arguments(argv: list[str], docstring: str | None = None) -> RecipeArguments:
    """Parse the command line, with the defaults of the chosen model. `docstring` is the recipe's docstring, which
    `--help` prints. Raises ValueError for a setting out of range. If argparse cannot parse a setting, argparse exits
    with status 2."""
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, MethodArguments, TrainingArguments),
        description=docstring,
        usage="%(prog)s [--SETTING VALUE ...]",  # the list below this line has all of the about 150 settings
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(**_defaults_for(argv))
    model, data, method, training = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    _check_resume(training.resume_from_checkpoint)
    return RecipeArguments(model=model, data=data, method=method, training=training)


def _defaults_for(argv: list[str]) -> dict[str, object]:
    """Return the defaults of settings that depend on --model and --method. Both options are parsed first."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--method", default="adacc")
    arguments, _ = parser.parse_known_args(argv)
    defaults = _DEMO_DEFAULTS if arguments.model == "demo" else _PRETRAINING_DEFAULTS
    # The Trainer pins memory by default, and warns if there is no GPU.
    machine_defaults = {"dataloader_pin_memory": torch.cuda.is_available()}
    output_dir = f"runs/{Path(arguments.model).name}-{arguments.method}"
    return {**defaults, **machine_defaults, "output_dir": output_dir}


def _check_resume(checkpoint: str | None) -> None:
    if checkpoint is not None and not Path(checkpoint, "trainer_state.json").is_file():
        raise FileNotFoundError(
            f"--resume_from_checkpoint={checkpoint} is not a checkpoint folder (trainer_state.json is missing); "
            "pass a checkpoint-<step> folder of an earlier run"
        )
