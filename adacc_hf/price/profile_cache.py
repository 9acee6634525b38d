"""Cache of the measured times and codec costs of recorded blocks: a folder that several processes may share.

It does not import torch, so that `adacc profiles` starts at once. caching_measurement.py fills it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import astuple, dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import PROFILES_VARIABLE, RecordFolder

FORMAT_VERSION = 3
"""Version of the records in the cache, incremented with each change of their contents."""


class ProfileCacheError(AdaccError):
    """Error raised if the folder of a profile cache cannot be read or does not exist."""


@dataclass(frozen=True, kw_only=True)
class PriceKey:
    """Key of an entry in the cache of measured times. An entry is used only if all fields are equal."""

    tape: str
    """Digest of the recorded operators, their constants, and the saved tensors."""
    shapes: str
    """Digest of the sizes, strides and dtypes of all tensors of the recorded block."""
    dtype: str
    device: str
    torch: str
    """Version of torch."""
    settings: str
    """Digest of what else the codecs depend on: settings, outlier channels, and this package's version."""

    @property
    def name(self) -> str:
        """Short hash of the key."""
        return hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One entry of the cache: a key, and the measured times and codec costs of a recorded block."""

    key: PriceKey
    block_class: str
    created: str
    prices: dict[str, Any]
    """Times and codec costs as JSON values, in the format of `prices_to_json`."""


def default_folder() -> Path:
    """Return the folder $ADACC_HF_PROFILES if it is set, else adacc_hf/profiles in $XDG_CACHE_HOME or ~/.cache.

    Raises ProfileCacheError for a user without a home folder, as in containers under an arbitrary user ID.
    """
    configured_folder = os.environ.get(PROFILES_VARIABLE)
    if configured_folder:
        return Path(configured_folder)
    try:
        cache_root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise ProfileCacheError(
            f"no folder for profiles ({error}): set {PROFILES_VARIABLE} to a writable folder, or set HOME"
        ) from error
    return cache_root / "adacc_hf" / "profiles"


class ProfileCache:
    """Cache in a folder, with one file per row. Methods raise ProfileCacheError or OSError if it is unusable."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @cached_property
    def _records(self) -> RecordFolder:
        return RecordFolder(self._folder or default_folder(), "prices", FORMAT_VERSION, ProfileCacheError)

    @property
    def folder(self) -> Path:
        return self._records.folder

    def get(self, key: PriceKey) -> Row | None:
        """Return the row whose key equals `key`, or None if the cache has no such row."""
        row = self._row(key.name)
        return row if row is not None and row.key == key else None

    def put(self, key: PriceKey, block_class: str, prices: dict[str, Any]) -> None:
        """Store `prices` (measured times and codec costs) as a row, which replaces an existing row of an equal key."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._records.put(key.name, Row(key=key, block_class=block_class, created=created, prices=prices))

    def list(self) -> list[Row]:
        """Return all rows, the newest first."""
        rows = [row for row in map(self._row, self._records.names()) if row is not None]
        return sorted(rows, key=lambda row: row.created, reverse=True)

    def find(self, name: str) -> Row:
        """Return the only row whose name begins with `name`. Raises ValueError unless exactly one row matches."""
        rows = [row for row in self.list() if row.key.name.startswith(name)]
        if len(rows) != 1:
            raise ValueError(f"{len(rows)} profiles have names that begin with {name!r}: see `adacc profiles list`")
        return rows[0]

    def clear(self) -> int:
        """Remove all rows from the cache, and return the number of removed rows."""
        return self._records.clear()

    def _row(self, name: str) -> Row | None:
        record = self._records.get(name)
        return None if record is None else Row(**{**record, "key": PriceKey(**record["key"])})
