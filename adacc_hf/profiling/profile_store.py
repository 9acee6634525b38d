"""The prices of tapes that were profiled on this machine, in one SQLite file that several processes may use."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, fields
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from adacc_hf.errors import AdaccError

VARIABLE = "ADACC_HF_PROFILES"
"""Environment variable with the path of another file."""
FORMAT_VERSION = 1
WAIT_SECONDS = 5.0
"""Longest wait for another process's write, which takes milliseconds."""


class ProfileStoreError(AdaccError):
    """The database of profiles cannot be read or written."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """What prices depend on. They are taken from the database only if all of it is the same."""

    tape: str
    """Digest of the recorded operators, constants and slots."""
    shapes: str
    """Digest of the sizes, strides and dtypes of all tensors."""
    dtype: str
    device: str
    torch: str
    """Version."""
    settings: str
    """Digest of the settings that codecs depend on, of the outlier channels and of this package's version."""

    @property
    def name(self) -> str:
        """A short name for the key."""
        return hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tape with its prices."""

    key: Key
    block_class: str
    created: str
    prices: dict[str, Any]
    """JSON values; `stored_prices.py` says what."""


def default_path() -> Path:
    """$ADACC_HF_PROFILES, else profiles.sqlite3 in $XDG_CACHE_HOME/adacc_hf, where the compiled kernels are too.

    Raises ProfileStoreError for a user without a home, as in containers that run under any number.
    """
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise ProfileStoreError(
            f"there is no place for the database of profiles ({error}): set {VARIABLE} to a writable file, or HOME"
        ) from error
    return caches / "adacc_hf" / "profiles.sqlite3"


_COLUMNS = tuple(field.name for field in fields(Key))
_CREATE = (
    f"CREATE TABLE IF NOT EXISTS prices (name TEXT PRIMARY KEY, {', '.join(f'{c} TEXT NOT NULL' for c in _COLUMNS)}, "
    f"block_class TEXT NOT NULL, created TEXT NOT NULL, prices TEXT NOT NULL)"
)
_READ = f"SELECT {', '.join(_COLUMNS)}, block_class, created, prices FROM prices"
_WRITE = f"INSERT OR REPLACE INTO prices VALUES ({', '.join('?' * (len(_COLUMNS) + 4))})"


class ProfileStore:
    """The database at `path`; every method raises ProfileStoreError if it cannot be used. Reading makes no file."""

    def __init__(self, path: Path | None = None) -> None:
        self._given = path

    @cached_property
    def path(self) -> Path:
        return self._given or default_path()

    def get(self, key: Key) -> Row | None:
        """The row of exactly this key."""
        found = [row for row in self._rows("WHERE name = ?", (key.name,)) if row.key == key]
        return found[0] if found else None

    def put(self, key: Key, block_class: str, prices: dict[str, Any]) -> None:
        """Keep `prices`, in place of what was there for the same key."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        values = (key.name, *astuple(key), block_class, created, json.dumps(prices))
        with self._open() as connection:
            connection.execute(_WRITE, values)

    def list(self) -> list[Row]:
        """All rows, the newest first."""
        return self._rows("ORDER BY created DESC, name", ())

    def find(self, name: str) -> Row:
        """The one row whose name begins with `name`. Raises ValueError if there is none or several."""
        found = [row for row in self.list() if row.key.name.startswith(name)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} profiles have names that begin with {name!r}: see `adacc profiles list`")
        return found[0]

    def clear(self) -> int | None:
        """Remove all rows and return how many there were; None for a file that could not be read and was set aside."""
        if not self.path.exists():
            return 0
        try:
            with self._open() as connection:
                return connection.execute("DELETE FROM prices").rowcount
        except _UnreadableError:
            self._set_aside()
            return None

    @property
    def aside(self) -> Path:
        """Where `clear` moves a file that cannot be read."""
        return self.path.with_name(f"{self.path.name}.unreadable")

    def _rows(self, condition: str, values: tuple[str, ...]) -> list[Row]:
        if not self.path.exists():
            return []
        with self._open() as connection:
            records = connection.execute(f"{_READ} {condition}", values).fetchall()
        count = len(_COLUMNS)
        return [
            Row(
                key=Key(**dict(zip(_COLUMNS, record[:count], strict=True))),
                block_class=record[count],
                created=record[count + 1],
                prices=self._parsed(record[count + 2]),
            )
            for record in records
        ]

    def _parsed(self, text: str) -> dict[str, Any]:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise self._unreadable(error) from error

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection in one transaction; the table is made if it is not there."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=WAIT_SECONDS)) as connection, connection:
                # Taken before the version is read, so that two processes cannot both find an empty file.
                connection.execute("BEGIN IMMEDIATE")
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                        raise self._unreadable("its tables are not ours")
                    connection.execute(_CREATE)
                    connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
                elif version != FORMAT_VERSION:
                    raise self._unreadable(f"its format is {version}, this release reads {FORMAT_VERSION}")
                yield connection
        except sqlite3.OperationalError as error:  # locked, no space, no permission: the file itself may be sound
            raise ProfileStoreError(
                f"the database of profiles {self.path} cannot be used ({error}): free it, or set {VARIABLE} to a "
                f"writable file"
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._unreadable(error) from error
        except OSError as error:
            raise ProfileStoreError(
                f"the database of profiles {self.path} cannot be made ({error}): set {VARIABLE} to a writable file"
            ) from error

    def _unreadable(self, reason: object) -> _UnreadableError:
        return _UnreadableError(
            f"the database of profiles {self.path} cannot be read ({reason}): `adacc profiles clear` sets it aside, "
            f"and the next profile starts a new one; set {VARIABLE} if it is another program's"
        )

    def _set_aside(self) -> None:
        """Not deleted: the path is the user's, and may be mistaken."""
        self.path.replace(self.aside)
        self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)


class _UnreadableError(ProfileStoreError):
    """The file is no database of ours."""
