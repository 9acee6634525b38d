"""The pinned list: whose scripts, trainers, methods and tests are run with the callback, and what is known of them.

Packages and their versions stand in packages.txt, sources.txt and the project's constraints.txt.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from othersrun.peft_methods import METHODS

ROOT = Path(__file__).resolve().parents[3]
RUNS = Path(os.environ.get("ADACC_OTHERS") or ROOT / "runs" / "others")
PACKAGES, SOURCES, MADE = RUNS / "packages", RUNS / "sources", RUNS / "made"

LOSSLESS = {"memory_budget": 0.6, "actions": ("retain", "recompute")}
"""Under which training is bit-equal to training without the callback."""

QWEN = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"
REWARD_MODEL = "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something of others that trains."""

    name: str
    package: str
    refused: str | None = None
    """Words of the error by which the callback refuses it, as is meant."""
    idle: str | None = None
    """Why the callback has nothing to do in it, where it has not."""


@dataclass(frozen=True, kw_only=True)
class Script(Case):
    """A script that is run as from the command line: all that its trainers log must be the same, and the weights."""

    path: str
    """In PACKAGES."""
    arguments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrainerClass(Case):
    """A trainer that its package has no script for; `drivers.train_with` runs it."""

    module: str
    trainer: str
    data: str
    settings: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    """Arguments that take another model."""
    rewards: bool = False


@dataclass(frozen=True, kw_only=True)
class Method(Case):
    """A method of PEFT in Transformers' Trainer; `drivers.train_method` runs it."""

    config: str
    settings: dict[str, Any]
    model: str = "llama"
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tests(Case):
    """Tests of a package: each must end as it does without the callback."""

    folder: str
    """In SOURCES."""
    files: tuple[str, ...]
    select: str = ""
    refusals: dict[str, str] = field(default_factory=dict)
    """Part of a test's name: words of the error by which the callback refuses it, as is meant."""
    lost: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names by module that these tests import and the package of today has not; tests that use them fail anyway."""


def _script(name: str, *arguments: str, data: str, model: str = QWEN, label: str = "", **known: Any) -> Script:
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
    given = [part for option, value in options.items() for part in (f"--{option}", value)]
    return Script(
        name=f"trl {label or name}.py",
        package="trl",
        path=f"trl/scripts/{name}.py",
        arguments=(*given, *arguments),
        **known,
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
    return TrainerClass(name=f"trl {name}", package="trl", module=module, trainer=trainer, data=data, **more)


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
        refused="its loss is made neither by itself nor by the Trainer's compute_loss",
    ),
    _trainer("tpo", "TPOTrainer", "triples", settings=_SHORT),
]

PEFT_METHODS = [Method(name=f"peft {name}", package="peft", config=config, **known) for name, config, known in METHODS]

LOST = {
    "trl": ("BaseBinaryJudge", "BasePairwiseJudge", "FDivergenceType"),
    "trl.import_utils": (
        "is_diffusers_available", "is_joblib_available", "is_llm_blender_available", "is_mergekit_available",
        "is_vllm_available",
    ),
    "trl.trainer.sft_trainer": ("dft_loss",),
    "trl.trainer.reward_trainer": ("_tokenize",),
    "trl.trainer.kto_trainer": ("_get_kl_dataset", "_process_tokens", "_tokenize"),
    "trl.trainer.utils": ("SIMPLE_CHAT_TEMPLATE",),
}  # fmt: skip


def _trl_tests(name: str, **more: Any) -> Tests:
    return Tests(
        name=f"trl test_{name}_trainer.py",
        package="trl",
        folder="trl-0.23.1",
        files=(f"tests/test_{name}_trainer.py",),
        lost=LOST,
        **more,
    )


TESTS = [
    Tests(
        name="peft test_decoder_models.py",
        package="peft",
        folder="peft-0.21.2",
        files=("tests/test_decoder_models.py",),
        select="test_prefix_tuning_mistral or test_prompt_learning_with_gradient_checkpointing",
        lost={"diffusers": ("StableDiffusionPipeline",)},
        refusals={"prefix_tuning_mistral": "prefix tuning passes its prefix to the blocks"},
    ),
    Tests(
        name="peft test_cpt.py",
        package="peft",
        folder="peft-0.21.2",
        files=("tests/test_cpt.py",),
        select="training",
    ),
    _trl_tests("sft", select="TestSFTTrainer or SFTTrainerTester"),
    _trl_tests("kto"),
    _trl_tests("grpo"),
    _trl_tests("rloo"),
]

CASES: list[Case] = [*SCRIPTS, *TRAINERS, *PEFT_METHODS, *TESTS]


def groups() -> dict[str, list[Case]]:
    """Cases by the process that runs them: scripts and tests have one each, since they change what they find."""
    found: dict[str, list[Case]] = {}
    for case in CASES:
        shared = {TrainerClass: "trainers", Method: "methods"}.get(type(case))
        found.setdefault(shared or case.name, []).append(case)
    return found
