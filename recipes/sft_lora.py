r"""Fine-tune a language model on chats by LoRA or QLoRA under a memory budget: TRL's SFTTrainer with one more callback.

    python recipes/sft_lora.py                                  the demo: a tiny LLaMA, about a minute on a CPU
    accelerate launch recipes/sft_lora.py --model_name_or_path meta-llama/Llama-3.1-8B-Instruct --dtype bfloat16 \
        --chats my_chats.jsonl --max_length 4096 --per_device_train_batch_size 4 --memory_budget 24GiB
    accelerate launch recipes/sft_lora.py --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara \
        --output_dir Qwen2-0.5B-SFT --memory_budget auto

The recipe accepts all settings of `trl sft`, on the command line or with `--config settings.yaml`, and in addition
`--chats`, `--memory_budget`, `--exact` and `--cache_dir`, which come first in the list below. Three defaults differ
from the defaults of `trl sft`: LoRA and packing are on, gradient checkpointing is off. `--use_peft false` trains all
weights, `--load_in_4bit` selects QLoRA. Invalid settings end the run with one message and exit status 2. The recipe
needs pip install '.[recipes,sft]' in a checkout, and bitsandbytes for QLoRA.
"""

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import torch
from chat_datasets import DEMO_CHATS, load_splits
from chats import ROWS, demo_model, demo_tokenizer
from recipe_help import parser_settings
from transformers import TrainerCallback
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from adacc_hf import AdaccCallback
from adacc_hf.artifacts.budget_values import parse_budget
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.torch_glue.compat import CHECKPOINTING


@dataclass(kw_only=True)
class RecipeArguments:
    """Settings of the recipe, in addition to TRL's."""

    chats: str | None = field(
        default=None,
        metadata={
            "help": f"A jsonl file with rows {ROWS}. Without it and without --dataset_name: {Path(DEMO_CHATS).name} of "
            "the recipes."
        },
    )
    memory_budget: str = field(
        default="auto",
        metadata={
            "help": "auto (the device's free memory), a size such as 20GiB for the peak of a step, or a fraction of "
            "plain training's activation bytes such as 0.5 (the demo's)."
        },
    )
    exact: bool = field(default=False, metadata={"help": "Train bit-equal to plain training."})
    cache_dir: str = field(default="runs/cache", metadata={"help": "Folder for the demo's tokenizer; safe to delete."})


Settings = tuple[RecipeArguments, ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig]
DEFAULTS = {
    "output_dir": "runs/sft-lora",
    "use_peft": True,
    "packing": True,
    "bf16": torch.cuda.is_available(),
    "dataloader_pin_memory": torch.cuda.is_available(),  # the Trainer warns if there is no GPU
    # TRL enables torch's checkpointing by default. The callback would disable it, and log that.
    CHECKPOINTING: False,
}
DEMO_DEFAULTS = {
    "memory_budget": "0.5",
    "max_length": 256,
    # TRL packs chats by size and concatenates the rows of a batch. Padded, all batches have one size and one policy.
    "pad_to_multiple_of": "256",
    "dataloader_drop_last": True,
    "max_steps": 30,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "lora_target_modules": "all-linear",
    "report_to": "none",
}


def parse_settings(argv: list[str]) -> Settings:
    """Parse the recipe's command line and the file of `--config`. Raises ValueError for an invalid setting."""
    parser = TrlParser(get_args(Settings), **parser_settings(__doc__))
    is_demo = not any(text.partition("=")[0] in ("--model_name_or_path", "--config") for text in argv)
    parser.set_defaults(**DEFAULTS, **(DEMO_DEFAULTS if is_demo else {}))
    return parser.parse_args_and_config(argv)


def make_callback(recipe: RecipeArguments) -> AdaccCallback:
    """Create the recipe's AdaccCallback, the only addition to a usual training script. Raises ValueError for an invalid
    budget."""
    return AdaccCallback(memory_budget=parse_budget(recipe.memory_budget), exact=recipe.exact)


def make_trainer(settings: Settings, callbacks: list[TrainerCallback]) -> SFTTrainer:
    """Build TRL's trainer on the chat dataset. Raises ValueError or OSError for invalid settings, before training
    starts."""
    recipe, script, training, model, mixture = settings
    check_quantization(model)
    train_data, test_data = load_splits(recipe.chats, script, mixture, training)
    if model.model_name_or_path is None:
        with training.main_process_first(desc="training the tokenizer"):
            tokenizer = demo_tokenizer(train_data, Path(recipe.cache_dir))
        start = {
            "model": demo_model(tokenizer, training.max_length or 1024, training.seed),
            "processing_class": tokenizer,
        }
    else:
        loading = {
            "revision": model.model_revision,
            "dtype": model.dtype,
            "attn_implementation": model.attn_implementation,
        }
        quantization = get_quantization_config(model)
        loading |= {} if quantization is None else {"quantization_config": quantization}
        training.model_init_kwargs = loading | (training.model_init_kwargs or {})
        start = {"model": model.model_name_or_path}
    try:
        return SFTTrainer(
            **start,
            args=training,
            train_dataset=train_data,
            eval_dataset=test_data,
            peft_config=get_peft_config(model),
            callbacks=callbacks,
        )
    except OSError as error:
        raise ValueError(f"--model_name_or_path={model.model_name_or_path} could not be loaded: {error}") from error


def check_quantization(model: ModelConfig) -> None:
    """Raise ValueError if the recipe's settings ask for quantized weights, but quantization is impossible."""
    name = "--load_in_4bit" if model.load_in_4bit else "--load_in_8bit"
    if not (model.load_in_4bit or model.load_in_8bit):
        return
    if model.model_name_or_path is None:
        raise ValueError(f"{name} quantizes the weights of a hub id or folder; name one with --model_name_or_path")
    if not model.use_peft:
        raise ValueError(
            f"{name} freezes the weights, and --use_peft=False leaves nothing to train; leave out one of the options"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"{name} needs bitsandbytes: pip install bitsandbytes, or leave out {name} to train by LoRA")


def train(trainer: SFTTrainer, callback: AdaccCallback) -> SFTTrainer:
    """Train the recipe's adapter, or the whole model, save it, and print a summary line."""
    checkpoint = trainer.args.resume_from_checkpoint
    seconds = trainer.train(resume_from_checkpoint=checkpoint).metrics["train_runtime"]
    trainer.save_model()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        print(closing_line(trainer, callback, seconds))
    return trainer


def closing_line(trainer: SFTTrainer, callback: AdaccCallback, seconds: float) -> str:
    """Return a one-line summary of the run: steps, loss, speed, policy, and stored bytes relative to plain training."""
    logs = trainer.state.log_history
    losses = [entry["loss"] for entry in logs if "loss" in entry] or [logs[-1]["train_loss"]]
    tokens = max((entry["num_tokens"] for entry in logs if "num_tokens" in entry), default=0)
    line = (
        f"{trainer.state.global_step} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, {tokens / seconds:.0f} tokens/s"
    )
    policy, profile = callback.policy, callback.profile
    if policy is not None:
        line += f"; {policy.summary()}"
    if policy is not None and profile is not None:
        share = policy.predicted_stored_bytes / profile.plain_stored_bytes
        line += f"; that is {share:.0%} of the {format_bytes(profile.plain_stored_bytes)} that plain training stores"
    return f"{line}; saved in {trainer.args.output_dir}"


def command_line() -> int:
    """Run the recipe, and return the exit status: 2 after an invalid setting, which is reported in one message."""
    try:
        settings = parse_settings(sys.argv[1:])
        callback = make_callback(settings[0])
        trainer = make_trainer(settings, [callback])
    except (ValueError, OSError) as error:
        return print_error(error)
    try:
        train(trainer, callback)
    except AdaccError as error:  # for example: no policy fits the budget, or the model has no blocks
        return print_error(error)
    return 0


def print_error(error: Exception) -> int:
    """Print an error of the recipe as one message, and return the exit status."""
    print(f"sft_lora.py: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(command_line())
