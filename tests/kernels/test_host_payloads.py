"""Names of codecs in host memory, and sizes of payloads in the pool of host memory."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adacc_hf.kernels._host_payloads import (
    ALIGNMENT,
    HOST,
    MOST_TENSORS,
    aligned,
    encoding_of,
    is_on_host,
    most_pool_bytes,
    on_host,
)
from adacc_hf.kernels.codecs import list_codecs


@pytest.mark.parametrize("name", list_codecs())
def test_every_codec_has_one_name_in_host_memory(name: str) -> None:
    assert not is_on_host(name)
    assert is_on_host(on_host(name))
    assert encoding_of(on_host(name)) == encoding_of(name) == name


def test_the_codec_that_encodes_nothing_has_its_own_name() -> None:
    assert is_on_host(HOST)
    assert encoding_of(HOST) == HOST
    assert HOST not in list_codecs()


@given(st.lists(st.integers(0, 3 * ALIGNMENT), min_size=1, max_size=MOST_TENSORS))
@example([1, 1, 1, 1])
def test_the_most_bytes_of_a_payload_are_a_tight_bound(sizes: list[int]) -> None:
    most = most_pool_bytes(sum(sizes), len(sizes))
    assert sum(map(aligned, sizes)) <= most
    assert most % ALIGNMENT == 0
    smallest_parts = [1] * (len(sizes) - 1) + [max(0, sum(sizes) - len(sizes) + 1)]
    assert sum(sizes) < len(sizes) or most == sum(map(aligned, smallest_parts))
