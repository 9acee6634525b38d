"""Cache of prices (measured times of operators and codecs) of tapes: a folder that several processes may share."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import PROFILES_VARIABLE, RecordFolder, __version__
from adacc_hf.artifacts.profile import codec_option_from_json
from adacc_hf.kernels.codecs import ROLES, codecs_suiting, precise_codec
from adacc_hf.price.cost_model import Prices
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.timing import Bottleneck
from adacc_hf.tape.tape import Tape

FORMAT_VERSION = 2
"""Version of the stored records. The number is incremented with each change of the records' contents."""


class ProfileCacheError(AdaccError):
    """Error of a profile cache whose folder cannot be read or does not exist."""


@dataclass(frozen=True, kw_only=True)
class PriceKey:
    """Key of cached prices (measured times). Prices are read from the cache only if all fields are equal."""

    tape: str
    """Digest of the recorded operators, constants and slots."""
    shapes: str
    """Digest of the sizes, strides and dtypes of all tensors."""
    dtype: str
    device: str
    torch: str
    """Version of torch."""
    settings: str
    """Digest of the settings that codecs depend on, the outlier channels, and this package's version."""

    @property
    def name(self) -> str:
        """Short hash of the key."""
        return hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One entry of the cache: the measured times of a tape's operators and codecs (prices), and their key."""

    key: PriceKey
    block_class: str
    created: str
    prices: dict[str, Any]
    """JSON values, in the format of `prices_to_json`."""


def default_folder() -> Path:
    """Return $ADACC_HF_PROFILES if it is set, else the folder $XDG_CACHE_HOME/adacc_hf/profiles.

    The parent folder also contains the compiled kernels. Raises ProfileCacheError for a user without a home, such as in
    containers that run under an arbitrary user ID.
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
    """Cache of prices in `folder`, one file per row. Methods raise ProfileCacheError or OSError if the folder is
    unusable."""

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
        """Store `prices`, replacing the row of an equal key."""
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


# Measurement that caches its prices in the folder.

log = logging.getLogger(__name__)


class CachingMeasurement(Measurement):
    """Measurement in real runs that writes every measured price to the cache `store`.

    If `AdaccConfig.reuse_prices` is set, prices in the cache are read and not measured again. If the cache's folder
    cannot be used, one warning is logged, and the cache is disabled from then on.
    """

    def __init__(self, store: ProfileCache) -> None:
        self.store = store
        self._is_usable = True

    def price(
        self,
        tape: Tape,
        bases: list[torch.Tensor],
        config: AdaccConfig,
        outliers: dict[int, int],
        run_block: Callable[[], object] | None = None,
    ) -> Prices:
        key = price_key(tape, bases[0].device, config, outliers)
        prices = self._cached_prices(key, tape) if config.reuse_prices else None
        if prices is None:
            prices = super().price(tape, bases, config, outliers, run_block)
            self._store_prices(key, tape, prices)
        return prices

    def _cached_prices(self, key: PriceKey, tape: Tape) -> Prices | None:
        if not self._is_usable:
            return None
        try:
            row = self.store.get(key)
            return None if row is None else prices_from_json(row.prices, tape)
        except (ProfileCacheError, OSError) as error:
            self._disable(error)
        except (KeyError, TypeError, ValueError) as error:
            self._disable(f"the prices of {key.name} in {self.store.folder} are damaged ({error})")
        return None

    def _store_prices(self, key: PriceKey, tape: Tape, prices: Prices) -> None:
        if not self._is_usable:
            return
        try:
            self.store.put(key, tape.block_class, prices_to_json(prices, tape))
        except (ProfileCacheError, OSError) as error:
            self._disable(error)

    def _disable(self, reason: object) -> None:
        self._is_usable = False
        log.warning(
            "Adacc: the profile cache is disabled for this run, and prices are measured: %s. To fix this, empty the "
            "folder with `adacc profiles clear`, or set %s to another folder",
            reason,
            PROFILES_VARIABLE,
        )


def price_key(tape: Tape, device: torch.device, config: AdaccConfig, outliers: Mapping[int, int]) -> PriceKey:
    """Return the key under which the measured times of the operators and codecs of `tape` are cached."""
    settings = (
        config.actions,
        [*map(codecs_suiting, ROLES), precise_codec()] if config.codecs is None else config.codecs,
        config.outliers,
        config.zscore_threshold,
        config.group_size,
        config.min_compress_bytes,
        config.max_error is not None,
        sorted(outliers.items()),
        (__version__, FORMAT_VERSION),
    )
    return PriceKey(
        tape=tape.digest,
        shapes=_digest([(value.nbytes, value.ref.geometry, value.ref.dtype) for value in tape.values]),
        dtype=" ".join(sorted({str(value.ref.dtype).removeprefix("torch.") for value in tape.values})),
        device=device_name(device),
        torch=str(torch.__version__),
        settings=_digest(settings),
    )


def prices_to_json(prices: Prices, tape: Tape) -> dict[str, Any]:
    """Return `prices` as JSON values, with names for human readers."""
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
        "scarce": prices.bottleneck,
    }


def prices_from_json(record: dict[str, Any], tape: Tape) -> Prices:
    """Return the prices in `record`, as written by `prices_to_json`. Raises KeyError, TypeError or ValueError if the
    record does not belong to `tape`."""
    times = [float(operator["ms"]) for operator in record["operators"]]
    if len(times) != len(tape.operators):
        raise ValueError(f"it has {len(times)} operators, but the recorded block has {len(tape.operators)}")
    codecs = {
        int(activation["value"]): tuple(codec_option_from_json(option) for option in activation["codecs"])
        for activation in record["activations"]
    }
    workspaces = [int(operator["workspace_bytes"]) for operator in record["operators"]]
    bottleneck = record["scarce"]
    if bottleneck not in get_args(Bottleneck):
        raise ValueError(f"scarce={bottleneck!r} must be one of {', '.join(get_args(Bottleneck))}")
    return Prices(times, workspaces, codecs, bottleneck)


def device_name(device: torch.device) -> str:
    """Return the device's name. A CPU's name includes torch's number of threads, because times depend on it."""
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
