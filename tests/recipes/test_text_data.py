"""Data of a run: documents, their split, sequences of equal length, and the tokenizer between."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from recipe_arguments import DataArguments
from text_data import (
    TextData,
    checked_files,
    cut_tokens,
    encode_documents,
    load_documents,
    load_text_data,
    pack_documents,
    split_by_document,
    stack_sequences,
    stdlib_files,
)
from transformers import PreTrainedTokenizerBase


@pytest.fixture
def arguments(jsonl_file: Path, tmp_path: Path) -> DataArguments:
    return DataArguments(
        dataset=str(jsonl_file), vocab_size=290, validation_fraction=0.3, cache_dir=str(tmp_path / "cache")
    )


def load(arguments: DataArguments, seq_len: int = 16) -> TextData:
    return load_text_data(arguments, seq_len, lambda **_: nullcontext())


def test_documents_are_trained_on_or_held_out(arguments: DataArguments, texts: list[str]):
    data = load(arguments)
    trained, held_out = (
        data.tokenizer.decode([token for row in rows for token in row["input_ids"].tolist()])
        for rows in (data.train, data.validation)
    )
    assert {row["input_ids"].shape[0] for row in data.train} == {16}
    is_trained, is_held_out = ([text[:12] in part for text in texts] for part in (trained, held_out))
    assert all(one != other for one, other in zip(is_trained, is_held_out, strict=True))
    assert any(is_trained)
    assert any(is_held_out)
    assert len(data.tokenizer) == 290


def test_a_tokenizer_of_the_users_is_taken(arguments: DataArguments, tokenizer, tmp_path: Path):
    tokenizer.save_pretrained(tmp_path / "saved")
    data = load(replace(arguments, tokenizer=str(tmp_path / "saved"), vocab_size=100))
    assert data.tokenizer.get_vocab() == tokenizer.get_vocab()


def test_a_stream_is_held_out_from_its_beginning(arguments, jsonl_file, tmp_path):
    hub = tmp_path / "hub"
    hub.mkdir()
    jsonl_file.rename(hub / "train.jsonl")
    data = load(replace(arguments, dataset="pile", pile_id=str(hub), validation_documents=4, max_eval_sequences=3))
    assert isinstance(data.train, IterableDataset)
    assert len(data.validation) == 3, "evaluation needs a length"
    assert data.tokenizer.decode(data.validation[0]["input_ids"]).startswith("Document 0: ")


def test_jsonl_gives_the_text_of_each_row(jsonl_file: Path, texts: list[str], tmp_path: Path):
    documents = load_documents(str(jsonl_file), tmp_path / "cache")
    assert documents.column_names == ["text"]
    assert list(documents["text"]) == texts


def test_blank_lines_separate_the_documents_of_a_txt_file(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"one\r\ntwo\r\n\r\nthree\r\n\r\n \r\n\r\nfour")
    assert list(load_documents(str(path), tmp_path / "cache")["text"]) == ["one\ntwo", "three", "four"]


@pytest.mark.parametrize("num_frames", [1, 2])
def test_compressed_jsonl_is_read_across_frames(num_frames: int, jsonl_file: Path, texts: list[str], tmp_path: Path):
    zstandard = pytest.importorskip("zstandard")
    lines = jsonl_file.read_bytes().splitlines(keepends=True)
    frames = [lines] if num_frames == 1 else [lines[:5], lines[5:]]
    path = tmp_path / "texts.jsonl.zst"
    path.write_bytes(b"".join(zstandard.compress(b"".join(frame)) for frame in frames))
    assert list(load_documents(str(path), tmp_path / "cache")["text"]) == texts


def test_a_changed_file_is_read_anew(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("before")
    before = load_documents(str(path), tmp_path / "cache")
    path.write_text("behind")
    documents = load_documents(str(path), tmp_path / "cache")
    assert list(documents["text"]) == ["behind"]
    assert documents._fingerprint != before._fingerprint, "the key of trained tokenizers"


def test_an_unchanged_file_is_read_once(jsonl_file: Path, tmp_path: Path):
    first, again = (load_documents(str(jsonl_file), tmp_path / "cache") for _ in range(2))
    assert first._fingerprint == again._fingerprint
    assert first.cache_files == again.cache_files


def test_stdlib_is_sorted_source_without_tests():
    files = stdlib_files()
    assert files == sorted(files)
    assert len(files) > 300  # CPython 3.10 to 3.14 have 600 to 900
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"site-packages", "test", "tests"} & set(path.parts[-3:-1]) for path in files)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("gone.txt", None, FileNotFoundError, r"--dataset=.*gone\.txt: no such file; check the path"),
        ("blank.txt", b"\n \n\n", ValueError, r"blank\.txt holds no text"),
        ("a.csv", b"x", ValueError, r"a\.csv is neither pile, stdlib, .*nor .*ends in \.txt, \.jsonl, \.jsonl\.zst"),
        ("a.txt", b"\xff", ValueError, r"a\.txt could not be read .*files must be UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', ValueError, r"a\.jsonl could not be read .*JSON"),
        ("a.jsonl", b'{"txt": "x"}\n', ValueError, r"a\.jsonl has rows without a \"text\" string .*\['txt'\]"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "x"}\n', ValueError, r"a\.jsonl has rows without a \"text\" string"),
        ("a.jsonl", b'{"text": 5}\n', ValueError, r"a\.jsonl has rows without a \"text\" string"),
        ("a.jsonl.zst", "cut", ValueError, r"a\.jsonl\.zst could not be read"),
    ],
    ids=["missing", "blank", "suffix", "utf8", "not-json", "no-text", "null-text", "text-number", "cut"],
)
def test_bad_input_names_the_setting(name, content, error, message, tmp_path):
    path = tmp_path / name
    if content == "cut":
        compressed = pytest.importorskip("zstandard").compress(b'{"text": "x"}\n' * 5000)
        content = compressed[:-4]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        load_documents(str(path), tmp_path / "cache")


def test_a_folder_is_all_its_text_files(tmp_path: Path):
    folder = tmp_path / "books"
    for name, content in (("b/two.txt", "two"), ("a.jsonl", '{"text": "one"}'), ("c.txt", ""), ("d.csv", "x")):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(content)
    assert checked_files(str(folder)) == [folder / "a.jsonl", folder / "b" / "two.txt"]
    assert sorted(load_documents(str(folder), tmp_path / "cache")["text"]) == ["one", "two"]


def test_a_folder_without_text_is_refused(tmp_path: Path):
    (tmp_path / "d.csv").write_text("x")
    with pytest.raises(ValueError, match=r"is a folder without text; put files there that end in \.txt, \.jsonl"):
        checked_files(str(tmp_path))


@given(st.lists(st.lists(st.integers(0, 999), max_size=40), max_size=30), st.integers(1, 50))
def test_packing_keeps_every_token_in_order(documents: list[list[int]], seq_len: int):
    arrays = [np.array(document, dtype=np.int32) for document in documents]
    sequences = cut_tokens({"input_ids": arrays}, seq_len)["input_ids"].tolist()
    tokens = list(chain.from_iterable(documents))
    assert all(len(sequence) == seq_len for sequence in sequences)
    assert len(sequences) == len(tokens) // seq_len
    assert list(chain.from_iterable(sequences)) == tokens[: len(sequences) * seq_len]


@pytest.mark.parametrize("streamed", [False, True], ids=["dataset", "stream"])
def test_packed_rows_hold_the_encoded_text(streamed, tokenizer, texts):
    documents = Dataset.from_dict({"text": texts * 60})  # 720 documents, more than one batch of the tokenizer
    expected = []
    for text in documents["text"]:
        expected += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    source = documents.to_iterable_dataset() if streamed else documents
    packed = pack_documents(encode_documents(source, tokenizer), 64, "training")
    assert isinstance(packed, IterableDataset if streamed else Dataset)
    tokens = torch.cat([row["input_ids"] for row in packed])
    assert tokens.tolist() == expected[: len(expected) // 64 * 64]


def test_a_document_that_mentions_the_end_marker_does_not_end_there(tokenizer: PreTrainedTokenizerBase):
    text = "before <|endoftext|> after"
    (ids,) = encode_documents(Dataset.from_dict({"text": [text]}), tokenizer)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 1
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == text


def test_encoding_without_an_end_marker_is_refused(tokenizer: PreTrainedTokenizerBase):
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"--tokenizer=.* has no end-of-text token .* --tokenizer train"):
        encode_documents(Dataset.from_dict({"text": ["x"]}), tokenizer)


@pytest.mark.parametrize("part", ["training", "validation"])
def test_too_little_text_for_one_sequence_is_refused(part: str, tokenizer: PreTrainedTokenizerBase):
    encoded = encode_documents(Dataset.from_dict({"text": ["short"]}), tokenizer)
    with pytest.raises(ValueError, match=rf"--seq_len=4096 is longer than all {part} text of --dataset"):
        pack_documents(encoded, 4096, part)


@given(st.lists(st.text(max_size=20), min_size=2, max_size=60, unique=True), st.floats(0.01, 0.9), st.randoms())
def test_split_is_by_document_and_ignores_order(texts: list[str], fraction: float, random):
    num_validation = max(1, round(fraction * len(texts)))
    shuffled = random.sample(texts, len(texts))
    if num_validation == len(texts):
        with pytest.raises(ValueError, match="holds out all"):
            split_by_document(Dataset.from_dict({"text": texts}), fraction)
        return
    train, validation = split_by_document(Dataset.from_dict({"text": texts}), fraction)
    assert sorted([*train["text"], *validation["text"]]) == sorted(texts)
    assert len(validation) == num_validation
    again = split_by_document(Dataset.from_dict({"text": shuffled}), fraction)
    assert set(again[1]["text"]) == set(validation["text"])


def test_labels_are_the_inputs_in_their_own_storage():
    rows = [{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([3, 0])}]
    batch = stack_sequences(rows)
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2], [3, 0]]
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()
