"""Drivers for cases without a script: trainers and methods of packages, and packages' own tests."""

from __future__ import annotations

import importlib
import sys
import tempfile
from types import ModuleType
from typing import Any

import torch
from others_rewards import characters
from othersrun import cases, local_data
from othersrun.attach import Trainings

STEPS = 6
MODELS = {
    "llama": "trl-internal-testing/tiny-random-LlamaForCausalLM",
    "gpt2": "hf-internal-testing/tiny-random-gpt2",
    "qwen2": "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5",
    "t5": "trl-internal-testing/tiny-T5ForConditionalGeneration",
}
SETTINGS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def train(case: cases.Method | cases.TrainerClass) -> None:
    """Run one short training with a fixed seed."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        (train_method if isinstance(case, cases.Method) else train_with)(case, folder)


def load(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODELS[name])


def train_method(case: cases.Method, folder: str) -> None:
    """Train with a method of PEFT in Transformers' Trainer, on sequences of several lengths."""
    import peft
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(MODELS[case.model])
    rows = [tokenizer(row["text"], truncation=True, max_length=64) for row in data("text")]
    config = getattr(peft, case.config)(**case.settings)
    model = peft.get_peft_model(load(case.model), config)
    Trainer(
        model=model,
        args=TrainingArguments(folder, **SETTINGS | dict(case.arguments)),
        train_dataset=[{"input_ids": row["input_ids"]} for row in rows],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    ).train()


def train_with(case: cases.TrainerClass, folder: str) -> None:
    """Train with a trainer of TRL and its own configuration."""
    from transformers import AutoTokenizer

    module = importlib.import_module(case.module)
    trainer_class = getattr(module, case.trainer)
    config_class = getattr(module, case.trainer.replace("Trainer", "Config"))
    tokenizer = AutoTokenizer.from_pretrained(MODELS["qwen2"])
    extra_arguments = {name: load("qwen2") for name in case.models}
    if case.rewards:
        extra_arguments["reward_funcs"] = characters
    trainer_class(
        model=load("qwen2"),
        args=config_class(output_dir=folder, **SETTINGS | dict(case.settings)),
        train_dataset=data(case.data),
        processing_class=tokenizer,
        **extra_arguments,
    ).train()


def train_on_the_cpu() -> None:
    """Make all TrainingArguments use the CPU and float32. TRL's configurations ask for bfloat16, in which CPUs without
    bfloat16 instructions take minutes per step."""
    from transformers import TrainingArguments

    check = TrainingArguments.__post_init__

    def post_init(arguments: TrainingArguments) -> None:
        arguments.use_cpu, arguments.bf16 = True, False
        check(arguments)

    TrainingArguments.__post_init__ = post_init


def fill_in(module: str, name: str) -> None:
    """Add a placeholder for `name` to a module that has removed it, so that tests that only import it can run."""
    try:
        target = importlib.import_module(module)
    except ModuleNotFoundError:
        target = sys.modules[module] = ModuleType(module)
    if not hasattr(target, name):
        setattr(target, name, type(name, (), {"__bool__": lambda self: False, "__init__": lambda self, *_, **__: None}))


def data(name: str) -> Any:
    import datasets

    return datasets.load_dataset(str(local_data.folder_of(name)), split="train")


class TestWatch:
    """Pytest plugin that records the result of each test, and labels trainings with the current test."""

    __test__ = False

    def __init__(self, trainings: Trainings) -> None:
        self.results: dict[str, str] = {}
        self._trainings = trainings

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        self._trainings.label = item.nodeid
        torch.manual_seed(0)  # tests must not depend on earlier tests

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            words = report.outcome
            if report.failed:
                words += f": {getattr(report.longrepr, 'reprcrash', None) or report.longrepr}"
            self.results[report.nodeid] = words
