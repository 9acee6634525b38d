"""Training documents: the Pile, the running Python's standard library, a file, or a folder of files.

Every source gives one `datasets` object with the single column "text", one row per document. `datasets` reads local
files, caches them as Arrow files, and reads a changed file again. The Pile is streamed.
"""

import sysconfig
from pathlib import Path

from datasets import Dataset, IterableDataset, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError

FILE_SUFFIXES = (".txt", ".jsonl", ".jsonl.zst")
# Exclude third-party packages, which are not the standard library, and test data, which is not useful text.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def stream_pile(pile_id: str) -> IterableDataset:
    """Return the Pile, or a local copy with the same columns, as a stream. Rows are downloaded when they are read."""
    rows = load_dataset(pile_id, split="train", streaming=True)
    return rows.select_columns("text")


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
