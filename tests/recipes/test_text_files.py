from pathlib import Path

import pytest
from text_files import checked_files, read_file


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("one\ntwo\n\nthree\n\n\nfour", ["one\ntwo\n", "three\n", "four"]),
        ("one\n\ntwo\n<|endoftext|>\nthree\n", ["one\n\ntwo\n", "three\n"]),
        ("<|endoftext|>\n only \n<|endoftext|>\n", [" only \n"]),
    ],
    ids=["blank-lines", "marker-lines-win", "empty-documents-left-out"],
)
def test_txt_is_cut_into_documents(content: str, expected: list[str], tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text(content)
    assert list(read_file(str(path))) == expected


@pytest.mark.parametrize("num_frames", [1, 2])
def test_compressed_jsonl_is_read_across_frames(num_frames: int, jsonl_file: Path, texts: list[str], tmp_path: Path):
    zstandard = pytest.importorskip("zstandard")
    lines = jsonl_file.read_bytes().splitlines(keepends=True)
    frames = [lines] if num_frames == 1 else [lines[:5], lines[5:]]
    path = tmp_path / "texts.jsonl.zst"
    path.write_bytes(b"".join(zstandard.compress(b"".join(frame)) for frame in frames))
    assert list(read_file(str(path))) == texts


def test_windows_line_ends_are_read_as_newlines(tmp_path: Path):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"one\r\ntwo\r\n\r\nthree\r\n")
    assert list(read_file(str(path))) == ["one\ntwo\n", "three\n"]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("gone.txt", None, FileNotFoundError, r"--dataset=.*gone\.txt: no such file; check the path"),
        ("empty.txt", b"", ValueError, r"empty\.txt is an empty file; pass a file with text"),
        ("blank.txt", b"\n \n\n", ValueError, r"blank\.txt holds no text"),
        ("a.csv", b"x", ValueError, r"a\.csv is neither pile, stdlib, .*nor .*ends in \.txt, \.jsonl, \.jsonl\.zst"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text"\n', ValueError, r"a\.jsonl, line 3 is not JSON"),
        ("a.jsonl", b'{"txt": "x"}\n', ValueError, r"line 1 has no \"text\" string \(it has the keys \['txt'\]\)"),
        ("a.jsonl", b'{"text": 5}\n', ValueError, r"line 1 has no \"text\" string"),
        ("a.jsonl", b'["text"]\n', ValueError, r"line 1 has no \"text\" string \(it has a list\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', ValueError, r"a\.jsonl, line 2 is not UTF-8"),
        ("a.jsonl.zst", b"not zstandard at all", ValueError, r"a\.jsonl\.zst is not valid zstandard .*fetch it again"),
        ("a.jsonl.zst", "cut", ValueError, r"a\.jsonl\.zst is cut short"),
    ],
    ids=["missing", "empty", "blank", "suffix", "not-json", "no-text", "text-number", "row-list", "utf8", "zst", "cut"],
)
def test_bad_input_names_the_setting(name, content, error, message, tmp_path):
    path = tmp_path / name
    if content == "cut":
        compressed = pytest.importorskip("zstandard").compress(b'{"text": "x"}\n' * 5000)
        content = compressed[:-4]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        [list(read_file(str(file))) for file in checked_files(str(path))]


def test_a_folder_is_all_its_text_files(tmp_path: Path):
    for name, content in (("b/two.txt", "two"), ("a.jsonl", "{}"), ("c.txt", ""), ("d.csv", "x")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert checked_files(str(tmp_path)) == [tmp_path / "a.jsonl", tmp_path / "b" / "two.txt"]


def test_a_folder_without_text_is_refused(tmp_path: Path):
    (tmp_path / "d.csv").write_text("x")
    with pytest.raises(ValueError, match=r"is a folder without text; put files there that end in \.txt, \.jsonl"):
        checked_files(str(tmp_path))
