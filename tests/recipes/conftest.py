"""The recipes are scripts: their folder goes onto sys.path, as `python recipes/gpt2_pile.py` puts it there."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No test reaches the hub, and none writes outside its temporary folder."""
    import datasets

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def texts() -> list[str]:
    """Twelve different documents, some with several lines and characters beyond ASCII."""
    return [f"Document {n}: {'lorem ipsum dolor ' * (n + 3)}\nçédille № {n}\n" for n in range(12)]


@pytest.fixture
def jsonl_file(tmp_path: Path, texts: list[str]) -> Path:
    """`texts` in the Pile's schema."""
    import json

    rows = [{"text": text, "meta": {"pile_set_name": "Pile-CC"}} for text in texts]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> "PreTrainedTokenizerBase":
    """A byte-level BPE of 290 tokens, trained on `texts` once per session."""
    from datasets import Dataset
    from text_tokenizer import trained_tokenizer

    cache_dir = tmp_path_factory.getbasetemp() / "tokenizer-fixture"
    return trained_tokenizer(Dataset.from_dict({"text": texts}), "fixture", 290, 100, cache_dir)
