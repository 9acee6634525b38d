"""Data of a run: tokenizer, training sequences and validation sequences."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, IterableDataset
from recipe_arguments import DataArguments
from text_documents import load_documents, stream_pile
from text_packing import encode_documents, pack_documents, split_by_document, split_stream
from text_tokenizer import load_tokenizer, trained_tokenizer
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Tokenizer and data sets for the Trainer. Rows are {"input_ids": [seq_len] int64}."""

    tokenizer: PreTrainedTokenizerBase
    train: Dataset | IterableDataset
    validation: Dataset
    held_out: Dataset | IterableDataset
    """Documents of the validation sequences, as rows {"text": str}. They are not used for training."""


def load_text_data(
    args: DataArguments, seq_len: int, main_process_first: Callable[..., AbstractContextManager[None]]
) -> TextData:
    """Load the text dataset that `args` names, in sequences of `seq_len` tokens. If there are several processes, the
    first one fills the caches (`TrainingArguments.main_process_first`). Raises ValueError or FileNotFoundError for an
    invalid setting, which the error names."""
    with main_process_first(desc="preparing the data"):
        train, validation, text_key = _split_documents(args)
        tokenizer = _recipe_tokenizer(args, train, text_key)
        packed_train = pack_documents(encode_documents(train, tokenizer), seq_len, "training")
        packed_validation = pack_documents(encode_documents(validation, tokenizer), seq_len, "validation")
        first_validation = _first_sequences(packed_validation, args.max_eval_sequences)
        if not len(first_validation):  # of a stream: `pack_documents` cannot know its length
            raise ValueError(
                f"--seq_len={seq_len} exceeds all validation text; lower it, or raise --validation_documents"
            )
    return TextData(tokenizer=tokenizer, train=packed_train, validation=first_validation, held_out=validation)


def _split_documents(
    args: DataArguments,
) -> tuple[Dataset, Dataset, str] | tuple[IterableDataset, IterableDataset, str]:
    """Return training documents, validation documents, and a key that identifies the training text in caches."""
    if args.dataset == "pile":
        train, validation = split_stream(stream_pile(args.pile_id), args.validation_documents)
        return train, validation, f"{args.pile_id} from {args.validation_documents}"
    documents = load_documents(args.dataset, Path(args.cache_dir) / "documents")
    train, validation = split_by_document(documents, args.validation_fraction)
    return train, validation, train._fingerprint


def _recipe_tokenizer(args: DataArguments, train: Dataset | IterableDataset, text_key: str) -> PreTrainedTokenizerBase:
    if args.tokenizer != "train":
        return load_tokenizer(args.tokenizer)
    return trained_tokenizer(train, text_key, args.vocab_size, args.tokenizer_documents, Path(args.cache_dir))


def _first_sequences(sequences: Dataset | IterableDataset, num_sequences: int) -> Dataset:
    """Return the first `num_sequences` sequences of a dataset."""
    first = sequences.take(num_sequences)
    return first if isinstance(first, Dataset) else Dataset.from_list(list(first)).with_format("torch")
