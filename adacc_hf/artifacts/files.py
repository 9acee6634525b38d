"""JSON files that are written atomically, the names of a run's files, and bounded caches."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__version__ = "0.2.0"
"""Version of this package, which is also written to files."""


def write_json(path: str | Path, record: Any, indent: int | None = 1) -> None:
    """Write `record` to `path` atomically: a reader sees the complete old file or the complete new file.

    Dataclasses are written as dictionaries of their fields. With `indent=None`, the file is a single line, and writing
    is ten times as fast.
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
    """Return the fields of a dataclass by name, without copies.

    Raises TypeError, with json's error message, for any other object.
    """
    if is_dataclass(record) and not isinstance(record, type):
        return {field.name: getattr(record, field.name) for field in fields(record)}
    raise TypeError(f"an object of type {type(record).__name__} is not JSON serializable")


_type_hints = cache(get_type_hints)


def from_fields(expected: Any, value: Any) -> Any:
    """Convert a JSON value to the type `expected`: a dataclass, an enum, a tuple of these, or one of them or None.

    This is the inverse of `fields_of`. Values of other types are unchanged. Raises KeyError, TypeError or ValueError if
    the value is not one of this type.
    """
    if expected in (int, str, bool) and type(value) is not expected:
        raise TypeError(f"{value!r} is not of type {expected.__name__}")
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is tuple:
        items = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(from_fields(item, each) for item, each in zip(items, value, strict=True))
    if origin in (Union, UnionType):
        return value if value is None or arguments[1:] != (type(None),) else from_fields(arguments[0], value)
    if is_dataclass(expected) and isinstance(expected, type):
        hints = _type_hints(expected)
        return expected(**{name: from_fields(hints[name], each) for name, each in dict(value).items()})
    return expected(value) if isinstance(expected, type) and issubclass(expected, Enum) else value


T = TypeVar("T")


def labelled(values: dict[str, Any], file_type: str, version: int) -> dict[str, Any]:
    """Return the fields of a dataclass, `values`, with the labels by which `from_labelled` recognizes them."""
    return {"format": f"adacc_hf.{file_type}", "version": version, **values}


def from_labelled(
    expected: type[T],
    record: Any,
    file_type: str,
    version: int,
    error_class: type[Exception],
    *,
    source: str,
    advice: str,
    check: Callable[[T], bool] = lambda _: True,
) -> T:
    """Return the dataclass in the JSON value `record`, which `labelled` has written. Raise `error_class`, which names
    the `source` and ends with `advice`, if it has another format or version, lacks a field, or fails `check`."""
    if not isinstance(record, dict) or record.get("format") != f"adacc_hf.{file_type}":
        raise error_class(f"{source} is not an adacc_hf {file_type} file: {advice} again")
    if record.get("version") != version:
        raise error_class(
            f"{source} has {file_type} format version {record.get('version')!r}, this release reads {version}: "
            f"{advice} again"
        )
    try:
        values = {name: value for name, value in record.items() if name not in ("format", "version")}
        if not check(result := from_fields(expected, values)):
            raise ValueError("an unknown head, or an index of nothing in the file")
        return result
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise error_class(
            f"{source} is a damaged {file_type} file ({type(error).__name__}: {error}): {advice} again"
        ) from error


def read_json(path: str | Path, error_class: type[Exception], file_type: str) -> Any:
    """Return the JSON value in `path`. `file_type` names the file in error messages.

    Raises FileNotFoundError, IsADirectoryError, or `error_class` if the content is not JSON.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{file_type} file {path} is a folder: name the {file_type} file in it")
    if not path.is_file():
        raise FileNotFoundError(
            f"{file_type} file {path} does not exist: check the path or save a {file_type} there first"
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise error_class(f"{file_type} file {path} is not JSON ({error}): save the {file_type} again") from error


# Names of the files that a run writes to its folder and to each checkpoint.

POLICY_FILE = "adacc_policy.json"
PROFILE_FILE = "adacc_profile.json"
STATE_FILE = "adacc_state.json"
HISTORY_FILE = "adacc_history.json"
COMPILED_FILE = "adacc_compiled.json"
"""Name of the file with the policy of a run with `torch_compile=True`."""
COMPILED_FORMAT = "compiled_policy"
"""Type of this file in its "format"."""


def policy_file(path: str | Path, names: tuple[str, ...] = (POLICY_FILE, COMPILED_FILE)) -> Path:
    """Return the path of a policy file: `path` itself, or the file in it if `path` is the folder of a run or
    checkpoint.

    Raises FileNotFoundError if the folder has no file with one of the `names`.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    existing = [path / name for name in names if (path / name).is_file()]
    if not existing:
        raise FileNotFoundError(
            f"{path} has no policy file, {' or '.join(names)}: pass the folder of a run with AdaccCallback, one of its "
            f"checkpoints, or a policy file"
        )
    return existing[0]


# Bounded caches, so that a long run needs no more memory than a short one.

K = TypeVar("K")
V = TypeVar("V")


def put_latest(cache: OrderedDict[K, V], key: K, value: V, max_entries: int) -> None:
    """Insert `key` as the newest entry of a bounded cache, and remove the oldest one if there are too many."""
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > max_entries:
        cache.popitem(last=False)
