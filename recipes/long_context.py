r"""Train a LLaMA-like model on long sequences: print the plan first, then train within the planned budget.

    python recipes/long_context.py                              the demo: 1024 tokens, under a minute on a CPU
    python recipes/long_context.py --model llama-1b --seq_len 65536 --device h100 --bf16 --plan_only
    accelerate launch recipes/long_context.py --model meta-llama/Llama-3.2-1B --from_pretrained \
        --tokenizer meta-llama/Llama-3.2-1B --dataset books/ --seq_len 32768 --bf16

The plan is computed as by `adacc plan`, which needs neither the device nor weights. Documents are concatenated and cut
into sequences of full length. Invalid settings, and a plan that does not fit, end the run with one message and exit
status 2. The recipe's own settings come first in the list below, then all of Transformers' TrainingArguments.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from planned_run import Run, plan_run
from recipe_help import parser_settings
from text_documents import load_documents
from text_packing import encode_documents, pack_documents, stack_sequences
from text_tokenizer import load_tokenizer, trained_tokenizer
from transformers import AutoModelForCausalLM, HfArgumentParser, PretrainedConfig, Trainer, TrainingArguments, set_seed

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.artifacts.budget_values import parse_budget
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate.devices import NAMES
from adacc_hf.estimate.model_presets import checked_seq_len, fresh_model, load_config
from adacc_hf.estimate.plan_report import to_text
from adacc_hf.torch_glue.distributed import broadcast_from_first_rank


@dataclass(kw_only=True)
class RecipeArguments:
    """Settings of the recipe: model, data, and memory budget."""

    model: str = field(
        default="demo-llama",
        metadata={"help": "demo-llama, llama-1b, llama3-8b, llama3-70b, or the hub id or folder of a model's config."},
    )
    from_pretrained: bool = field(default=False, metadata={"help": "Start from the weights of a hub id or folder."})
    rope_theta: float | None = field(
        default=None, metadata={"help": "Base of the rotary positions; a larger base supports longer sequences."}
    )
    attn_implementation: Literal["sdpa", "eager"] = field(
        default="sdpa", metadata={"help": "Attention implementation: fused (sdpa) or not (eager)."}
    )
    dataset: str = field(
        default="stdlib",
        metadata={
            "help": "A .txt, .jsonl or .jsonl.zst file, a folder of such files, or stdlib (the source text of Python's "
            "standard library)."
        },
    )
    max_documents: int | None = field(
        default=None, metadata={"help": "Use only this many documents, the first ones (the demo: 100)."}
    )
    tokenizer: str = field(
        default="train",
        metadata={"help": "Hub id or folder of a tokenizer, or train to train a byte-level BPE on the text."},
    )
    seq_len: int = field(default=32768, metadata={"help": "Tokens per sequence (the demo: 1024)."})
    device: str = field(
        default="auto", metadata={"help": f"Device to plan for: auto (this machine's), or one of {', '.join(NAMES)}."}
    )
    memory_budget: str = field(
        default="auto",
        metadata={
            "help": "auto (the device's memory minus 5 percent), a size such as 20GiB for the peak of a step, or a "
            "fraction of plain training's activation bytes such as 0.5 (the demo's), converted to a peak by the plan."
        },
    )
    exact: bool = field(default=False, metadata={"help": "Train bit-equal to plain training."})
    host_memory: str | None = field(
        default=None,
        metadata={
            "help": "Memory of the host that each process may use for activations, such as 64GiB; no effect on a CPU."
        },
    )
    plan_only: bool = field(default=False, metadata={"help": "Print the plan and stop."})
    find_largest: bool = field(
        default=False,
        metadata={"help": "Also search for the largest batch and the longest sequence, in about a dozen more traces."},
    )
    cache_dir: str = field(default="runs/cache", metadata={"help": "Folder for prepared text; safe to delete."})


HAS_GPU = torch.cuda.is_available()
DEFAULTS = {
    "output_dir": "runs/long-context",
    "per_device_train_batch_size": 1,
    "bf16": HAS_GPU,
    "dataloader_drop_last": True,  # all batches have the same size, so that one policy is enough
    "dataloader_pin_memory": HAS_GPU,  # the Trainer pins memory by default, and warns if there is no GPU
}
DEMO_DEFAULTS = {
    "seq_len": 1024,
    "max_documents": 100,
    "memory_budget": "0.5",
    "max_steps": 8,
    "learning_rate": 1e-3,
    "logging_steps": 2,
    "report_to": "none",
}


def parse_settings(argv: list[str]) -> tuple[RecipeArguments, TrainingArguments]:
    """Parse the recipe's command line. Raises ValueError for an invalid setting."""
    parser = HfArgumentParser((RecipeArguments, TrainingArguments), **parser_settings(__doc__))
    is_demo = not any(text.partition("=")[0] == "--model" for text in argv)
    parser.set_defaults(**DEFAULTS, **(DEMO_DEFAULTS if is_demo else {}))
    return parser.parse_args_into_dataclasses(argv, look_for_args_file=False)


def long_config(recipe: RecipeArguments) -> PretrainedConfig:
    """Return the model's configuration with a context of at least `seq_len` tokens. Raises ValueError if the model's
    position encoding cannot be extended."""
    config = load_config(recipe.model)
    if getattr(config, "rope_parameters", None) is None or config.is_encoder_decoder:
        raise ValueError(f"--model={recipe.model} has no rotary positions to extend; choose a LLaMA-like model")
    if recipe.rope_theta is not None:
        config.rope_parameters["rope_theta"] = recipe.rope_theta
    config.max_position_embeddings = max(config.max_position_embeddings, recipe.seq_len)
    checked_seq_len(recipe.seq_len, config)
    return config


def policy_settings(recipe: RecipeArguments) -> dict[str, Any]:
    """Return the settings of AdaccConfig that the plan and the training share."""
    return {"exact": recipe.exact, "host_memory": recipe.host_memory}


def planned_budget(recipe: RecipeArguments, training: TrainingArguments, config: PretrainedConfig) -> int:
    """Print the plan for the run, and return its budget in bytes. Raises ValueError if the plan does not fit."""
    run = Run(
        model=recipe.model,
        config=config,
        attention=recipe.attn_implementation,
        seq_len=recipe.seq_len,
        device=recipe.device,
        adacc=AdaccConfig(memory_budget=parse_budget(recipe.memory_budget), **policy_settings(recipe)),
        find_largest=recipe.find_largest,
    )
    planned = plan_run(run, training)
    print(to_text(planned), flush=True)
    budget = planned.request.budget
    if not planned.forecasts["adacc"].fits:
        raise ValueError(
            f"--seq_len={recipe.seq_len} does not fit: the least possible peak is "
            f"{format_bytes(planned.forecasts['adacc'].peak_bytes)}, the budget {format_bytes(budget)}; lower "
            f"--seq_len, raise --memory_budget, launch on more devices with FSDP, or choose a smaller --model"
        )
    return budget


def make_trainer(
    recipe: RecipeArguments, training: TrainingArguments, config: PretrainedConfig, callback: AdaccCallback | None
) -> Trainer:
    """Build the recipe's Trainer with model, tokenizer and dataset. Raises ValueError or OSError for an invalid
    setting, which the error names."""
    cache_dir = Path(recipe.cache_dir)
    with training.main_process_first(desc="preparing the data"):
        documents, digest = load_documents(recipe.dataset, cache_dir)
        if recipe.max_documents is not None:
            documents = documents.take(recipe.max_documents)
        if recipe.tokenizer == "train":
            tokenizer = trained_tokenizer(
                documents, f"{digest} {recipe.max_documents}", config.vocab_size, 20_000, cache_dir
            )
        else:
            tokenizer = load_tokenizer(recipe.tokenizer)
        encoded = encode_documents(documents, tokenizer)
        sequences = pack_documents(encoded, recipe.seq_len, str(cache_dir / "sequences"), "training")
    batch_size = training.per_device_train_batch_size * training.world_size
    if len(sequences) < batch_size:
        raise ValueError(
            f"--dataset={recipe.dataset} fills {len(sequences)} sequences of --seq_len={recipe.seq_len} tokens, less "
            f"than one batch of {batch_size}; use more text, or lower --per_device_train_batch_size or --seq_len"
        )
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"--tokenizer={recipe.tokenizer} has {len(tokenizer)} tokens and --model={recipe.model} embeds only "
            f"{config.vocab_size}; use the model's own tokenizer"
        )
    set_seed(training.seed)
    attention = {"attn_implementation": recipe.attn_implementation, "dtype": "float32"}
    if recipe.from_pretrained:
        model = AutoModelForCausalLM.from_pretrained(recipe.model, config=config, **attention)
    else:
        model = fresh_model(config, **attention)
    return Trainer(
        model=model,
        args=training,
        data_collator=stack_sequences,
        train_dataset=sequences,
        processing_class=tokenizer,
        callbacks=[] if callback is None else [callback],
    )


def train(trainer: Trainer, callback: AdaccCallback, seq_len: int) -> Trainer:
    """Train the recipe's model, save it, and print a summary line."""
    metrics = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint).metrics
    trainer.save_model()
    if trainer.is_world_process_zero():
        speed = metrics["train_samples_per_second"] * seq_len
        print(closing_line(trainer, callback, speed))
    return trainer


def closing_line(trainer: Trainer, callback: AdaccCallback, speed: float) -> str:
    """Return a one-line summary of the run: steps, loss, speed, policy, and stored bytes relative to plain training."""
    logs = trainer.state.log_history
    losses = [entry["loss"] for entry in logs if "loss" in entry] or [logs[-1]["train_loss"]]
    parts = [f"{trainer.state.global_step} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, {speed:.0f} tokens/s"]
    policy, profile = callback.policy, callback.profile
    if policy is not None:
        parts.append(policy.summary())
    if policy is not None and profile is not None:
        share = policy.predicted_stored_bytes / profile.plain_stored_bytes
        parts.append(
            f"that is {share:.0%} of the {format_bytes(profile.plain_stored_bytes)} that plain training stores"
        )
    peaks = [entry["adacc/measured_peak_gib"] for entry in logs if "adacc/measured_peak_gib" in entry]
    if peaks:
        budget = format_bytes(int(callback.config.memory_budget))
        parts.append(f"peak of a counted step {format_bytes(int(peaks[-1] * 2**30))} of {budget}")
    return "; ".join([*parts, f"saved in {trainer.args.output_dir}"])


def command_line() -> int:
    """Run the recipe, and return the exit status: 2 after an invalid setting, which is reported in one message."""
    try:
        recipe, training = parse_settings(sys.argv[1:])
        config = long_config(recipe)
        budget = broadcast_from_first_rank(lambda: planned_budget(recipe, training, config))
        if recipe.plan_only:
            return 0
        callback = AdaccCallback(memory_budget=budget, **policy_settings(recipe))
        trainer = make_trainer(recipe, training, config, callback)
    except (ValueError, OSError, AdaccError) as error:
        return print_error(error)
    try:
        train(trainer, callback, recipe.seq_len)
    except AdaccError as error:  # no policy fits the budget, although the plan fitted
        return print_error(error)
    return 0


def print_error(error: Exception) -> int:
    """Print an error of the recipe as one message, and return the exit status."""
    print(f"long_context.py: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(command_line())
