"""Plan of one optimizer step: which of its samples form a micro-batch. Works without torch.

A step keeps its samples: only their order within the step, and the borders between its micro-batches, are chosen. So
training stays as random as the order in which samples arrive, and the sum of the gradients is that of the same samples
in one batch. Samples are sorted by length, and a micro-batch is a range of this order: any other division with as many
samples in each micro-batch pads at least as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Lengths = tuple[int, ...]
"""Lengths of the parts of one sample, such as input and labels. Samples are sorted by the first."""
Cost = Callable[[int, Lengths], float | None]
"""Milliseconds of a micro-batch with (number of samples, longest lengths), or None if it does not fit. If it does not
fit, one with more samples does not either."""


def plan_step(lengths: Sequence[Lengths], cost: Cost, num_groups: int = 1) -> list[list[int]]:
    """Divide the samples with these lengths into the micro-batches that take the least time in total, longest samples
    first. Return the indices of the samples of each micro-batch.

    A micro-batch has 1, 2, 3, 4, 6, 8, 12, ... samples, or all of the step, because each size needs a policy. A sample
    that does not fit even alone is a micro-batch of its own. There are at least `num_groups` micro-batches, as
    far as there are samples: ranks that train together need equal numbers.

        >>> plan_step([(9,), (2,), (8,), (2,)], lambda rows, longest: 5 + rows * longest[0] if rows < 3 else None)
        [[0, 2], [1, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    best_ms: list[float] = [0.0] + [float("inf")] * len(order)
    begins = [0] * (len(order) + 1)
    for begin in range(len(order)):
        longest = lengths[order[begin]]
        for end in range(begin + 1, len(order) + 1):
            longest, number = longest_of((longest, lengths[order[end - 1]])), end - begin
            if not (_is_regular(number) or number == len(order)):
                continue
            ms = cost(number, longest)
            if ms is None and number > 1:
                break
            if best_ms[begin] + (ms or 0.0) < best_ms[end]:
                best_ms[end], begins[end] = best_ms[begin] + (ms or 0.0), begin
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.insert(0, order[begins[end] : end])
        end = begins[end]
    return _split(groups, lengths, num_groups)


def _is_regular(number: int) -> bool:
    """Return True for powers of two and three times these."""
    odd = number // (number & -number)
    return odd in (1, 3)


def longest_of(lengths: Iterable[Lengths]) -> Lengths:
    """Return the largest length of each part."""
    return tuple(map(max, zip(*lengths, strict=True)))


def _split(groups: list[list[int]], lengths: Sequence[Lengths], num_groups: int) -> list[list[int]]:
    """Halve the group with the most tokens until there are `num_groups`, or one for each sample."""
    while len(groups) < num_groups and any(len(group) > 1 for group in groups):
        sizes = [len(group) * lengths[group[0]][0] if len(group) > 1 else -1 for group in groups]
        index = sizes.index(max(sizes))
        group, middle = groups[index], (len(groups[index]) + 1) // 2
        groups[index : index + 1] = [group[:middle], group[middle:]]
    return groups


def padding(groups: Iterable[Iterable[int]], lengths: Sequence[Lengths]) -> tuple[int, int]:
    """Return (tokens, padded tokens) of micro-batches, counted in the first part of their samples."""
    tokens = padded = 0
    for group in groups:
        own = [lengths[index][0] for index in group]
        tokens, padded = tokens + sum(own), padded + len(own) * max(own)
    return tokens, padded
