"""The prices of tapes that were profiled on this machine: kept, and taken from there when asked."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch

from adacc_hf import __version__
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.profile import codec_option_from_json
from adacc_hf.kernels.codecs import ROLES, codecs_suiting, precise_codec
from adacc_hf.price.measurement import Instruments
from adacc_hf.price.pricing import Prices
from adacc_hf.price.timing import Bottleneck
from adacc_hf.tape.tape import Tape

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


# Prices that are kept in the database of profiles, and taken from there when asked.

log = logging.getLogger(__name__)

CONTENTS = 2
"""Goes up with each change of what is kept, so that older prices are not taken for whole."""


class StoringInstruments(Instruments):
    """Readings from real runs. Prices are kept in `store`, and with `reuse_prices` known ones are not measured again.

    A database that cannot be used is reported once and left alone from then on.
    """

    def __init__(self, store: ProfileStore) -> None:
        self.store = store
        self._is_usable = True

    def price(self, tape: Tape, bases: list[torch.Tensor], config: AdaccConfig, outliers: dict[int, int]) -> Prices:
        key = price_key(tape, bases[0].device, config, outliers)
        prices = self._known(key, tape) if config.reuse_prices else None
        if prices is None:
            prices = super().price(tape, bases, config, outliers)
            self._keep(key, tape, prices)
        return prices

    def _known(self, key: Key, tape: Tape) -> Prices | None:
        if not self._is_usable:
            return None
        try:
            row = self.store.get(key)
            return None if row is None else prices_from_json(row.prices, tape)
        except ProfileStoreError as error:
            self._give_up(error)
        except (KeyError, TypeError, ValueError) as error:
            self._give_up(f"the prices of {key.name} in {self.store.path} are damaged ({error})")
        return None

    def _keep(self, key: Key, tape: Tape, prices: Prices) -> None:
        if not self._is_usable:
            return
        try:
            self.store.put(key, tape.block_class, prices_to_json(prices, tape))
        except ProfileStoreError as error:
            self._give_up(error)

    def _give_up(self, reason: object) -> None:
        self._is_usable = False
        log.warning("Adacc: prices are measured and not kept: %s", reason)


def price_key(tape: Tape, device: torch.device, config: AdaccConfig, outliers: Mapping[int, int]) -> Key:
    """What the prices of `tape` depend on."""
    settings = (
        config.actions,
        [*map(codecs_suiting, ROLES), precise_codec()] if config.codecs is None else config.codecs,
        config.outliers,
        config.zscore_threshold,
        config.group_size,
        config.min_compress_bytes,
        config.max_error is not None,
        sorted(outliers.items()),
        (__version__, CONTENTS),
    )
    return Key(
        tape=tape.digest,
        shapes=_digest([(value.nbytes, value.ref.geometry, value.ref.dtype) for value in tape.values]),
        dtype=" ".join(sorted({str(value.ref.dtype).removeprefix("torch.") for value in tape.values})),
        device=device_name(device),
        torch=str(torch.__version__),
        settings=_digest(settings),
    )


def prices_to_json(prices: Prices, tape: Tape) -> dict[str, Any]:
    """`prices` as JSON values, with names for people."""
    return {
        "operators": [
            {"name": operator.name, "ms": ms, "workspace_bytes": nbytes}
            for operator, ms, nbytes in zip(tape.operators, prices.operator_ms, prices.operator_bytes, strict=True)
        ],
        "activations": [
            {
                "value": value,
                "name": tape.values[value].name,
                "nbytes": tape.values[value].nbytes,
                "codecs": [asdict(option) for option in options],
            }
            for value, options in prices.codecs.items()
        ],
        "scarce": prices.scarce,
    }


def prices_from_json(record: dict[str, Any], tape: Tape) -> Prices:
    """What `prices_to_json` wrote. Raises KeyError, TypeError or ValueError for what does not belong to `tape`."""
    times = [float(operator["ms"]) for operator in record["operators"]]
    if len(times) != len(tape.operators):
        raise ValueError(f"{len(times)} operators in place of {len(tape.operators)}")
    codecs = {
        int(activation["value"]): tuple(codec_option_from_json(option) for option in activation["codecs"])
        for activation in record["activations"]
    }
    workspaces = [int(operator["workspace_bytes"]) for operator in record["operators"]]
    scarce = record["scarce"]
    if scarce not in get_args(Bottleneck):
        raise ValueError(f"scarce is {scarce!r}")
    return Prices(times, workspaces, codecs, scarce)


def device_name(device: torch.device) -> str:
    """The name of the device; that of a CPU with torch's number of threads, on which times depend."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
