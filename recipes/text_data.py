"""Data of a run: documents of text, split into training and validation, encoded and cut to sequences of equal length.

`datasets` reads and caches local files, and streams data sets of the hub. A tokenizer is loaded, or trained on the
run's text.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from datasets import Dataset, IterableDataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Exclude third-party packages, which are not the standard library, and test data, which is not useful text.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
VALIDATION_FRACTION = 0.05  # of the documents of a local data set
VALIDATION_DOCUMENTS = 2000  # from the start of a stream
TOKENIZER_DOCUMENTS = 20_000  # at most, on which a tokenizer is trained
END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # the 256 bytes and <|endoftext|>
_STREAM_BATCH = 1000  # documents of a stream that are packed together
_ENCODE_BATCH = 256  # documents per tokenizer call: enough for the tokenizer's threads, with little memory
Documents = TypeVar("Documents", Dataset, IterableDataset)


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Tokenizer and data sets for the Trainer. Rows are {"input_ids": [seq_len] int64}."""

    tokenizer: PreTrainedTokenizerBase
    train: Dataset | IterableDataset
    validation: Dataset


def load_text_data(dataset: str, tokenizer: str, vocab_size: int, seq_len: int, max_eval_sequences: int) -> TextData:
    """Load a text dataset in sequences of `seq_len` tokens. Raises ValueError or OSError for an invalid setting, which
    the error names."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"--vocab_size={vocab_size} is below {MIN_VOCAB_SIZE}, the 256 bytes and {END_OF_TEXT}; raise --vocab_size"
        )
    train, validation = _split_documents(dataset)
    if tokenizer == "train":
        batches = train.take(TOKENIZER_DOCUMENTS).iter(batch_size=256)
        trained_or_loaded = train_tokenizer((text for batch in batches for text in batch["text"]), vocab_size)
    else:
        trained_or_loaded = _load_tokenizer(tokenizer)
    sequences = [pack_documents(encode_documents(part, trained_or_loaded), seq_len) for part in (train, validation)]
    first_validation = sequences[1].take(max_eval_sequences)
    if isinstance(first_validation, IterableDataset):
        first_validation = Dataset.from_list(list(first_validation)).with_format("torch")
    if not len(first_validation) or (isinstance(sequences[0], Dataset) and not len(sequences[0])):
        raise ValueError(f"--seq_len={seq_len} is longer than all text of a part of --dataset; lower it")
    return TextData(tokenizer=trained_or_loaded, train=sequences[0], validation=first_validation)


def _split_documents(dataset: str) -> tuple[Dataset, Dataset] | tuple[IterableDataset, IterableDataset]:
    """Return the documents of `--dataset` for training and for validation."""
    path = Path(dataset)
    if dataset == "stdlib":
        # A few files declare an encoding other than UTF-8; replaced characters do no harm here.
        files = [str(file) for file in stdlib_files()]
        settings = {"sample_by": "document", "encoding_errors": "replace"}
        documents = load_dataset("text", data_files=files, split="train", **settings)
    elif path.suffix == ".txt":
        documents = load_dataset("text", data_files=dataset, split="train", sample_by="paragraph")
    elif path.suffix == ".jsonl":
        documents = load_dataset("json", data_files=dataset, split="train")
    else:
        rows = load_dataset(dataset, split="train", streaming=True).select_columns("text")
        return rows.skip(VALIDATION_DOCUMENTS), rows.take(VALIDATION_DOCUMENTS)
    return split_by_document(documents.select_columns("text").filter(_have_text, batched=True))


def stdlib_files() -> list[Path]:
    """Return the Python files of the standard library in a fixed order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / file for file in sorted(files) if _SKIPPED_FOLDERS.isdisjoint(file.parts)]


def _have_text(batch: dict[str, list[str]]) -> list[bool]:
    return [bool(text.strip()) for text in batch["text"]]


def split_by_document(documents: Dataset) -> tuple[Dataset, Dataset]:
    """Split a dataset into (training, validation) documents. Documents with equal texts are always in the same part.
    The documents with the smallest hashes become validation documents. The split therefore depends only on the texts,
    not on their order or a seed."""
    hashes = [
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in documents["text"]
    ]
    limit = sorted(hashes)[max(1, round(VALIDATION_FRACTION * len(hashes))) - 1] if hashes else b""
    train = [row for row, value in enumerate(hashes) if value > limit]
    if not train:
        raise ValueError("--dataset must have at least 2 different documents, of which one is held out")
    return documents.select(train), documents.select([row for row, value in enumerate(hashes) if value <= limit])


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--tokenizer={name} could not be loaded: {str(error).strip().partition(chr(10))[0]} Pass a hub id, a "
            f"folder with a saved tokenizer, or --tokenizer train."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--tokenizer={name} has no end-of-text token to join documents with: pass --tokenizer train")
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on `texts`. If the texts have too few pairs to merge, the vocabulary
    is smaller than `vocab_size`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that any text can be encoded
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def encode_documents(documents: Documents, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Encode documents as {"input_ids": list[int]}, each with the tokenizer's end-of-text token at the end."""
    return documents.map(
        _encode_batch,
        batched=True,
        batch_size=_ENCODE_BATCH,
        remove_columns=["text"],
        fn_kwargs={"tokenizer": tokenizer},
        **({"desc": "Encoding"} if isinstance(documents, Dataset) else {}),
    )


def _encode_batch(batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Encode a batch of texts, each followed by the end-of-text token."""
    # split_special_tokens: the string <|endoftext|> within a text must not end the document.
    encoded = tokenizer(batch["text"], add_special_tokens=False, split_special_tokens=True, verbose=False)
    return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in encoded["input_ids"]]}


def pack_documents(encoded: Documents, seq_len: int) -> Documents:
    """Concatenate encoded documents, and return sequences of `seq_len` tokens, [seq_len] int64 each.

    At most seq_len - 1 tokens are dropped: at the end of a Dataset, or of every 1,000 documents of a stream.
    """
    batch_size = _STREAM_BATCH if isinstance(encoded, IterableDataset) else None  # None: all documents at once
    settings = {"seq_len": seq_len}
    packed = encoded.with_format("numpy").map(cut_tokens, batched=True, batch_size=batch_size, fn_kwargs=settings)
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
