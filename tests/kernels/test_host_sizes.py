"""Sizes of payloads in the pool of host memory."""

from hypothesis import example, given
from hypothesis import strategies as st

from adacc_hf.kernels._host_sizes import ALIGNMENT, MOST_TENSORS, aligned, most_pool_bytes


@given(st.lists(st.integers(0, 3 * ALIGNMENT), min_size=1, max_size=MOST_TENSORS))
@example([1, 1, 1, 1])
def test_the_most_bytes_of_a_payload_are_a_tight_bound(sizes: list[int]) -> None:
    most = most_pool_bytes(sum(sizes), len(sizes))
    assert sum(map(aligned, sizes)) <= most
    assert most % ALIGNMENT == 0
    smallest_parts = [1] * (len(sizes) - 1) + [max(0, sum(sizes) - len(sizes) + 1)]
    assert sum(sizes) < len(sizes) or most == sum(map(aligned, smallest_parts))
