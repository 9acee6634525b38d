"""Measurement in real runs (`CachingMeasurement`) that stores measured times and codec costs in a cache on disk."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.files import PROFILES_VARIABLE, __version__, from_fields
from adacc_hf.artifacts.kind_profile import CodecOption
from adacc_hf.kernels.codecs import ROLES, codecs_suiting, precise_codec
from adacc_hf.price.cost_model import Prices
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.profile_cache import FORMAT_VERSION, PriceKey, ProfileCache, ProfileCacheError
from adacc_hf.price.timing import Bottleneck
from adacc_hf.tape.tape import Tape

log = logging.getLogger(__name__)

_WARNED: set[str] = set()
"""Causes, such as folders that cannot be written, of which this process has warned."""


class CachingMeasurement(Measurement):
    """Measurement in real runs whose times and codec costs are stored in the cache `store`, and read from it if
    `AdaccConfig.reuse_prices` is set. If the folder cannot be used, one warning is logged, and the cache is
    disabled."""

    def __init__(self, store: ProfileCache) -> None:
        self.store = store
        self._is_usable = True

    def price(self, tape: Tape, bases: list[torch.Tensor], config: AdaccConfig, outliers: dict[int, int]) -> Prices:
        key = price_key(tape, bases[0].device, config, outliers)
        prices = self._cached_prices(key, tape) if config.reuse_prices else None
        if prices is None:
            prices = super().price(tape, bases, config, outliers)
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
        path = getattr(reason, "filename", None)
        cause = str(Path(path).parent if path else reason)
        if cause in _WARNED:  # by an earlier profile of the run
            return
        _WARNED.add(cause)
        log.warning(
            "Adacc: the profile cache is disabled for this run, and prices are measured: %s. To fix this, empty the "
            "folder with `adacc profiles clear`, or set %s to another folder",
            reason,
            PROFILES_VARIABLE,
        )


def price_key(tape: Tape, device: torch.device, config: AdaccConfig, outliers: Mapping[int, int]) -> PriceKey:
    """Return the key of the cached times and codec costs of the block recorded on `tape`."""
    settings = (
        config.actions,
        [*map(codecs_suiting, ROLES), precise_codec()] if config.codecs is None else config.codecs,
        config.outliers,
        config.min_compress_bytes,
        config.max_error is not None,
        sorted(outliers.items()),
        (__version__, FORMAT_VERSION),
    )
    return PriceKey(
        tape=tape.digest,
        shapes=_price_key_digest([(value.nbytes, value.ref.geometry, value.ref.dtype) for value in tape.values]),
        dtype=" ".join(sorted({str(value.ref.dtype).removeprefix("torch.") for value in tape.values})),
        device=device_name(device),
        torch=str(torch.__version__),
        settings=_price_key_digest(settings),
    )


def prices_to_json(prices: Prices, tape: Tape) -> dict[str, Any]:
    """Convert `prices` to JSON values with names for human readers."""
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
    """Return the prices in `record`, a result of `prices_to_json`.

    Raises KeyError, TypeError or ValueError if the record does not belong to `tape`.
    """
    times = [float(operator["ms"]) for operator in record["operators"]]
    if len(times) != len(tape.operators):
        raise ValueError(f"it has {len(times)} operators, but the recorded block has {len(tape.operators)}")
    codecs = {
        int(activation["value"]): tuple(from_fields(CodecOption, option) for option in activation["codecs"])
        for activation in record["activations"]
    }
    workspaces = [int(operator["workspace_bytes"]) for operator in record["operators"]]
    bottleneck = record["scarce"]
    if bottleneck not in get_args(Bottleneck):
        raise ValueError(f"scarce={bottleneck!r} must be one of {', '.join(get_args(Bottleneck))}")
    return Prices(times, workspaces, codecs, bottleneck)


def device_name(device: torch.device) -> str:
    """Return the device's name, with the number of threads for a CPU. Times depend on both."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor_name()}, {torch.get_num_threads()} threads"


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _price_key_digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
