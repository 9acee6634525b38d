"""`adacc plan --longest`: the longest sequence of five methods, and its time per token."""

import json

import pytest

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.cli import main
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.longest import LONGEST_METHODS
from adacc_hf.estimate.planning import TILED, Request, tiled_title, training_profile


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


@pytest.mark.parametrize(
    ("batch_size", "head", "title"),
    [
        (64, "auto", TILED),
        (64, "plain", "recomputation, tiles"),
        (32, "auto", "recomputation, chunked head"),
        (32, "plain", "recomputation, no tiles and plain head"),
    ],
)
def test_the_row_of_tiles_and_head_is_named_by_what_it_has(planned_config, batch_size, head, title):
    """Fewer than 4096 tokens have no tiles. Under ZeRO 3 the head stays plain."""
    workload = Workload(
        config=planned_config,
        device=find_device("h100"),
        precision=PRECISIONS["fp32"],
        trace="cpu",
        adacc=AdaccConfig(head=head),
    )
    _, profile = training_profile(Request(model="gpt2", workload=workload, batch_size=batch_size, seq_len=64))
    assert tiled_title(profile) == title


def test_a_budget_below_every_sequence_says_none(longest):
    text = longest("--budget", "8MiB", "--seq-len", "64")
    assert "longest of 32 sequences per device within 8.00 MiB" in text
    assert "none" in text
    assert "\nrecomputation, chunked head " in text, "32 x 64 tokens have no tiles"
