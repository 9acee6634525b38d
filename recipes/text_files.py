"""The documents of one text file: .txt, .jsonl or .jsonl.zst. Errors name the file and the line."""

import json
from collections.abc import Iterator
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
FILE_SUFFIXES = (".txt", ".jsonl", ".jsonl.zst")
_READ_BYTES = 1 << 20


def checked_file(dataset: str) -> Path:
    """The path behind `--dataset FILE`. Raises FileNotFoundError or ValueError if it cannot be a text file."""
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
    """The file behind `--dataset`, or all such files of a folder, in a fixed order; empty ones are left out."""
    folder = Path(dataset)
    if not folder.is_dir():
        return [checked_file(dataset)]
    files = (path for path in folder.rglob("*") if path.name.endswith(FILE_SUFFIXES) and path.is_file())
    found = sorted(path for path in files if path.stat().st_size > 0)
    if not found:
        raise ValueError(
            f"--dataset={dataset} is a folder without text; put files there that end in {', '.join(FILE_SUFFIXES)}"
        )
    return found


def read_file(path: str) -> Iterator[str]:
    """The file's documents; those without text are left out. Raises ValueError where none is left."""
    documents = _txt_documents(path) if path.endswith(".txt") else _jsonl_documents(path)
    found = False
    for text in documents:
        if text.strip():
            found = True
            yield text
    if not found:
        raise ValueError(f"--dataset={path} holds no text: every document in it is empty; pass a file with text")


def _txt_documents(path: str) -> Iterator[str]:
    """Documents end at a line that holds only <|endoftext|>, or, in a file without such lines, at blank lines."""
    marked = any(line.strip() == END_OF_TEXT for _, line in _text_lines(path))
    border = END_OF_TEXT if marked else ""
    document: list[str] = []
    for _, line in _text_lines(path):
        if line.strip() == border:
            yield "".join(document)
            document = []
        else:
            document.append(line)
    yield "".join(document)


def _jsonl_documents(path: str) -> Iterator[str]:
    """The "text" of each row: the Pile's schema, {"text": str, ...}; blank lines are allowed."""
    for number, line in _text_lines(path):
        if line.strip():
            yield _text_of_row(line, f"--dataset={path}, line {number}")


def _text_of_row(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        found = f"the keys {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise ValueError(f'{where} has no "text" string (it has {found}); each line must be {{"text": "...", ...}}')
    return row["text"]


def _text_lines(path: str) -> Iterator[tuple[int, str]]:
    """The file's lines with their numbers from 1, newline included and CR LF read as LF."""
    lines = _zst_lines(path) if path.endswith(".zst") else _plain_lines(path)
    for number, line in enumerate(lines, start=1):
        try:
            yield number, line.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--dataset={path}, line {number} is not UTF-8 ({error.reason}); convert the file to UTF-8"
            ) from None


def _plain_lines(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


def _zst_lines(path: str) -> Iterator[bytes]:
    rest = b""
    for chunk in _zst_chunks(path):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def _zst_chunks(path: str) -> Iterator[bytes]:
    """The decompressed bytes of all frames.

    Written out because zstandard.open stops after the first frame and takes a file that was cut short for a whole one.
    """
    try:
        import zstandard
    except ImportError:
        raise ValueError(f"--dataset={path} needs the package zstandard; pip install zstandard") from None
    frame = None
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            while data:
                # The Pile's shards were written with long windows, which the default limit refuses.
                frame = frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise ValueError(f"--dataset={path} is not valid zstandard ({error}); fetch it again") from None
                data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise ValueError(f"--dataset={path} is cut short: its last zstandard frame does not end; fetch it again")
