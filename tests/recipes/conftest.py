"""Fixtures of the recipes. The recipes' folder is put on sys.path, as `python recipes/gpt2_pile.py` does."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from recipe_runs import with_setting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Block the hub, let each test write only to its temporary folder, and hold out enough of the short texts."""
    import datasets
    import text_data

    monkeypatch.setattr(text_data, "VALIDATION_FRACTION", 0.3)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def texts() -> list[str]:
    """Return twelve different documents, some with several lines and characters beyond ASCII."""
    return [f"Document {n}: {'lorem ipsum dolor ' * (n + 3)}\nçédille № {n}\n" for n in range(12)]


@pytest.fixture
def jsonl_file(tmp_path: Path, texts: list[str]) -> Path:
    """Return a file with `texts` in the Pile's schema."""
    import json

    rows = [{"text": text, "meta": {"pile_set_name": "Pile-CC"}} for text in texts]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(texts: list[str]) -> "PreTrainedTokenizerBase":
    """Return a byte-level BPE of 290 tokens, trained on `texts`."""
    from text_data import train_tokenizer

    return train_tokenizer(texts, 290)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Return a folder with the config of a GPT-2 that trains in milliseconds."""
    from transformers import GPT2Config

    folder = tmp_path / "tiny-gpt2"
    GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_run(model_folder: Path, jsonl_file: Path, tmp_path: Path) -> list[str]:
    """Return the command line of a run of four steps on `jsonl_file` into tmp_path / "run"."""
    settings = {
        "model": model_folder,
        "dataset": jsonl_file,
        "vocab_size": 290,
        "output_dir": tmp_path / "run",
        "max_steps": 4,
        "warmup_steps": 1,
        "logging_steps": 2,
        "per_device_train_batch_size": 8,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return with_setting([], **settings)
