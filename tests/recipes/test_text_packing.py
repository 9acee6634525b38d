from itertools import chain

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from text_packing import cut_tokens, encode_documents, pack_documents, split_by_document, stack_sequences
from transformers import PreTrainedTokenizerBase


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
