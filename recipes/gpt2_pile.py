r"""Train a GPT under a memory budget, by one of the paper's methods.

    accelerate launch recipes/gpt2_pile.py                      the demo: a small GPT-2 on Python's standard library
    accelerate launch recipes/gpt2_pile.py --model gpt2-345m --dataset monology/pile-uncopyrighted --tokenizer gpt2 \
        --bf16 --per_device_train_batch_size 32 --memory_budget 20GiB

The settings of this file come first in the list below, then all of Transformers' TrainingArguments. Invalid settings
end the run with one message and exit status 2.
"""

import argparse
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from text_data import TextData, load_text_data, stack_sequences
from transformers import AutoModelForCausalLM, HfArgumentParser, PreTrainedModel, Trainer, TrainingArguments, set_seed

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.callbacks.paper_methods import method_callbacks
from adacc_hf.compact import CompactFactory, parse_rank
from adacc_hf.estimate.presets import PRESETS, checked_seq_len, fresh_model, load_config

Method = Literal["none", "full", "quantization", "adacc", "adacc_no_outlier", "compact", "adacc_compact"]


@dataclass(kw_only=True)
class RecipeArguments:
    """Settings of the recipe besides TrainingArguments."""

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
    dataset: str = field(
        default="stdlib",
        metadata={
            "help": "stdlib (the source text of the running Python's standard library, no download), a file (.txt, "
            'with blank lines between documents, or .jsonl with rows {"text": ...}), or the hub id of a data set '
            "with a text column, such as monology/pile-uncopyrighted, which is streamed."
        },
    )
    tokenizer: str = field(
        default="train",
        metadata={"help": "Hub id or folder of a tokenizer, or train to train a byte-level BPE on the chosen text."},
    )
    vocab_size: int = field(default=50257, metadata={"help": "Vocabulary size of a trained tokenizer; at least 257."})
    seq_len: int | None = field(
        default=None, metadata={"help": "Tokens per sequence (default: the model's context length)."}
    )
    max_eval_sequences: int = field(default=1000, metadata={"help": "Maximum number of validation sequences."})
    method: Method = field(
        default="adacc",
        metadata={
            "help": "none: retain all activations; full: recompute whole blocks (gradient checkpointing); "
            "quantization: compress all activations to per-token INT4; adacc: choose per activation; "
            "adacc_no_outlier: adacc without separate outlier channels; compact: CompAct's optimizer; "
            "adacc_compact: adacc and compact together."
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
    """Formatter of the recipe's `--help` that keeps the line breaks of the description and adds the defaults."""


def parse_arguments(argv: list[str]) -> tuple[RecipeArguments, TrainingArguments]:
    """Parse the command line, with the defaults of the chosen model. If argparse cannot parse a setting, it exits with
    status 2."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--model", default="demo")
    first.add_argument("--method", default="adacc")
    named, _ = first.parse_known_args(argv)
    parser = HfArgumentParser(
        (RecipeArguments, TrainingArguments),
        description=__doc__,
        usage="%(prog)s [--SETTING VALUE ...]",  # the list below this line has all of the about 150 settings
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(
        **(_DEMO_DEFAULTS if named.model == "demo" else _PRETRAINING_DEFAULTS),
        dataloader_pin_memory=torch.cuda.is_available(),  # without a GPU, the Trainer warns about pinned memory
        output_dir=f"runs/{Path(named.model).name}-{named.method}",
    )
    return parser.parse_args_into_dataclasses(argv, look_for_args_file=False)


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Checked settings and prepared data of a run."""

    args: RecipeArguments
    training: TrainingArguments
    data: TextData
    seq_len: int

    def fresh_model(self) -> PreTrainedModel:
        """Build the model, with random weights from the seed in the settings, or load it. All calls return equal
        weights."""
        set_seed(self.training.seed)
        config, attention = load_config(self.args.model), self.args.attn_implementation
        text_config = config.get_text_config()
        if self.args.from_pretrained:
            if len(self.data.tokenizer) > text_config.vocab_size:
                raise ValueError(
                    f"--tokenizer has {len(self.data.tokenizer)} tokens but --model={self.args.model} embeds only "
                    f"{text_config.vocab_size}; use the model's own tokenizer"
                )
            return AutoModelForCausalLM.from_pretrained(self.args.model, dtype="float32", attn_implementation=attention)
        text_config.vocab_size = len(self.data.tokenizer)
        text_config.bos_token_id = text_config.eos_token_id = self.data.tokenizer.eos_token_id
        return fresh_model(config, attention)


def prepare_run(argv: list[str]) -> PreparedRun:
    """Check the settings, and prepare the data. Raises ValueError or OSError for an invalid setting, which the error
    names."""
    args, training = parse_arguments(argv)
    seq_len = checked_seq_len(args.seq_len, load_config(args.model))
    if args.from_pretrained and args.model in PRESETS:
        raise ValueError(f"--from_pretrained needs a hub id or folder with weights; --model={args.model} is a preset")
    method_callbacks(args.method, args.memory_budget)
    parse_rank(args.compact_rank, "--compact_rank")
    has_policy = args.method not in ("none", "full", "compact")
    if has_policy and args.report and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--report needs matplotlib: pip install 'adacc-hf[plot]', or pass --report false")
    with training.main_process_first(desc="preparing the data"):
        data = load_text_data(args.dataset, args.tokenizer, args.vocab_size, seq_len, args.max_eval_sequences)
    return PreparedRun(args=args, training=training, data=data, seq_len=seq_len)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the recipe with the settings in `argv` (default: the command line), write model, metrics, policy and report,
    print a summary line, and return the final metrics."""
    run = prepare_run(sys.argv[1:] if argv is None else argv)
    args, training = run.args, run.training
    callbacks, overrides = method_callbacks(args.method, args.memory_budget)
    vars(training).update(overrides)
    compact = {"rank": parse_rank(args.compact_rank, "--compact_rank")}
    compact |= {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    trainer = Trainer(
        model=run.fresh_model(),
        args=training,
        data_collator=stack_sequences,
        train_dataset=run.data.train,
        eval_dataset=run.data.validation,
        processing_class=run.data.tokenizer,
        callbacks=callbacks,
        optimizer_cls_and_kwargs=(CompactFactory, compact) if args.method in ("compact", "adacc_compact") else None,
    )
    train_metrics = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint).metrics
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    final_loss = float(losses[-1] if losses else train_metrics["train_loss"])
    results = {"steps": trainer.state.global_step, "final_train_loss": final_loss}
    metrics = {**train_metrics, **trainer.evaluate(), **results}
    trainer.save_model()
    trainer.save_metrics("all", metrics)
    trainer.save_state()
    if training.process_index == 0:
        parts = [
            f"{args.model}, {args.method}: {metrics['steps']} steps",
            f"training loss {metrics['final_train_loss']:.3f}",
            f"validation loss {metrics['eval_loss']:.3f}",
            f"{metrics['train_samples_per_second'] * run.seq_len:.0f} tokens/s",
        ]
        policy = callbacks[0].policy if callbacks else None
        if policy is not None:
            parts.append(f"{format_bytes(policy.predicted_stored_bytes)} stored for backward")
            # A run that resumed from a checkpoint may have a policy without a profile.
            if args.report and callbacks[0].profile is not None:
                callbacks[0].report().save(training.output_dir)
                parts.append(f"report in {training.output_dir}/report.html")
        print(f"{', '.join(parts)}; saved in {training.output_dir}")
    return metrics


def exit_status() -> int:
    """Run the recipe, and return the exit status: 2 after an invalid setting, which is reported in one message."""
    try:
        main()
    except (AdaccError, ValueError, OSError) as error:  # AdaccError: no policy fits the budget, for example
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(exit_status())
