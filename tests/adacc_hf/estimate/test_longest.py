"""`adacc plan --longest`: the longest sequence of five methods, and its time per token."""

import json

import pytest

from adacc_hf.cli import main
from adacc_hf.estimate.longest import LONGEST_METHODS
from adacc_hf.estimate.planning import TILED


@pytest.fixture
def longest(folder, capsys):
    """`longest(*options)`: what `adacc plan --longest` prints for 32 sequences."""

    def run(*options):
        assert main(["plan", "--model", folder, "--batch-size", "32", "--longest", "--dtype", "fp32", *options]) == 0
        return capsys.readouterr().out

    return run


def test_methods_reach_longer_sequences_one_after_the_other(longest):
    record = json.loads(longest("--budget", "20MiB", "--json"))
    lengths = {method: each["seq_len"] for method, each in record["longest"].items()}
    assert tuple(lengths) == LONGEST_METHODS
    plain, full, tiled, exact, ours = lengths.values()
    assert 0 < plain < full <= tiled <= ours == 64
    assert full <= exact <= ours
    assert all(each["ms_per_token"] > 0 for each in record["longest"].values())
    at_limit = [each["is_at_limit"] for each in record["longest"].values()]
    assert at_limit == [length == 64 for length in lengths.values()]


def test_the_row_of_tiles_and_head_is_named_by_what_it_has(longest):
    """Fewer than 4096 tokens have no tiles, and under ZeRO 3 the head stays plain."""
    long_batches = ("--batch-size", "128", "--json")
    titles = {
        options: json.loads(longest("--budget", "1GiB", "--json", *options))["longest"][TILED]["title"]
        for options in ((), ("--zero", "3", "2"), long_batches, (*long_batches, "--zero", "3", "2"))
    }
    assert list(titles.values()) == [
        "recomputation, chunked head",
        "recomputation, no tiles and plain head",
        TILED,
        "recomputation, tiles",
    ]
    assert "recomputation, no tiles and plain head" in longest("--budget", "1GiB", "--zero", "3", "2")


def test_a_budget_below_every_sequence_says_none(longest):
    text = longest("--budget", "8MiB", "--seq-len", "64")
    assert "longest of 32 sequences per device within 8.00 MiB" in text
    assert "none" in text
