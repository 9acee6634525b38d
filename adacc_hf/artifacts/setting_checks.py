"""Checks of settings and arguments. Each error names the setting, its value, the allowed values and the next step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

LONGEST_VALUE = 80
"""Largest number of characters of a value in an error message. A longer one is shown as its type."""


def check_flag(name: str, value: bool) -> None:
    """Raise ValueError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False{_quoted(value)}")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError unless `value` is a number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(
            f"{name}={value!r} has type {type(value).__name__}{_quoted(value)}: choose a number in [{low:g}, {high:g}]"
        )
    if not low <= value <= high:
        raise ValueError(f"{name}={value!r} is outside [{low:g}, {high:g}]: choose a number in that range")


def check_integer(name: str, value: int, low: int, high: int) -> None:
    """Raise ValueError unless `value` is an int from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} is not an int in [{low}, {high}]{_quoted(value)}: choose one in that range")


def _quoted(value: Any) -> str:
    """Return a hint for the error message if a string looks like a number or a boolean, else "". YAML reads quoted
    values as strings, and also 1e-2 without quotes, because it has no decimal point."""
    if not isinstance(value, str):
        return ""
    truth = value.strip().capitalize()
    if truth in ("True", "False"):
        return f", and is text: write {truth} without quotes"
    for number in (int, float):
        try:
            return f", and is text: write {number(value)!r} without quotes"
        except ValueError:
            continue
    return ""


def describe_value(name: str, value: Any) -> str:
    """Return "name=value has type T" for an error message. A long value, such as a model, is left out."""
    text = repr(value)
    shown = f"{name}={text}" if len(text) <= LONGEST_VALUE and "\n" not in text else name
    return f"{shown} has type {type(value).__name__}"


def check_type(name: str, value: Any, expected: type, advice: str) -> None:
    """Raise TypeError, with `advice` in the message, unless `value` is an instance of `expected`."""
    if not isinstance(value, expected):
        raise TypeError(f"{describe_value(name, value)}: {advice}")


def settings_in_config(config_class: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for functions that take settings only in the argument `config`.

    The function then raises TypeError, which says what to write, for a `config` of another class than `config_class`, a
    setting passed as an argument of its own, and an unknown argument.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature, name = inspect.signature(function), function.__name__

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            unknown = next((key for key in kwargs if key not in signature.parameters), None)
            if unknown is not None:
                raise TypeError(_unknown_argument(name, unknown, kwargs[unknown], signature, config_class))
            config = signature.bind_partial(*args, **kwargs).arguments.get("config")
            if config is not None and not isinstance(config, config_class):
                raise TypeError(
                    f"{name}: {describe_value('config', config)}: pass settings as "
                    f"config={config_class.__name__}(...), or leave config out"
                )
            return function(*args, **kwargs)

        return checked

    return decorate


def _unknown_argument(function: str, name: str, value: Any, signature: inspect.Signature, config_class: type) -> str:
    settings = list(inspect.signature(config_class).parameters)
    shown = repr(value) if len(repr(value)) <= LONGEST_VALUE else "..."
    start = f"{function}: {name}={shown} is not an argument"
    if name in settings:
        return f"{start} but a setting: write config={config_class.__name__}({name}={shown})"
    closest = [each for each in signature.parameters if name in each] or get_close_matches(name, signature.parameters)
    if closest:
        return f"{start}: write {closest[0]}={shown}"
    return f"{start}: choose from {', '.join(signature.parameters)}, and pass settings in config"
