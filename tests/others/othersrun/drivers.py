"""Script that runs a case without a script of its own: a trainer or a method of a package.

python drivers.py NAME_OF_CASE
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from typing import Any

import torch
from others_rewards import characters
from othersrun import cases

STEPS = 6
MODELS = {
    "llama": "trl-internal-testing/tiny-random-LlamaForCausalLM",
    "gpt2": "hf-internal-testing/tiny-random-gpt2",
    "qwen2": "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5",
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


def main() -> None:
    """Run one short training with a fixed seed."""
    (case,) = (case for case in cases.CASES if case.name == sys.argv[1])
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
        args=TrainingArguments(folder, **SETTINGS),
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


def data(name: str) -> Any:
    import datasets

    return datasets.load_dataset(str(cases.MADE / "data" / name), split="train")


if __name__ == "__main__":
    main()
