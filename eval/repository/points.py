"""All results so far of a folder of records: one text to read, and one archive to transfer."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adacc_hf.artifacts.files import read_json
from adacc_hf.eval.records.ledger import RecordError
from adacc_hf.eval.records.records import describe

ARCHIVE, TEXT = "records.tar.gz", "points.md"
"""Names of the archive and the text."""

MOST_CHARACTERS = 300
"""Length limit of a point whose runner has no table yet."""


def save_points(folder: Path, target: Path) -> None:
    """Write archive and text into `target`. Each is replaced atomically, so that an interruption leaves the old file
    intact."""
    target.mkdir(parents=True, exist_ok=True)
    archive = target / f".{ARCHIVE}"
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".json", ".md", ".svg") and path.is_file():
                tar.add(path, path.relative_to(folder))
    archive.replace(target / ARCHIVE)
    text = target / f".{TEXT}"
    text.write_text(points_text(folder), encoding="utf-8")
    text.replace(target / TEXT)


def restore(archive: Path, folder: Path) -> None:
    """Unpack an archive of records into `folder`. Raise RecordError for another kind of file."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise RecordError(f"{archive} is not an archive of records: pass the {ARCHIVE} of an earlier slice") from error


def points_text(folder: Path) -> str:
    """Return the tables of complete records and the points of the others, the oldest record first."""
    paths = sorted(folder.rglob("*.json"), key=lambda path: path.stat().st_mtime)
    return "\n\n".join(text for path in paths for text in _record_text(path)) + "\n"


def _record_text(path: Path) -> Iterator[str]:
    record = read_json(path, RecordError, "record")
    if not isinstance(record, dict) or not {"train_info", "meta_info"} <= record.keys():
        return
    meta = record["meta_info"]
    yield f"## {path.stem}: {meta['status']}, {meta['date']}, {meta['device']}"
    table = path.with_suffix(".md")
    if meta["status"] == "complete" and table.is_file():
        yield table.read_text(encoding="utf-8").strip()
        return
    points = record["train_info"].get("points", {})
    yield "\n".join(f"- {key}: {_point_text(point)}" for key, point in points.items()) or "nothing yet"


def _point_text(point: dict[str, Any]) -> str:
    if "tokens_per_second" in point or "peak_bytes" in point:
        cells = describe(point)
        retries = point.get("num_alloc_retries")
        text = f", {retries} allocator retries while timed" if retries else ""
        return f"{cells['tokens/s']} tokens/s, peak {cells['peak'] or 'not measured'}{text}"
    if "reason" in point:
        return f"{point['status']}: {point['reason'][:MOST_CHARACTERS]}"
    return json.dumps(point)[:MOST_CHARACTERS]
