"""Training sequences from documents. Some documents are held out for validation. The others are encoded, concatenated,
and cut to sequences of equal length."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

Documents = TypeVar("Documents", Dataset, IterableDataset)
_STREAM_BATCH = 1000  # documents of a stream that are packed together
_ENCODE_BATCH = 256  # documents per tokenizer call: enough for the tokenizer's threads, with little memory


def split_by_document(documents: Dataset, validation_fraction: float) -> tuple[Dataset, Dataset]:
    """Split a dataset into (training, validation) documents. Documents with equal texts are always in the same part.
    The documents with the smallest hashes become validation documents. The split therefore depends only on the texts,
    not on their order or a seed. Raises ValueError if no training document would be left."""
    hashes = [_text_hash(text) for text in documents["text"]]
    num_validation = max(1, round(validation_fraction * len(hashes)))
    limit = sorted(hashes)[num_validation - 1]
    train = [row for row, value in enumerate(hashes) if value > limit]
    validation = [row for row, value in enumerate(hashes) if value <= limit]
    if not train:
        raise ValueError(
            f"--validation_fraction={validation_fraction} holds out all {len(hashes)} documents of the data; the split "
            "is by document, so pass data with at least 2 different documents or a smaller fraction"
        )
    return documents.select(train), documents.select(validation)


def split_stream(documents: IterableDataset, validation_documents: int) -> tuple[IterableDataset, IterableDataset]:
    """Split a stream into (training, validation) parts. The validation part is the first `validation_documents`
    documents."""
    return documents.skip(validation_documents), documents.take(validation_documents)


def encode_documents(documents: Documents, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Encode documents as {"input_ids": list[int]}, each with the tokenizer's end-of-text token at the end. Raises
    ValueError if the tokenizer has no end-of-text token."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"--tokenizer={tokenizer.name_or_path} has no end-of-text token to join documents with; "
            "pass one with an eos_token, or --tokenizer train"
        )
    return documents.map(
        _encode_batch,
        batched=True,
        batch_size=_ENCODE_BATCH,
        remove_columns=["text"],
        fn_kwargs={"tokenizer": tokenizer},
        **({"desc": "Encoding"} if isinstance(documents, Dataset) else {}),
    )


def pack_documents(encoded: Documents, seq_len: int, part: str) -> Documents:
    """Concatenate encoded documents, and return sequences of `seq_len` tokens, [seq_len] int64 each.

    At most seq_len - 1 tokens are dropped: at the end of a Dataset, or of every 1,000 documents of a stream. Raises
    ValueError, with the name `part` in the message, if the text of a Dataset does not fill one sequence.
    """
    batch_size = _STREAM_BATCH if isinstance(encoded, IterableDataset) else None  # None: all documents at once
    settings = {"seq_len": seq_len}
    packed = encoded.with_format("numpy").map(cut_tokens, batched=True, batch_size=batch_size, fn_kwargs=settings)
    if isinstance(packed, Dataset) and not len(packed):
        raise ValueError(
            f"--seq_len={seq_len} is longer than all {part} text of --dataset together; lower --seq_len, use more text"
            + (", or raise --validation_fraction" if part == "validation" else "")
        )
    return packed.with_format("torch")


def cut_tokens(batch: dict[str, Sequence[np.ndarray]], seq_len: int) -> dict[str, np.ndarray]:
    """Cut the concatenated documents of a batch into rows of `seq_len` tokens.

    Example: [1, 2, 3] and [4, 5] with seq_len 2 give [1, 2] and [3, 4].
    """
    tokens = np.concatenate([np.empty(0, dtype=np.int32), *batch["input_ids"]]).astype(np.int32)
    num_rows = len(tokens) // seq_len
    return {"input_ids": tokens[: num_rows * seq_len].reshape(num_rows, seq_len)}


def stack_sequences(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch [B, T] of rows without padding. Labels are equal to the inputs, because the model shifts the
    labels. The batch has no attention mask, because rows have no padding. Unlike Transformers' collator for language
    modelling, this function keeps the labels of <|endoftext|>."""
    input_ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def _encode_batch(batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Encode a batch of texts, each followed by the end-of-text token."""
    # split_special_tokens: the string <|endoftext|> within a text must not end the document.
    encoded = tokenizer(batch["text"], add_special_tokens=False, split_special_tokens=True, verbose=False)
    return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in encoded["input_ids"]]}


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
