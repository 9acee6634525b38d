"""Pinned list of other packages' scripts, trainers and methods, each with the command that trains by it.

Packages and versions are listed in packages.txt and the project's constraints.txt.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from othersrun.peft_methods import METHODS

ROOT = Path(__file__).resolve().parents[3]
RUNS = Path(os.environ.get("ADACC_OTHERS") or ROOT / "runs" / "others")
PACKAGES, MADE = RUNS / "packages", RUNS / "made"

LLAMA = "trl-internal-testing/tiny-random-LlamaForCausalLM"
QWEN = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"
REWARD_MODEL = "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Code of another package that trains a model."""

    name: str
    refused: str | None = None
    """Part of the expected error, if the callback must refuse the case."""
    idle: str | None = None
    """Reason why no policy is set, if that is expected."""

    @property
    def command(self) -> tuple[str, ...]:
        return sys.executable, str(Path(__file__).with_name("drivers.py")), self.name


@dataclass(frozen=True, kw_only=True)
class Script(Case):
    """Script of a package."""

    path: str
    """Path in PACKAGES."""
    arguments: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        return sys.executable, str(PACKAGES / self.path), *self.arguments


@dataclass(frozen=True, kw_only=True)
class TrainerClass(Case):
    """Trainer without a script in its package. `drivers.train_with` runs it."""

    module: str
    trainer: str
    data: str
    settings: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    """Names of arguments that take another model."""
    rewards: bool = False


@dataclass(frozen=True, kw_only=True)
class Method(Case):
    """Method of PEFT in Transformers' Trainer. `drivers.train_method` runs it."""

    config: str
    settings: dict[str, Any]
    model: str = "llama"


def _script(name: str, *arguments: str, data: str, model: str = QWEN, label: str = "", **expected: Any) -> Script:
    options = {
        "model_name_or_path": model,
        "dataset_name": str(MADE / "data" / data),
        "output_dir": str(RUNS / "output" / (label or name)),
        "max_steps": "6",
        "logging_steps": "1",
        "per_device_train_batch_size": "2",
        "learning_rate": "1e-2",
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": "true",
        "bf16": "false",
        "dtype": "float32",
        "gradient_checkpointing": "false",
    }
    common = [part for option, value in options.items() for part in (f"--{option}", value)]
    return Script(
        name=f"trl {label or name}.py",
        path=f"trl/scripts/{name}.py",
        arguments=(*common, *arguments),
        **expected,
    )


LORA = ("--use_peft", "--lora_r", "4", "--lora_dropout", "0.1")
GENERATION = ("--num_generations", "2", "--max_completion_length", "8", "--reward_funcs", "others_rewards.characters")

SCRIPTS = [
    _script("sft", data="text"),
    _script("sft", "--eval_strategy", "steps", "--eval_steps", "2", label="sft-evaluates", data="text"),
    _script("sft", "--gradient_checkpointing", "true", label="sft-checkpointing", data="text"),
    _script("sft", "--packing", "--max_length", "64", label="sft-packing", data="text"),
    _script("sft", "--padding_free", "true", "--max_length", "none", label="sft-padding-free", data="text"),
    _script("sft", "--gradient_accumulation_steps", "2", label="sft-chats", data="chats"),
    _script("sft", *LORA, label="sft-lora", data="text"),
    _script("dpo", data="preferences"),
    _script("dpo", *LORA, label="dpo-lora", data="preferences"),
    _script("kto", data="judged"),
    _script("reward", data="preferences", model=REWARD_MODEL),
    _script("grpo", *GENERATION, data="prompts"),
    _script("grpo", *GENERATION, *LORA, "--beta", "0.1", label="grpo-lora", data="prompts"),
    _script("rloo", *GENERATION, data="prompts"),
    _script("distillation", "--teacher_model_name_or_path", QWEN, "--max_completion_length", "8", data="chat prompts"),
]

_SHORT = {"max_length": 64}
_GENERATED = {"num_generations": 2, "max_completion_length": 8}


def _trainer(name: str, trainer: str, data: str, **more: Any) -> TrainerClass:
    module = f"trl.experimental.{name}"
    return TrainerClass(name=f"trl {name}", module=module, trainer=trainer, data=data, **more)


TRAINERS = [
    _trainer("cpo", "CPOTrainer", "preferences", settings=_SHORT),
    _trainer("orpo", "ORPOTrainer", "preferences", settings=_SHORT),
    _trainer("gkd", "GKDTrainer", "chats", settings={**_SHORT, "max_new_tokens": 8}, models=("teacher_model",)),
    _trainer("gmpo", "GMPOTrainer", "prompts", settings=_GENERATED, rewards=True),
    _trainer(
        "online_dpo",
        "OnlineDPOTrainer",
        "prompts",
        settings={"max_new_tokens": 8},
        rewards=True,
        idle="its training_step makes the loss itself, so all blocks stay under torch's checkpoint",
    ),
    _trainer("tpo", "TPOTrainer", "triples", settings=_SHORT),
]

PEFT_METHODS = [Method(name=f"peft {name}", config=config, **more) for name, config, more in METHODS]

CASES: list[Case] = [*SCRIPTS, *TRAINERS, *PEFT_METHODS]
