from pathlib import Path

import pytest
from text_documents import load_documents, stdlib_files


def cached_files(folder: Path) -> list[Path]:
    """Return all cached files but datasets' empty lock files. A failed read must leave none."""
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_jsonl_gives_the_text_of_each_row(jsonl_file: Path, texts: list[str], tmp_path: Path):
    documents, _ = load_documents(str(jsonl_file), tmp_path / "cache")
    assert documents.column_names == ["text"]
    assert list(documents["text"]) == texts


def test_a_changed_file_is_read_anew(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("before")
    _, digest_before = load_documents(str(path), tmp_path / "cache")
    path.write_text("behind")
    documents, digest_after = load_documents(str(path), tmp_path / "cache")
    assert list(documents["text"]) == ["behind"]
    assert digest_before != digest_after


def test_an_unchanged_file_is_read_once(jsonl_file: Path, tmp_path: Path):
    load_documents(str(jsonl_file), tmp_path / "cache")
    (arrow,) = [path for path in cached_files(tmp_path / "cache") if path.suffix == ".arrow"]
    written_ns = arrow.stat().st_mtime_ns
    load_documents(str(jsonl_file), tmp_path / "cache")
    assert arrow.stat().st_mtime_ns == written_ns


def test_stdlib_is_sorted_source_without_tests():
    files = stdlib_files()
    assert files == sorted(files)
    assert len(files) > 300  # CPython 3.10 to 3.14 have 600 to 900
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"site-packages", "test", "tests"} & set(path.parts[-3:-1]) for path in files)


def test_a_failed_read_leaves_no_cache(tmp_path: Path):
    path = tmp_path / "half.jsonl"
    path.write_text('{"text": "good"}\n' * 3000 + "bad\n")
    with pytest.raises(ValueError, match=r"half\.jsonl, line 3001 is not JSON"):
        load_documents(str(path), tmp_path / "cache")
    assert cached_files(tmp_path / "cache") == []
