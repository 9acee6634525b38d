"""Restart: the batch with which a run starts over, and the end of the search for it."""

import pytest

from adacc_hf.adapt.restart import FALLBACK_MODES, MORE_BLOCKS, MOST_TRIES, OTHER_OPERATORS, Restart


def test_nothing_is_searched_for_at_first():
    restart = Restart()
    assert (restart.why, restart.num_tries, restart.tried) == ("", 0, set())


@pytest.mark.parametrize(
    ("why", "is_complete", "has_diverged", "expected"),
    [
        (MORE_BLOCKS, True, False, True),
        (MORE_BLOCKS, False, True, False),
        (OTHER_OPERATORS, True, True, True),
        (OTHER_OPERATORS, True, False, False),
        (OTHER_OPERATORS, False, True, False),
    ],
)
def test_a_batch_is_taken_if_it_calls_every_block_and_shows_the_reason(why, is_complete, has_diverged, expected):
    restart = Restart()
    restart.want(why)
    assert restart.takes(is_complete, has_diverged) == expected


def test_a_search_ends_after_so_many_batches_and_a_reason_is_remembered():
    restart = Restart()
    restart.want(MORE_BLOCKS)
    for _ in range(MOST_TRIES):
        assert restart.num_tries > 0
        assert not restart.takes(is_complete=False, has_diverged=False)
    assert restart.num_tries == 0
    restart.want(OTHER_OPERATORS)
    assert (restart.why, restart.num_tries) == (OTHER_OPERATORS, MOST_TRIES)
    assert restart.tried == {MORE_BLOCKS, OTHER_OPERATORS} == set(FALLBACK_MODES)
