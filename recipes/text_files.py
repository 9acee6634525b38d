"""Reader of the documents in a text file: .txt, .jsonl or .jsonl.zst. Errors name the file and the line."""

import json
from collections.abc import Iterator
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
FILE_SUFFIXES = (".txt", ".jsonl", ".jsonl.zst")
_READ_BYTES = 1 << 20


def checked_file(dataset: str) -> Path:
    """Return the path in `--dataset FILE`. Raises FileNotFoundError or ValueError if the path is not a text file."""
    path = Path(dataset)
    if not path.name.endswith(FILE_SUFFIXES):
        raise ValueError(
            f"--dataset={dataset} is neither pile, stdlib, a folder, nor a file of a known kind; "
            f"name a file that ends in {', '.join(FILE_SUFFIXES)}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"--dataset={dataset}: no such file; check the path (relative to {Path.cwd()})")
    if path.stat().st_size == 0:
        raise ValueError(f"--dataset={dataset} is an empty file; pass a file with text")
    return path


def checked_files(dataset: str) -> list[Path]:
    """Return the file in `--dataset`, or all non-empty text files of a folder, in a fixed order."""
    folder = Path(dataset)
    if not folder.is_dir():
        return [checked_file(dataset)]
    files = (path for path in folder.rglob("*") if path.name.endswith(FILE_SUFFIXES) and path.is_file())
    text_files = sorted(path for path in files if path.stat().st_size > 0)
    if not text_files:
        raise ValueError(
            f"--dataset={dataset} is a folder without text; put files there that end in {', '.join(FILE_SUFFIXES)}"
        )
    return text_files


def read_file(path: str) -> Iterator[str]:
    """Yield the non-empty documents of a text file. Raises ValueError if all documents are empty."""
    documents = _txt_documents(path) if path.endswith(".txt") else _jsonl_documents(path)
    has_text = False
    for text in documents:
        if text.strip():
            has_text = True
            yield text
    if not has_text:
        raise ValueError(f"--dataset={path} holds no text: every document in it is empty; pass a file with text")


def _txt_documents(path: str) -> Iterator[str]:
    """Yield the documents of a .txt file. Documents are separated by lines with only <|endoftext|>, or by blank lines
    if the file has no such lines."""
    has_marks = any(line.strip() == END_OF_TEXT for _, line in _text_lines(path))
    separator = END_OF_TEXT if has_marks else ""
    document: list[str] = []
    for _, line in _text_lines(path):
        if line.strip() == separator:
            yield "".join(document)
            document = []
        else:
            document.append(line)
    yield "".join(document)


def _jsonl_documents(path: str) -> Iterator[str]:
    """Yield the "text" of each row of a .jsonl file."""
    for number, line in _text_lines(path):
        if line.strip():
            yield _text_of_json_line(line, f"--dataset={path}, line {number}")


def _text_of_json_line(line: str, where: str) -> str:
    """Return the document in one line of a jsonl file. Raises ValueError with `where`, the file and line number."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        content = f"the keys {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise ValueError(f'{where} has no "text" string (it has {content}); each line must be {{"text": "...", ...}}')
    return row["text"]


def _text_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line) of a text file, with the newline included and CR LF converted to LF."""
    lines = _lines_of_zst_file(path) if path.endswith(".zst") else _lines_of_file(path)
    for number, line in enumerate(lines, start=1):
        try:
            yield number, line.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--dataset={path}, line {number} is not UTF-8 ({error.reason}); convert the file to UTF-8"
            ) from None


def _lines_of_file(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


def _lines_of_zst_file(path: str) -> Iterator[bytes]:
    rest = b""
    for chunk in _zst_chunks(path):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def _zst_chunks(path: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of all frames of a zstd file. zstandard.open cannot be used, because it stops after
    the first frame and does not detect a truncated file."""
    try:
        import zstandard
    except ImportError:
        raise ValueError(f"--dataset={path} needs the package zstandard; pip install zstandard") from None
    frame = None
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            while data:
                # The Pile's shards have windows above the default limit.
                frame = frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise ValueError(f"--dataset={path} is not valid zstandard ({error}); fetch it again") from None
                data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise ValueError(f"--dataset={path} is cut short: its last zstandard frame does not end; fetch it again")
