"""The prices of tapes that were profiled on this machine, in a folder that several processes may use."""

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
"""Goes up with each change of what is kept."""


class ProfileCacheError(AdaccError):
    """Kept prices cannot be read, or there is no place for them."""


@dataclass(frozen=True, kw_only=True)
class PriceKey:
    """What prices depend on. They are taken from the folder only if all of it is the same."""

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

    key: PriceKey
    block_class: str
    created: str
    prices: dict[str, Any]
    """JSON values, as `prices_to_json` makes them."""


def default_folder() -> Path:
    """$ADACC_HF_PROFILES, else profiles in $XDG_CACHE_HOME/adacc_hf, where the compiled kernels are too.

    Raises ProfileCacheError for a user without a home, as in containers that run under any number.
    """
    given = os.environ.get(PROFILES_VARIABLE)
    if given:
        return Path(given)
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise ProfileCacheError(
            f"there is no place for profiles ({error}): set {PROFILES_VARIABLE} to a writable folder, or HOME"
        ) from error
    return caches / "adacc_hf" / "profiles"


class ProfileCache:
    """The rows in `folder`. Methods raise ProfileCacheError or OSError where it cannot be used."""

    def __init__(self, folder: Path | None = None) -> None:
        self._given = folder

    @cached_property
    def _records(self) -> RecordFolder:
        return RecordFolder(self._given or default_folder(), "prices", FORMAT_VERSION, ProfileCacheError)

    @property
    def folder(self) -> Path:
        return self._records.folder

    def get(self, key: PriceKey) -> Row | None:
        """The row of exactly this key."""
        row = self._row(key.name)
        return row if row is not None and row.key == key else None

    def put(self, key: PriceKey, block_class: str, prices: dict[str, Any]) -> None:
        """Keep `prices`, in place of what was there for the same key."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._records.put(key.name, Row(key=key, block_class=block_class, created=created, prices=prices))

    def list(self) -> list[Row]:
        """All rows, the newest first."""
        rows = [row for row in map(self._row, self._records.names()) if row is not None]
        return sorted(rows, key=lambda row: row.created, reverse=True)

    def find(self, name: str) -> Row:
        """The one row whose name begins with `name`. Raises ValueError if there is none or several."""
        found = [row for row in self.list() if row.key.name.startswith(name)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} profiles have names that begin with {name!r}: see `adacc profiles list`")
        return found[0]

    def clear(self) -> int:
        """Remove all rows and return how many there were."""
        return self._records.clear()

    def _row(self, name: str) -> Row | None:
        record = self._records.get(name)
        return None if record is None else Row(**{**record, "key": PriceKey(**record["key"])})


# Prices that are kept there, and taken from there when asked.

log = logging.getLogger(__name__)


class StoringMeasurement(Measurement):
    """Readings from real runs. Prices are kept in `store`, and with `reuse_prices` known ones are not measured again.

    A folder that cannot be used is reported once and left alone from then on.
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
        prices = self._known(key, tape) if config.reuse_prices else None
        if prices is None:
            prices = super().price(tape, bases, config, outliers, run_block)
            self._keep(key, tape, prices)
        return prices

    def _known(self, key: PriceKey, tape: Tape) -> Prices | None:
        if not self._is_usable:
            return None
        try:
            row = self.store.get(key)
            return None if row is None else prices_from_json(row.prices, tape)
        except (ProfileCacheError, OSError) as error:
            self._give_up(error)
        except (KeyError, TypeError, ValueError) as error:
            self._give_up(f"the prices of {key.name} in {self.store.folder} are damaged ({error})")
        return None

    def _keep(self, key: PriceKey, tape: Tape, prices: Prices) -> None:
        if not self._is_usable:
            return
        try:
            self.store.put(key, tape.block_class, prices_to_json(prices, tape))
        except (ProfileCacheError, OSError) as error:
            self._give_up(error)

    def _give_up(self, reason: object) -> None:
        self._is_usable = False
        log.warning(
            "Adacc: prices are measured and not kept: %s; `adacc profiles clear` empties the folder, %s names another",
            reason,
            PROFILES_VARIABLE,
        )


def price_key(tape: Tape, device: torch.device, config: AdaccConfig, outliers: Mapping[int, int]) -> PriceKey:
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
