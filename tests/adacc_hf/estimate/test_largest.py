"""`adacc plan --largest`: the largest batch and the longest sequence of five methods, and its time per token."""

import json

import pytest

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.cli import main
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.largest import LARGEST_METHODS
from adacc_hf.estimate.planning import TILED, Request, tiled_title, training_profile


@pytest.fixture
def largest(folder, capsys):
    """`largest(*options)`: what `adacc plan --largest` prints for 32 sequences."""

    def run(*options):
        assert main(["plan", "--model", folder, "--batch-size", "32", "--largest", "--dtype", "fp32", *options]) == 0
        return capsys.readouterr().out

    return run


def test_methods_reach_larger_shapes_one_after_the_other(largest, plan):
    record = json.loads(largest("--budget", "20MiB", "--json"))
    lengths = {method: each["seq_len"] for method, each in record["largest"].items()}
    assert tuple(lengths) == LARGEST_METHODS
    plain, full, tiled, exact, ours = lengths.values()
    assert 0 < plain < full <= tiled <= ours == 64
    assert full <= exact <= ours
    assert all(each["ms_per_token"] > 0 for each in record["largest"].values())
    at_limit = [each["is_at_limit"] for each in record["largest"].values()]
    assert at_limit == [length == 64 for length in lengths.values()]
    batches = [each["batch_size"] for each in record["largest"].values()]
    assert 0 < batches[0] < batches[1] <= batches[2]
    assert batches[1] <= batches[3] <= batches[4]
    options = ("--dtype", "fp32", "--budget", "20MiB", "--batch-size")
    at, beyond = (plan(*options, str(batches[4] + more))["fits"] for more in (0, 1))
    assert at
    assert not beyond


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


def test_a_budget_below_every_sequence_says_none(largest):
    text = largest("--budget", "8MiB", "--seq-len", "64")
    assert "longest sequence in batches of 32, per device within 8.00 MiB" in text
    assert "none" in text
    assert "\nrecomputation, chunked head " in text, "32 x 64 tokens have no tiles"
