"""`adacc plan --batches FILE`: micro-batches by bytes for a file of lengths."""

import json
import random

import pytest

from adacc_hf.artifacts.tiles import most_tiles
from adacc_hf.cli import USER_ERROR, main
from adacc_hf.estimate.planned_batches import TRACED


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    """A file of 200 lengths, most of them short."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("lengths") / "lengths.txt"
    path.write_text(", ".join(str(min(90, int(2 + draw.expovariate(0.08)))) for _ in range(200)))
    return str(path)


@pytest.fixture
def planned(folder, lengths, capsys):
    """`planned(*options)`: what `adacc plan --batches` prints for steps of 16 samples."""

    def run(*options):
        command = ["plan", "--model", folder, "--batches", lengths, "--batch-size", "16", "--dtype", "fp32", *options]
        status = main(command)
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return printed.out

    return run


def test_batches_by_bytes_pad_less_and_take_less_time(planned):
    record = json.loads(planned("--budget", "6MiB", "--exact", "--json"))
    ours, fixed = record["by_bytes"], record["fixed"]
    assert ours["num_steps"] == fixed["num_steps"] == 13
    assert ours["tokens"] == fixed["tokens"]
    assert ours["padded_tokens"] < fixed["padded_tokens"]
    assert ours["ms"] < fixed["ms"]
    assert ours["peak_bytes"] <= 6 * 2**20
    assert sum(int(number) * count for number, count in ours["num_samples"].items()) == 200
    assert record["longest"] == 64  # the context of the model
    assert record["num_too_long"] == 0


def test_samples_that_do_not_fit_are_named(planned, plan):
    options = ("--dtype", "fp32", "--optimizer", "lion", "--exact")
    methods = plan(*options, "--batch-size", "1", "--seq-len", "24", "--accumulate")["methods"]
    budget = int(1.05 * methods["full recomputation"]["peak_bytes"])
    text = planned(*options[2:], "--budget", str(budget))
    assert "samples are left out, because they do not fit even alone: the longest that fits has" in text
    assert "padding" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "write the lengths"), (None, "no such file"), ("9 -5", "'-5' is not"), ("[2.5, 7]", "'2.5' is not")],
)
def test_files_without_lengths_are_refused(folder, tmp_path, capsys, content, message):
    path = tmp_path / "lengths"
    if content is not None:
        path.write_text(content)
    assert main(["plan", "--model", folder, "--batches", str(path)]) == USER_ERROR
    assert message in capsys.readouterr().err


def test_enough_sizes_to_predict_from_have_tiles_or_none_at_any_length():
    """Only sizes with the tiles of the first are used. Two sizes, samples and length, need five of them."""
    for unit in range(1, 5000):
        tiled = [bool(most_tiles(number * eighths * unit)) for number, eighths in TRACED]
        assert tiled.count(tiled[0]) >= 5, f"the longest sample has {8 * unit} tokens"
