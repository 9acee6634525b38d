"""The calls of a block in one step, by name.

A model may call a block several times before backward: layers share their weights, or the loss calls the model twice.
Each call has a name of its own, and so a plan: the first that of its block, the others "block#2", "block#3".
"""

from __future__ import annotations

from collections.abc import Iterable


def call_name(block: str, number: int) -> str:
    """The name of the call of `block` with that number in a step, counted from 1."""
    return block if number == 1 else f"{block}#{number}"


def block_of_call(name: str) -> str:
    """The block of a call with that name."""
    return split_call(name)[0]


def split_call(name: str) -> tuple[str, int]:
    """The block of a call and its number in a step, counted from 1."""
    block, mark, number = name.rpartition("#")
    return (block, int(number)) if mark and number.isdigit() else (name, 1)


def num_calls(names: Iterable[str]) -> dict[str, int]:
    """How often each block is called in a step that has calls with these `names`."""
    found: dict[str, int] = {}
    for name in names:
        block, number = split_call(name)
        found[block] = max(number, found.get(block, 0))
    return found
