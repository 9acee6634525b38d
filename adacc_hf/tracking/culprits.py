"""What spoils a gradient: the fewest activations without whose compression it keeps to its bound.

Round trips do not tell. Queries and keys come back as exact as anything else, and where backward makes attention's
softmax of them again, the gradient may be off by more than its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def fewest(
    lossy: Iterable[int], bound: float, error_without: Callable[[frozenset[int]], float | None]
) -> frozenset[int] | None:
    """Activations among `lossy` of which none can be compressed again beside the others within `bound`.

    `error_without` gives the gradient's error with some activations kept as they are, or None if that cannot be known;
    it is asked at most twice for each of `lossy`, and once more. None if it gives None, or if the error is above the
    bound with all of them kept.

    At first each activation is compressed alone; then one after the other on top of those that are, the least harmful
    first. So activations that spoil the gradient each by itself are found however many they are, and of those that
    spoil it only together no more than it takes.
    """
    everything = kept = frozenset(lossy)
    alone: dict[int, float] = {}
    for value in sorted(everything):
        error = error_without(everything - {value})
        if error is None:
            return None
        alone[value] = error
    for value in sorted((value for value in alone if alone[value] <= bound), key=alone.__getitem__):
        error = error_without(kept - {value})
        if error is None:
            return None
        kept -= {value} if error <= bound else set()
    if kept == everything:
        error = error_without(everything)
        if error is None or not error <= bound:
            return None
    return kept
