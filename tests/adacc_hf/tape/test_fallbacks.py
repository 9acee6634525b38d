"""Counts of block calls that did not follow their plan."""

from adacc_hf.tape.fallbacks import Fallbacks


def test_calls_are_counted_and_blocks_are_named_once():
    fallbacks = Fallbacks()
    for block in ("h.1", "h.0", "h.1"):
        fallbacks.add("new data", block)
    fallbacks.add("other operators", "h.2")
    assert fallbacks.counts == {"new data": 3, "other operators": 1}
    assert fallbacks.blocks == {"new data": ["h.1", "h.0"], "other operators": ["h.2"]}
    fallbacks.clear()
    assert not fallbacks.counts
    assert not fallbacks.blocks
