"""Data of a run: documents of text, split into training and validation, encoded and cut to sequences of equal length.

Documents come from the Pile, the running Python's standard library, a file, or a folder of files. Every source gives
one `datasets` object with the single column "text", one row per document. `datasets` reads local files, caches them as
Arrow files, and reads a changed file again. The Pile is streamed.
"""

import hashlib
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from datasets import Dataset, IterableDataset, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from recipe_arguments import DataArguments
from text_tokenizer import load_tokenizer, trained_tokenizer
from transformers import PreTrainedTokenizerBase

FILE_SUFFIXES = (".txt", ".jsonl", ".jsonl.zst")
# Exclude third-party packages, which are not the standard library, and test data, which is not useful text.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
Documents = TypeVar("Documents", Dataset, IterableDataset)
_STREAM_BATCH = 1000  # documents of a stream that are packed together
_ENCODE_BATCH = 256  # documents per tokenizer call: enough for the tokenizer's threads, with little memory


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Tokenizer and data sets for the Trainer. Rows are {"input_ids": [seq_len] int64}."""

    tokenizer: PreTrainedTokenizerBase
    train: Dataset | IterableDataset
    validation: Dataset


def load_text_data(
    args: DataArguments, seq_len: int, main_process_first: Callable[..., AbstractContextManager[None]]
) -> TextData:
    """Load the text dataset that `args` names, in sequences of `seq_len` tokens. If there are several processes, the
    first one fills the caches (`TrainingArguments.main_process_first`). Raises ValueError or FileNotFoundError for an
    invalid setting, which the error names."""
    with main_process_first(desc="preparing the data"):
        train, validation, text_key = _split_documents(args)
        if args.tokenizer == "train":
            num_documents, cache_dir = args.tokenizer_documents, Path(args.cache_dir)
            tokenizer = trained_tokenizer(train, text_key, args.vocab_size, num_documents, cache_dir)
        else:
            tokenizer = load_tokenizer(args.tokenizer)
        packed_train = pack_documents(encode_documents(train, tokenizer), seq_len, "training")
        packed_validation = pack_documents(encode_documents(validation, tokenizer), seq_len, "validation")
        first_validation = packed_validation.take(args.max_eval_sequences)
        if isinstance(first_validation, IterableDataset):
            first_validation = Dataset.from_list(list(first_validation)).with_format("torch")
        if not len(first_validation):  # of a stream: `pack_documents` cannot know its length
            raise ValueError(
                f"--seq_len={seq_len} exceeds all validation text; lower it, or raise --validation_documents"
            )
    return TextData(tokenizer=tokenizer, train=packed_train, validation=first_validation)


def _split_documents(
    args: DataArguments,
) -> tuple[Dataset, Dataset, str] | tuple[IterableDataset, IterableDataset, str]:
    """Return training documents, validation documents, and a key that identifies the training text in caches."""
    if args.dataset == "pile":
        rows = load_dataset(args.pile_id, split="train", streaming=True).select_columns("text")
        train, validation = rows.skip(args.validation_documents), rows.take(args.validation_documents)
        return train, validation, f"{args.pile_id} from {args.validation_documents}"
    documents = load_documents(args.dataset, Path(args.cache_dir) / "documents")
    train, validation = split_by_document(documents, args.validation_fraction)
    return train, validation, train._fingerprint


def load_documents(dataset: str, cache_dir: Path) -> Dataset:
    """Return the documents of "stdlib", a file or a folder of files, without blank ones.

    Raises FileNotFoundError for a missing file, and ValueError for unusable text. Both name the setting.
    """
    if dataset == "stdlib":
        # A few files declare an encoding other than UTF-8; replaced characters do no harm here.
        settings = {"sample_by": "document", "encoding_errors": "replace"}
        parts = [_read_files("text", stdlib_files(), dataset, cache_dir, **settings)]
    else:
        files = checked_files(dataset)
        texts = [path for path in files if path.suffix == ".txt"]
        rows = [path for path in files if path.suffix != ".txt"]
        parts = [_read_files("text", texts, dataset, cache_dir, sample_by="paragraph")] if texts else []
        parts += [_read_files("json", rows, dataset, cache_dir)] if rows else []
    documents = concatenate_datasets(parts).filter(_have_text, batched=True)
    if not len(documents):
        raise ValueError(f"--dataset={dataset} holds no text: every document in it is empty; pass a file with text")
    return documents


def stdlib_files() -> list[Path]:
    """Return the Python files of the standard library in a fixed order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / file for file in sorted(files) if _SKIPPED_FOLDERS.isdisjoint(file.parts)]


def checked_files(dataset: str) -> list[Path]:
    """Return the file in `--dataset`, or all non-empty text files of a folder, in a fixed order.

    Raises FileNotFoundError or ValueError if there are none.
    """
    path = Path(dataset)
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.name.endswith(FILE_SUFFIXES) and file.is_file())
        text_files = sorted(file for file in files if file.stat().st_size > 0)
        if not text_files:
            raise ValueError(
                f"--dataset={dataset} is a folder without text; put files there that end in {', '.join(FILE_SUFFIXES)}"
            )
        return text_files
    if not path.name.endswith(FILE_SUFFIXES):
        raise ValueError(
            f"--dataset={dataset} is neither pile, stdlib, a folder, nor a file of a known kind; "
            f"name a file that ends in {', '.join(FILE_SUFFIXES)}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"--dataset={dataset}: no such file; check the path (relative to {Path.cwd()})")
    return [path]


def _read_files(kind: str, files: list[Path], dataset: str, cache_dir: Path, **settings: str) -> Dataset:
    try:
        rows = load_dataset(
            kind, data_files=[str(file) for file in files], split="train", cache_dir=str(cache_dir), **settings
        )
    except (DatasetGenerationError, ValueError, StopIteration) as error:  # datasets logs which file it could not read
        reason = str(error.__cause__ or error) or "it is empty, or cut short"
        raise ValueError(
            f"--dataset={dataset} could not be read ({reason}); files must be UTF-8, and each line "
            f'of a .jsonl file one JSON object {{"text": "...", ...}}'
        ) from error
    if rows.features.get("text") != Value("string") or rows.data.column("text").null_count:
        raise ValueError(
            f'--dataset={dataset} has rows without a "text" string (its keys are {rows.column_names}); each row must '
            f'be {{"text": "...", ...}}'
        )
    return rows.select_columns("text")


def _have_text(batch: dict[str, list[str]]) -> list[bool]:
    return [bool(text.strip()) for text in batch["text"]]


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
