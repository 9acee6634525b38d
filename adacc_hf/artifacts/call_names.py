"""Names of the calls of blocks in one step.

A model may call a block several times before backward: layers share their weights, or the loss calls the model twice.
Each call has a name of its own, and so a plan: the first call has the module path of the block, the others "path#2" and
"path#3".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def call_name(block: str, number: int) -> str:
    """The name of the call of `block` with that number in a step, counted from 1."""
    return block if number == 1 else f"{block}#{number}"


def numbered(names: Iterable[str]) -> list[str]:
    """`names` told apart as calls are: the second "norm" is "norm#2"."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(call_name(name, seen[name]))
    return found


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
