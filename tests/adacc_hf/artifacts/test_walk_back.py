"""The walk from required values back to their inputs."""

from adacc_hf.artifacts.exact_recompute_rules import walk_back

READS = {"a": (), "b": ("a",), "c": ("a", "b"), "d": ("c", "b"), "e": ("d",)}


def test_the_walk_goes_back_to_the_ends_and_no_further():
    ends, inner_nodes = walk_back(["d"], lambda name: None if name in ("b", "e") else READS[name])
    assert list(ends) == ["b"]
    assert list(inner_nodes) == ["d", "c", "a"]
