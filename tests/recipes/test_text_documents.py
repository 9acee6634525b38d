from pathlib import Path

import pytest
from text_documents import checked_files, load_documents, stdlib_files


def test_jsonl_gives_the_text_of_each_row(jsonl_file: Path, texts: list[str], tmp_path: Path):
    documents = load_documents(str(jsonl_file), tmp_path / "cache")
    assert documents.column_names == ["text"]
    assert list(documents["text"]) == texts


def test_blank_lines_separate_the_documents_of_a_txt_file(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"one\r\ntwo\r\n\r\nthree\r\n\r\n \r\n\r\nfour")
    assert list(load_documents(str(path), tmp_path / "cache")["text"]) == ["one\ntwo", "three", "four"]


@pytest.mark.parametrize("num_frames", [1, 2])
def test_compressed_jsonl_is_read_across_frames(num_frames: int, jsonl_file: Path, texts: list[str], tmp_path: Path):
    zstandard = pytest.importorskip("zstandard")
    lines = jsonl_file.read_bytes().splitlines(keepends=True)
    frames = [lines] if num_frames == 1 else [lines[:5], lines[5:]]
    path = tmp_path / "texts.jsonl.zst"
    path.write_bytes(b"".join(zstandard.compress(b"".join(frame)) for frame in frames))
    assert list(load_documents(str(path), tmp_path / "cache")["text"]) == texts


def test_a_changed_file_is_read_anew(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("before")
    before = load_documents(str(path), tmp_path / "cache")
    path.write_text("behind")
    documents = load_documents(str(path), tmp_path / "cache")
    assert list(documents["text"]) == ["behind"]
    assert documents._fingerprint != before._fingerprint, "the key of trained tokenizers"


def test_an_unchanged_file_is_read_once(jsonl_file: Path, tmp_path: Path):
    first, again = (load_documents(str(jsonl_file), tmp_path / "cache") for _ in range(2))
    assert first._fingerprint == again._fingerprint
    assert first.cache_files == again.cache_files


def test_stdlib_is_sorted_source_without_tests():
    files = stdlib_files()
    assert files == sorted(files)
    assert len(files) > 300  # CPython 3.10 to 3.14 have 600 to 900
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"site-packages", "test", "tests"} & set(path.parts[-3:-1]) for path in files)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("gone.txt", None, FileNotFoundError, r"--dataset=.*gone\.txt: no such file; check the path"),
        ("blank.txt", b"\n \n\n", ValueError, r"blank\.txt holds no text"),
        ("a.csv", b"x", ValueError, r"a\.csv is neither pile, stdlib, .*nor .*ends in \.txt, \.jsonl, \.jsonl\.zst"),
        ("a.txt", b"\xff", ValueError, r"a\.txt could not be read .*files must be UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', ValueError, r"a\.jsonl could not be read .*JSON"),
        ("a.jsonl", b'{"txt": "x"}\n', ValueError, r"a\.jsonl has rows without a \"text\" string .*\['txt'\]"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "x"}\n', ValueError, r"a\.jsonl has rows without a \"text\" string"),
        ("a.jsonl", b'{"text": 5}\n', ValueError, r"a\.jsonl has rows without a \"text\" string"),
        ("a.jsonl.zst", "cut", ValueError, r"a\.jsonl\.zst could not be read"),
    ],
    ids=["missing", "blank", "suffix", "utf8", "not-json", "no-text", "null-text", "text-number", "cut"],
)
def test_bad_input_names_the_setting(name, content, error, message, tmp_path):
    path = tmp_path / name
    if content == "cut":
        compressed = pytest.importorskip("zstandard").compress(b'{"text": "x"}\n' * 5000)
        content = compressed[:-4]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        load_documents(str(path), tmp_path / "cache")


def test_a_folder_is_all_its_text_files(tmp_path: Path):
    folder = tmp_path / "books"
    for name, content in (("b/two.txt", "two"), ("a.jsonl", '{"text": "one"}'), ("c.txt", ""), ("d.csv", "x")):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(content)
    assert checked_files(str(folder)) == [folder / "a.jsonl", folder / "b" / "two.txt"]
    assert sorted(load_documents(str(folder), tmp_path / "cache")["text"]) == ["one", "two"]


def test_a_folder_without_text_is_refused(tmp_path: Path):
    (tmp_path / "d.csv").write_text("x")
    with pytest.raises(ValueError, match=r"is a folder without text; put files there that end in \.txt, \.jsonl"):
        checked_files(str(tmp_path))
