"""Tokenizers: loaded from the hub or a folder, or a byte-level BPE trained on the run's text and cached."""

import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # the 256 bytes and <|endoftext|>


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id or folder. Raises ValueError if the tokenizer cannot be loaded."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--tokenizer={name} could not be loaded: {first_line} "
            "Pass a hub id (with network access), a folder with a saved tokenizer, or --tokenizer train."
        ) from error


def trained_tokenizer(
    documents: Dataset | IterableDataset, text_key: str, vocab_size: int, num_documents: int, cache_dir: Path
) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer, trained on the first `num_documents` documents or loaded from the cache.
    `text_key` identifies the text in the cache's key. If the text has too few pairs to merge, the vocabulary is smaller
    than `vocab_size`. An interrupted run leaves no tokenizer in the cache."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"--vocab_size={vocab_size} is below {MIN_VOCAB_SIZE}, the 256 bytes and {END_OF_TEXT}; raise --vocab_size"
        )
    settings = f"{text_key} {num_documents} {vocab_size} {END_OF_TEXT} {tokenizers.__version__}"
    folder = cache_dir / "tokenizers" / hashlib.sha256(settings.encode()).hexdigest()[:32]
    if not folder.is_dir():
        batches = documents.take(num_documents).iter(batch_size=256)
        _save_atomically(_train_bpe((text for batch in batches for text in batch["text"]), vocab_size), folder)
    return AutoTokenizer.from_pretrained(folder)


def _train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
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


def _save_atomically(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a tokenizer into a temporary folder and rename it to `folder`. So `folder` is always either complete or
    absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # if the folder exists, another process has just saved the same tokenizer
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
