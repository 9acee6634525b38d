"""Data of a run: training and validation sequences of documents that do not overlap, and the tokenizer between."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import IterableDataset
from recipe_arguments import DataArguments
from text_data import TextData, load_text_data


@pytest.fixture
def arguments(jsonl_file: Path, tmp_path: Path) -> DataArguments:
    return DataArguments(
        dataset=str(jsonl_file), vocab_size=290, validation_fraction=0.3, cache_dir=str(tmp_path / "cache")
    )


def load(arguments: DataArguments, seq_len: int = 16) -> TextData:
    return load_text_data(arguments, seq_len, lambda **_: nullcontext())


def test_documents_are_trained_on_or_held_out(arguments: DataArguments, texts: list[str]):
    data = load(arguments)
    held_out = [row["text"] for row in data.held_out]
    assert 0 < len(held_out) < len(texts)
    trained = data.tokenizer.decode([token for row in data.train for token in row["input_ids"].tolist()])
    assert {row["input_ids"].shape[0] for row in data.train} == {16}
    assert not any(text in trained for text in held_out)
    assert any(text in trained for text in texts)
    assert len(data.tokenizer) == 290


def test_a_tokenizer_of_the_users_is_taken(arguments: DataArguments, tokenizer, tmp_path: Path):
    tokenizer.save_pretrained(tmp_path / "saved")
    data = load(replace(arguments, tokenizer=str(tmp_path / "saved"), vocab_size=100))
    assert data.tokenizer.get_vocab() == tokenizer.get_vocab()


def test_a_stream_is_held_out_from_its_beginning(arguments, jsonl_file, texts, tmp_path):
    hub = tmp_path / "hub"
    hub.mkdir()
    jsonl_file.rename(hub / "train.jsonl")
    data = load(replace(arguments, dataset="pile", pile_id=str(hub), validation_documents=4, max_eval_sequences=3))
    assert isinstance(data.train, IterableDataset)
    assert len(data.validation) == 3, "evaluation needs a length"
    assert sorted(row["text"] for row in data.held_out) == sorted(texts[:4])
