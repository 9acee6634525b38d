"""The walk from what is wanted back to what it is made of."""

from adacc_hf.artifacts.exact_recompute_rules import walk_back

READS = {"a": (), "b": ("a",), "c": ("a", "b"), "d": ("c", "b"), "e": ("d",)}


def test_the_walk_goes_back_to_the_ends_and_no_further():
    ends, passed = walk_back(["d"], lambda name: None if name in ("b", "e") else READS[name])
    assert list(ends) == ["b"]
    assert list(passed) == ["d", "c", "a"]


def test_what_is_wanted_may_be_an_end():
    assert walk_back(["e", "a"], lambda name: None) == ({"a": None, "e": None}, {})


def test_nothing_is_asked_for_twice():
    asked = []
    walk_back(["e", "d"], lambda name: asked.append(name) or READS[name])
    assert sorted(asked) == sorted(READS)
