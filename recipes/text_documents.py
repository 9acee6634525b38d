"""Training documents: the Pile, the running Python's standard library, a file, or a folder of files.

Every source gives one `datasets` object with the single column "text", one row per document. Local text is cached as an
Arrow file. The content is the cache's key, so a changed file is read again. The Pile is streamed.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from arrow_cache import cached_rows
from datasets import Dataset, Features, IterableDataset, Value, load_dataset
from text_files import checked_files, read_file

# Exclude third-party packages, which are not the standard library, and test data, which is not useful text.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def stream_pile(pile_id: str) -> IterableDataset:
    """Return the Pile, or a local copy with the same columns, as a stream. Rows are downloaded when they are read."""
    rows = load_dataset(pile_id, split="train", streaming=True)
    return rows.select_columns("text")


def load_documents(dataset: str, cache_dir: Path) -> tuple[Dataset, str]:
    """Return the documents of "stdlib", a file or a folder of files, and the SHA-256 of their content. Raises
    FileNotFoundError for a missing file and ValueError for unusable text. After an error, no file remains in the
    cache."""
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
    """Return the Python files of the standard library in a fixed order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / file for file in sorted(files) if _SKIPPED_FOLDERS.isdisjoint(file.parts)]


def _stdlib_rows(paths: list[str]) -> Iterator[dict[str, str]]:
    """Yield one document per source file. Empty files (most `__init__.py`) are left out."""
    for path in paths:
        # A few files declare an encoding other than UTF-8; replaced characters do no harm here.
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        if text.strip():
            yield {"text": text}


def _file_rows(paths: list[str]) -> Iterator[dict[str, str]]:
    for path in paths:
        yield from ({"text": text} for text in read_file(path))


def _content_digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the files' suffixes, lengths and bytes."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.suffix}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
