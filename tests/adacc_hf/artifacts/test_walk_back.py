"""The walk from required values back to their inputs."""

from adacc_hf.artifacts.exact_recompute_rules import walk_back

READS = {"a": (), "b": ("a",), "c": ("a", "b"), "d": ("c", "b"), "e": ("d",)}


def test_the_walk_goes_back_to_the_ends_and_no_further():
    ends, inner_nodes = walk_back(["d"], lambda name: None if name in ("b", "e") else READS[name])
    assert list(ends) == ["b"]
    assert list(inner_nodes) == ["d", "c", "a"]


def test_what_is_wanted_may_be_an_end():
    assert walk_back(["e", "a"], lambda name: None) == ({"a": None, "e": None}, {})


def test_nothing_is_asked_for_twice():
    queries = []
    walk_back(["e", "d"], lambda name: queries.append(name) or READS[name])
    assert sorted(queries) == sorted(READS)
