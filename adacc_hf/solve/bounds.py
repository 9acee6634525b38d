"""Lower bounds on the time and on the peak of all policies, which the search and the reported gap use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from adacc_hf.artifacts.block_walk import BlockOutcome
from adacc_hf.solve.frontier import SLOPE_TOLERANCE

if TYPE_CHECKING:
    from adacc_hf.artifacts.kind_profile import KindProfile

    Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    Point = tuple[float, float]


def lower_hull(points: Iterable[Point]) -> list[Point]:
    """Return the corners of the lower convex hull of (bytes, ms), from the least ms to the fewest bytes."""
    hull: list[Point] = []
    for nbytes, ms in sorted(points, key=lambda point: (point[1], point[0])):
        if hull and nbytes >= hull[-1][0]:
            continue
        while len(hull) > 1 and _price(hull[-2], hull[-1]) >= _price(hull[-2], (nbytes, ms)):
            hull.pop()
        hull.append((nbytes, ms))
    return hull


def _price(larger: Point, smaller: Point) -> float:
    """Return the price of memory, in ms per byte, at which two plans cost the same."""
    return (smaller[1] - larger[1]) / (larger[0] - smaller[0])


class TimeBound:
    """Lower bound on the overhead of blocks that together store a limited number of bytes.

    A step along the frontier of a kind replaces a block's plan by the next plan, which stores less. The bound takes the
    steps of all blocks in the order of their price (ms per freed byte). Of the last step, it takes only the part that
    is needed, as in the continuous knapsack problem. Real policies cannot be faster, because they consist of whole
    steps, or of plans above the hull.
    """

    def __init__(self, points: Mapping[int, Iterable[Point]]) -> None:
        """Use `points`, the (stored bytes, ms) of plans of each kind of block, with all corners of the hull."""
        hulls = {kind: lower_hull(each) for kind, each in points.items()}
        self._fastest = {kind: hull[0] for kind, hull in hulls.items()}
        self._slowest_ms = {kind: hull[-1][1] for kind, hull in hulls.items()}
        steps = [(_price(a, b), kind, a[0] - b[0], b[1] - a[1]) for kind in hulls for a, b in pairwise(hulls[kind])]
        steps.sort()
        self._kinds = [kind for _, kind, _, _ in steps]
        self._freed = np.array([freed for _, _, freed, _ in steps], dtype=np.float64)
        self._ms = np.array([ms for _, _, _, ms in steps], dtype=np.float64)

    def least_ms(self, blocks: Mapping[int, int], limit_bytes: Floats | int) -> Floats:
        """Return the bound for `blocks[k]` blocks of each kind k that store at most `limit_bytes`: infinity if no plans
        store so little."""
        numbers = np.array([blocks.get(kind, 0) for kind in self._kinds], dtype=np.float64)
        freed = np.concatenate(([0.0], np.cumsum(numbers * self._freed)))
        ms = np.concatenate(([0.0], np.cumsum(numbers * self._ms)))
        excess = sum(number * self._fastest[kind][0] for kind, number in blocks.items()) - np.asarray(limit_bytes)
        fastest_ms = sum(number * self._fastest[kind][1] for kind, number in blocks.items())
        slack = sum(number * SLOPE_TOLERANCE * self._slowest_ms[kind] for kind, number in blocks.items())
        steps_ms = np.interp(np.maximum(0.0, excess), freed, ms, right=np.inf)
        return fastest_ms + np.maximum(0.0, steps_ms - slack)


def least_outcome(variants: Sequence[KindProfile], stored_bytes: int) -> BlockOutcome:
    """Return a lower bound on the memory of a block under any plan that stores at least `stored_bytes`.

    The block may run as any of `variants` of its kind.
    """
    cached_bytes = max(sum(value.nbytes for value in kind.activations if value.cached) for kind in variants)
    return BlockOutcome(
        stored_bytes=stored_bytes,
        shared=frozenset(),
        overhead_ms=0.0,
        forward_moments=(min(max((event.extra_bytes for event in kind.forward), default=0) for kind in variants),),
        moments=(min(max(_unpacked_bytes(kind), default=0) for kind in variants),),
        live_bytes=max(0, stored_bytes - cached_bytes),
    )


def _unpacked_bytes(kind: KindProfile) -> Iterator[int]:
    """Yield, for each event of a block's backward, the bytes that are live under any plan for the block. The bytes are
    those of the saved tensors that autograd has unpacked and not yet freed, and of the temporaries of backward's
    operators. Tensors shared with other blocks are not counted."""
    slots: dict[int, int] = {}
    for event in kind.backward:
        value = kind.slots[event.slot]
        if event.release:
            slots.pop(event.slot, None)
        elif value >= 0 and kind.values[value].shared is None:
            slots[event.slot] = value
        # Equal values may share one storage.
        distinct = {kind.equal.get(value, value) for value in slots.values()}
        live = sum(kind.values[value].nbytes for value in distinct)
        yield live + (event.extra_bytes if event.release else max(event.entry_bytes, event.extra_bytes))
