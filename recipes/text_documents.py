"""Documents to train on: the Pile, the running Python's standard library, a file, or a folder of files.

Every source ends as one `datasets` object with the single column "text", one row per document. Local text is kept as
an Arrow cache keyed by its content, so that a changed file is read anew; the Pile is streamed.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from arrow_cache import cached_rows
from datasets import Dataset, Features, IterableDataset, Value, load_dataset
from text_files import checked_files, read_file

# Third-party packages are not the standard library, and test data is not text anyone wants to model.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def stream_pile(pile_id: str) -> IterableDataset:
    """The hub's Pile (or a folder in its schema), streamed: nothing is downloaded before it is read."""
    rows = load_dataset(pile_id, split="train", streaming=True)
    return rows.select_columns("text")


def load_documents(dataset: str, cache_dir: Path) -> tuple[Dataset, str]:
    """The documents of `stdlib`, a file or a folder of files, and the SHA-256 of their content.

    Raises FileNotFoundError for a missing file and ValueError for text that cannot be used; either leaves no cache.
    """
    paths = stdlib_files() if dataset == "stdlib" else checked_files(dataset)
    digest = _content_digest(paths)
    documents = cached_rows(
        _stdlib_rows if dataset == "stdlib" else _file_rows,
        Features({"text": Value("string")}),
        str(cache_dir / "documents"),
        digest,
        paths=[str(path) for path in paths],
    )
    return documents, digest


def stdlib_files() -> list[Path]:
    """The standard library's Python files in a fixed order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / file for file in sorted(files) if _SKIPPED_FOLDERS.isdisjoint(file.parts)]


def _stdlib_rows(paths: list[str]) -> Iterator[dict[str, str]]:
    """One document per source file; empty files (most `__init__.py`) are left out."""
    for path in paths:
        # A few files declare another encoding than UTF-8; a replaced character does not matter here.
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        if text.strip():
            yield {"text": text}


def _file_rows(paths: list[str]) -> Iterator[dict[str, str]]:
    for path in paths:
        yield from ({"text": text} for text in read_file(path))


def _content_digest(paths: Iterable[Path]) -> str:
    """SHA-256 over the files' bytes, each preceded by its kind and length so that moved borders count."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.suffix}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
