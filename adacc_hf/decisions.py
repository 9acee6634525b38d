"""What replay must not make anew from numbers that a lossy codec changed: indices, and statistics of rows.

Indices (which expert a token goes to, in which order rows are sorted) come out otherwise where two numbers were nearly
equal: rows that forward saved in one order would meet gradients in another. A row's statistic (a norm's deviation)
scales all of its gradient, and is out of all proportion if a codec left next to nothing of the row. Truths (a
comparison's result) may be remade: where they come out otherwise, what they choose between is near.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence


def decided(
    operators: Iterable[tuple[Sequence[int], Sequence[int]]],
    is_index: Callable[[int], bool],
    is_statistic: Callable[[int], bool],
    coded: Collection[int],
    stored: Collection[int],
) -> frozenset[int]:
    """Values that no replay may make where those in `coded` are stored with loss.

    `operators` are, in order, the values that each reads and makes. What is made of an index that is not `stored`
    cannot be remade either; a statistic that is not is a step on the way to numbers like any other.
    """
    inexact, found = set(coded), set()
    for inputs, made in operators:
        if any(value in found and value not in stored for value in inputs):
            found.update(made)
        elif not inexact.isdisjoint(inputs):
            kept = {value for value in made if is_index(value) or (value in stored and is_statistic(value))}
            found |= kept
            inexact.update(value for value in made if value not in kept)
    return frozenset(found)
