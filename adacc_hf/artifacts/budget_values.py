"""Values of the settings `memory_budget` and `host_memory`: a fraction, or a size in bytes or as text ("20GiB")."""

from __future__ import annotations

import re
from typing import TypeVar

from adacc_hf.artifacts.setting_checks import describe_value
from adacc_hf.artifacts.units import MAX_BYTES, UNITS, parse_bytes

V = TypeVar("V", bound=str | float | int | None)

MIN_BUDGET_BYTES = 64 * 1024
"""Smallest accepted budget in bytes. No model trains in less memory, so a smaller number was probably meant as a
fraction, or as a size in another unit."""
HOST_SHARE = 0.8
"""Largest part of the host's free memory that payloads may take, over all ranks of the host. The rest is for data
loaders and the page cache: pinned memory cannot be swapped out."""
_BYTES = f'an int from {MIN_BUDGET_BYTES} (bytes), or a size such as "{{}}" ({UNITS})'
_BUDGETS = f'use "auto", a float in (0, 1] (fraction of the bytes that plain training stores), {_BYTES.format("20GiB")}'
_HOST_SIZES = f"use None, a float in (0, {HOST_SHARE}] (fraction of the host's free memory), {_BYTES.format('64GiB')}"
"""Allowed values, for error messages."""
_FRACTION = re.compile(r"\s*(0?\.[0-9]+|1\.0*|[0-9]+\.?[0-9]*e-[0-9]+)\s*", re.IGNORECASE)
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:%|percent)\s*", re.IGNORECASE)


def read_fraction(setting: V) -> V | float:
    """Return `setting`, with a fraction in quotes, as in a YAML file, converted to a float: "0.5" -> 0.5."""
    return float(setting) if isinstance(setting, str) and _FRACTION.fullmatch(setting) else setting


def check_memory_budget(budget: str | float | int, min_bytes: int = MIN_BUDGET_BYTES) -> None:
    """Raise ValueError unless `budget` has one of the four forms of `AdaccConfig.memory_budget`.

    A budget in bytes must be at least `min_bytes`.
    """
    if budget != "auto":
        _check_size("memory_budget", budget, _BUDGETS, 1.0, min_bytes)


def check_host_memory(setting: str | float | int | None) -> None:
    """Raise ValueError unless `setting` has one of the forms of `AdaccConfig.host_memory`."""
    if setting is not None:
        _check_size("host_memory", setting, _HOST_SIZES, HOST_SHARE, MIN_BUDGET_BYTES)


def _check_size(name: str, value: str | float | int, allowed: str, largest_fraction: float, min_bytes: int) -> None:
    """Raise ValueError unless `value` is a fraction up to `largest_fraction`, or a size of at least `min_bytes`."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{describe_value(name, value)}: {allowed}")
    if isinstance(value, float):
        if not 0.0 < value <= largest_fraction:
            hint = _float_hint(value, largest_fraction)
            raise ValueError(f"{name}={value!r} is outside (0, {largest_fraction:g}]{hint}: {allowed}")
        return
    if isinstance(value, str):
        try:
            num_bytes = parse_bytes(value, name, advice=allowed)
        except ValueError:
            hint = _text_hint(value, largest_fraction)
            if not hint:
                raise
            raise ValueError(f"{name}={value!r} is not a size{hint}: {allowed}") from None
    else:
        num_bytes = value
    if not min_bytes <= num_bytes <= MAX_BYTES:
        raise ValueError(
            f"{name}={value!r} is outside [{min_bytes}, {MAX_BYTES}] bytes{budget_hint(num_bytes)}: {allowed}"
        )


def _float_hint(value: float, largest_fraction: float) -> str:
    """Return a hint for the error message about a float that is not a fraction: a percentage, GiB, or bytes."""
    if not value > 1 or value > MAX_BYTES:
        return ""
    if value >= MIN_BUDGET_BYTES:
        return f", which may have been meant as the int {int(value)}"
    percentage = f"{value / 100:g} or " if value / 100 <= largest_fraction and value >= 5 else ""
    return f', which may have been meant as {percentage}"{value:g}GiB"' if value <= 1024 else ""


def _text_hint(text: str, largest_fraction: float) -> str:
    """Return a hint for the error message about text that is not a size: "50%", or a number such as "1e9" or "0,5"."""
    percent = _PERCENT.fullmatch(text)
    if percent is not None:
        fraction = float(percent.group(1)) / 100
        is_fraction = 0 < fraction <= largest_fraction
        return f", which may have been meant as the fraction {fraction:g}" if is_fraction else ""
    try:
        number = float(text.replace(",", ".").replace("_", ""))
    except ValueError:
        return ""
    if 0 < number <= largest_fraction:
        return f", which may have been meant as {number:g}"
    return _float_hint(number, largest_fraction)


def budget_hint(num_bytes: int) -> str:
    """Return a hint for the error message about a budget that is too small for training, else ""."""
    if not 0 < num_bytes < MIN_BUDGET_BYTES:
        return ""
    size = f'"{num_bytes}GiB"' if num_bytes <= 1024 else f'"{num_bytes}MiB"'
    fraction = "1.0, all that plain training stores, or " if num_bytes == 1 else ""
    return f", which may have been meant as {fraction}{size}"
