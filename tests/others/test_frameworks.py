"""axolotl, ms-swift and LLaMA-Factory train equally with and without the lines of docs/howto/frameworks.md."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from othersrun import cases, tiny
from safetensors.torch import load_file

CHATS = "chats"
STEPS = 12


def axolotl(folder: Path, model: Path, data: Path, has_policy: bool) -> list[str]:
    """Write axolotl's YAML file. Return the arguments of Python that train with it."""
    settings: dict[str, Any] = {
        "base_model": str(model),
        "datasets": [{"path": str(data / "train.jsonl"), "ds_type": "json", "type": "chat_template"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "out"),
        "sequence_len": tiny.LENGTH,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "gradient_checkpointing": False,
        "bf16": False,
        "fp16": False,
        "seed": 1,
    }
    if has_policy:
        settings |= {
            "plugins": ["adacc_hf.integrations.axolotl.AdaccPlugin"],
            "adacc_memory_budget": 0.6,
            "adacc_exact": True,
        }
    (folder / "config.yml").write_text(yaml.safe_dump(settings))
    return ["-m", "axolotl.cli.train", str(folder / "config.yml")]


def llamafactory(folder: Path, model: Path, data: Path, has_policy: bool) -> list[str]:
    """Write LLaMA-Factory's YAML file, and a file that trains with it. Return the arguments of Python."""
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    info = {"file_name": str(data / "train.jsonl"), "formatting": "sharegpt", "columns": {"messages": "messages"}}
    (folder / "dataset_info.json").write_text(json.dumps({CHATS: {**info, "tags": tags}}))
    settings: dict[str, Any] = {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": CHATS,
        "dataset_dir": str(folder),
        "template": "empty",
        "cutoff_len": tiny.LENGTH,
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "logging_steps": 4,
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": True,
        "disable_gradient_checkpointing": True,
        "overwrite_cache": True,
        "seed": 1,
    }
    (folder / "config.yml").write_text(yaml.safe_dump(settings))
    callbacks = "[AdaccCallback(memory_budget=0.6, exact=True)]" if has_policy else "[]"
    (folder / "train.py").write_text(
        "import yaml\n"
        "from llamafactory.train.tuner import run_exp\n"
        "from adacc_hf import AdaccCallback\n\n"
        f"run_exp(yaml.safe_load(open({str(folder / 'config.yml')!r})), callbacks={callbacks})\n"
    )
    return [str(folder / "train.py")]


def ms_swift(folder: Path, model: Path, data: Path, has_policy: bool) -> list[str]:
    """Write ms-swift's plugin. Return the arguments of Python that train with it."""
    settings: dict[str, Any] = {
        "model": model,
        "model_type": "llama",
        "template": "dummy",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "dataset": data / "train.jsonl",
        "output_dir": folder / "out",
        "add_version": "false",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "max_length": tiny.LENGTH,
        "gradient_checkpointing": "false",
        "report_to": "none",
        "seed": 1,
    }
    if has_policy:
        plugin = folder / "adacc_plugin.py"
        plugin.write_text(
            "from adacc_hf.integrations.ms_swift import register\n\nregister(memory_budget=0.6, exact=True)\n"
        )
        settings |= {"external_plugins": plugin, "callbacks": "adacc"}
    options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return ["-m", "swift.cli.sft", *options]


@pytest.mark.others
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("framework", [axolotl, llamafactory, ms_swift], ids=lambda framework: framework.__name__)
def test_a_framework_trains_the_same_weights(framework: Callable[..., list[str]], tmp_path: Path) -> None:
    python = cases.RUNS / framework.__name__ / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{framework.__name__} is missing: run `make test-frameworks`, which installs it")
    made = tiny.make(cases.MADE)
    model = made / "hub" / f"models--{cases.LLAMA.replace('/', '--')}" / "snapshots" / tiny.REVISION
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "DO_NOT_TRACK": "1",  # axolotl
        "PYTHONPATH": str(tmp_path),
    }
    (tmp_path / "torchaudio.py").touch()  # LLaMA-Factory imports it, and the CPU build of torch has no build of it
    weights = {}
    for name in ("plain", "adacc"):
        folder = tmp_path / name
        folder.mkdir()
        command = [str(python), *framework(folder, model, made / "data" / CHATS, name == "adacc")]
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[-8000:]}"
        weights[name] = load_file(max((folder / "out").rglob("model.safetensors"), key=os.path.getmtime))
    out = tmp_path / "adacc" / "out"
    history = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    assert "recompute" in (out / "adacc_policy.json").read_text(), "nothing is recomputed"
    assert max(line.get("adacc/fallback_steps", 0) for line in history) < STEPS / 2, "most steps had no policy"
    before = load_file(model / "model.safetensors")
    assert any(not torch.equal(before[each], weights["plain"][each]) for each in before), "nothing was trained"
    assert weights["plain"].keys() == weights["adacc"].keys()
    assert all(torch.equal(weights["plain"][each], weights["adacc"][each]) for each in weights["plain"])
