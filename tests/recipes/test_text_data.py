"""Data of a run: documents, their split, sequences of equal length, and the tokenizer between."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import text_data
import torch
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from text_data import (
    TextData,
    cut_tokens,
    encode_documents,
    load_text_data,
    pack_documents,
    split_by_document,
    stack_sequences,
    stdlib_files,
)
from transformers import PreTrainedTokenizerBase


def load(dataset: Path, tokenizer: str = "train", max_eval_sequences: int = 100) -> TextData:
    return load_text_data(str(dataset), tokenizer, 290, 16, max_eval_sequences)


def decoded(data: TextData, rows: Dataset) -> str:
    return data.tokenizer.decode([token for row in rows for token in row["input_ids"].tolist()])


def test_documents_are_trained_on_or_held_out(jsonl_file: Path, texts: list[str]):
    data = load(jsonl_file)
    assert {row["input_ids"].shape[0] for row in data.train} == {16}
    trained, held_out = decoded(data, data.train), decoded(data, data.validation)
    is_trained, is_held_out = ([text[:12] in part for text in texts] for part in (trained, held_out))
    assert all(one != other for one, other in zip(is_trained, is_held_out, strict=True))
    assert any(is_trained)
    assert any(is_held_out)
    assert len(data.tokenizer) == 290


def test_a_tokenizer_of_the_users_is_taken(jsonl_file: Path, tokenizer, tmp_path: Path):
    tokenizer.save_pretrained(tmp_path / "saved")
    data = load(jsonl_file, str(tmp_path / "saved"))
    assert data.tokenizer.get_vocab() == tokenizer.get_vocab()


def test_a_stream_is_held_out_from_its_beginning(jsonl_file, tmp_path, monkeypatch):
    hub = tmp_path / "hub"
    hub.mkdir()
    jsonl_file.rename(hub / "train.jsonl")
    monkeypatch.setattr(text_data, "VALIDATION_DOCUMENTS", 4)
    data = load(hub, max_eval_sequences=3)
    assert isinstance(data.train, IterableDataset)
    assert len(data.validation) == 3, "evaluation needs a length"
    assert data.tokenizer.decode(data.validation[0]["input_ids"]).startswith("Document 0: ")


def test_blank_lines_separate_the_documents_of_a_txt_file(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"one\r\ntwo\r\n\r\nthree\r\n\r\n \r\n\r\nfour")
    train, validation = text_data._split_documents(str(path))
    assert sorted([*train["text"], *validation["text"]]) == ["four", "one\ntwo", "three"]


def test_stdlib_is_sorted_source_without_tests():
    files = stdlib_files()
    assert files == sorted(files)
    assert len(files) > 300  # CPython 3.10 to 3.14 have 600 to 900
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"site-packages", "test", "tests"} & set(path.parts[-3:-1]) for path in files)


@given(st.lists(st.lists(st.integers(0, 500), max_size=9), max_size=9), st.integers(1, 8))
def test_rows_are_the_concatenated_tokens(documents: list[list[int]], seq_len: int):
    tokens = list(chain.from_iterable(documents))
    rows = cut_tokens({"input_ids": [np.array(each, dtype=np.int32) for each in documents]}, seq_len)["input_ids"]
    assert len(rows) == len(tokens) // seq_len
    assert rows.flatten().tolist() == tokens[: len(rows) * seq_len]


@pytest.mark.parametrize("streamed", [False, True], ids=["dataset", "stream"])
def test_packed_rows_hold_the_encoded_text(streamed, tokenizer, texts):
    documents = Dataset.from_dict({"text": texts * 60})  # 720 documents, more than one batch of the tokenizer
    expected = []
    for text in documents["text"]:
        expected += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    source = documents.to_iterable_dataset() if streamed else documents
    packed = pack_documents(encode_documents(source, tokenizer), 64)
    assert isinstance(packed, IterableDataset if streamed else Dataset)
    tokens = torch.cat([row["input_ids"] for row in packed])
    assert tokens.tolist() == expected[: len(expected) // 64 * 64]


def test_a_document_that_mentions_the_end_marker_does_not_end_there(tokenizer: PreTrainedTokenizerBase):
    text = "before <|endoftext|> after"
    (ids,) = encode_documents(Dataset.from_dict({"text": [text]}), tokenizer)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 1
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == text


def test_too_little_text_for_one_sequence_is_refused(tmp_path: Path):
    (tmp_path / "book.txt").write_text("short\n\nand two")
    with pytest.raises(ValueError, match="--seq_len=4096 is longer than all text"):
        load_text_data(str(tmp_path / "book.txt"), "train", 290, 4096, 100)


@given(st.lists(st.text(max_size=20), min_size=2, max_size=60, unique=True), st.randoms())
def test_split_is_by_document_and_ignores_order(texts: list[str], random):
    train, validation = split_by_document(Dataset.from_dict({"text": texts}))
    assert sorted([*train["text"], *validation["text"]]) == sorted(texts)
    assert len(validation) == max(1, round(text_data.VALIDATION_FRACTION * len(texts)))
    again = split_by_document(Dataset.from_dict({"text": random.sample(texts, len(texts))}))
    assert set(again[1]["text"]) == set(validation["text"])


def test_labels_are_the_inputs_in_their_own_storage():
    rows = [{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([3, 0])}]
    batch = stack_sequences(rows)
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2], [3, 0]]
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()
