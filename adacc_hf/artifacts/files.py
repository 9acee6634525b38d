"""JSON files that are whole or absent, the files of a run by name, and memory of what came last."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

PROFILES_VARIABLE = "ADACC_HF_PROFILES"
"""The variable of the environment that names the folder of prices."""
__version__ = "0.2.0"
"""Of this package, which files say that they were written by."""


def write_json(path: str | Path, record: Any, indent: int | None = 1) -> None:
    """Write `record` to `path` so that a reader sees the old file or the new one, never a part.

    Dataclasses are written by their fields. indent=None is one long line, and ten times as fast.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=indent, default=fields_of) + "\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, not copied. Raises TypeError, in json's words, for what is none."""
    if is_dataclass(record) and not isinstance(record, type):
        return {field.name: getattr(record, field.name) for field in fields(record)}
    raise TypeError(f"an object of type {type(record).__name__} is not JSON serializable")


def read_json(path: str | Path, error_class: type[Exception], what: str) -> Any:
    """The JSON value in `path`. Raises FileNotFoundError, IsADirectoryError, or `error_class` if it is not JSON."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{what} file {path} is a folder: name the {what} file in it")
    if not path.is_file():
        raise FileNotFoundError(f"{what} file {path} does not exist: check the path or save a {what} there first")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise error_class(f"{what} file {path} is not JSON ({error}): save the {what} again") from error


class RecordFolder:
    """JSON records by name, each a file in `folder`: whole or absent, so that several processes may use it at once.

    Reading makes no folder. What is no record of this `version` is refused with an `error_class`.
    """

    def __init__(self, folder: Path, what: str, version: int, error_class: type[Exception]) -> None:
        self.folder = folder
        self._what = what
        self._version = version
        self._error_class = error_class

    def get(self, name: str) -> Any:
        """The record of that name; None if there is none."""
        path = self.folder / f"{name}{self._ending}"
        try:
            content = read_json(path, self._error_class, self._what)
        except FileNotFoundError:
            return None
        if not isinstance(content, dict) or content.get("version") != self._version:
            raise self._error_class(f"{self._what} file {path} is not of version {self._version}: delete it")
        return content["record"]

    def put(self, name: str, record: Any) -> None:
        write_json(self.folder / f"{name}{self._ending}", {"version": self._version, "record": record})

    def names(self) -> list[str]:
        return [path.name.removesuffix(self._ending) for path in self._paths()]

    def clear(self) -> int:
        """Remove all records, those that are refused too, and return how many there were."""
        paths = self._paths()
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    @property
    def _ending(self) -> str:
        return f".{self._what}.json"

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{self._ending}"))


# The files that a run leaves in its folder and in each checkpoint.

POLICY_FILE = "adacc_policy.json"
PROFILE_FILE = "adacc_profile.json"
PRICES_FILE = "adacc_prices.json"
SEARCHED_FILE = "adacc_searched_prices.json"
STATE_FILE = "adacc_state.json"
HISTORY_FILE = "adacc_history.json"
COMPILED_FILE = "adacc_compiled.json"
"""The policy of a run with `torch_compile=True`."""


# Memory of what came last, so that a long run takes no more of it than a short one.

K = TypeVar("K")
V = TypeVar("V")


def note_latest(noted: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Put `key` last, and forget the first if there are more than `most`."""
    noted[key] = value
    noted.move_to_end(key)
    if len(noted) > most:
        noted.popitem(last=False)
