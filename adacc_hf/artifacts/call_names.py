"""Names of the calls of blocks in one step.

If layers share weights, or the loss calls the model twice, a model calls a block several times before backward. Each
call has its own plan, and a name: "path" (the block's module path), "path#2", "path#3" and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def call_name(block: str, number: int) -> str:
    """Return the name of the `number`-th call of `block` in a step, counted from 1."""
    return block if number == 1 else f"{block}#{number}"


def numbered_names(names: Iterable[str]) -> list[str]:
    """Return `names` with a number appended to each repeated name: the second "norm" becomes "norm#2"."""
    counts: Counter[str] = Counter()
    unique_names = []
    for name in names:
        counts[name] += 1
        unique_names.append(call_name(name, counts[name]))
    return unique_names


def block_of_call(name: str) -> str:
    """Return the module path of the block that the call `name` runs."""
    return split_call(name)[0]


def split_call(name: str) -> tuple[str, int]:
    """Split a call's name into the block's module path and the call's number in a step, counted from 1."""
    block, mark, number = name.rpartition("#")
    return (block, int(number)) if mark and number.isdigit() else (name, 1)


def calls_per_block(names: Iterable[str]) -> dict[str, int]:
    """Return the number of calls of each block, by module path, in a step with the calls `names`."""
    counts: dict[str, int] = {}
    for name in names:
        block, number = split_call(name)
        counts[block] = max(number, counts.get(block, 0))
    return counts
