"""Prices that are kept in the database of profiles, and taken from there when asked."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch

from adacc_hf import __version__
from adacc_hf.config import AdaccConfig
from adacc_hf.profile import codec_option_from_json
from adacc_hf.profiling.instruments import Instruments
from adacc_hf.profiling.pricing import Prices
from adacc_hf.profiling.profile_store import Key, ProfileStore, ProfileStoreError
from adacc_hf.profiling.timing import Bottleneck
from adacc_hf.tapes.tape import Tape

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
        config.codecs,
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
