"""Published measurements as data: complete, of known models, split into halves once."""

from dataclasses import replace

import pytest

from adacc_hf.estimate.devices import NAMES
from adacc_hf.estimate.static_memory import OPTIMIZERS, PRECISIONS
from adacc_hf.eval.repository.published.measurements import UNITS, held_out, held_out_pairs, pairs, remains, rows
from adacc_hf.eval.repository.published.prediction import MODES, OLDER, request_of


@pytest.mark.parametrize("name", rows())
def test_a_row_is_of_what_the_planner_knows(name):
    row = rows()[name]
    assert row.precision in PRECISIONS
    assert row.optimizer in OPTIMIZERS
    assert row.device in NAMES
    assert row.checkpointing in ("none", "full")
    assert row.meter in ("allocated", "active", "reserved", "nvidia-smi")
    assert row.unit in UNITS
    assert row.not_said
    assert row.assumed, "settings that a source omits are listed as assumptions"
    assert OLDER.keys() >= set(row.older)
    assert (row.context_mb > 0) == (row.meter == "nvidia-smi")
    request = request_of(row)
    assert request.batch_size == row.batch
    assert request.workload.sharding.num_devices == row.devices


def test_the_halves_do_not_depend_on_the_order_of_rows():
    held_out_names = held_out(rows())
    assert len(held_out_names) == len(rows()) // 2
    assert held_out_names == held_out(list(reversed(list(rows()))))


@pytest.mark.parametrize("name", pairs())
def test_a_pair_is_of_what_the_planner_knows(name):
    pair = pairs()[name]
    for setting in pair.settings:
        assert setting.checkpointing in MODES
        request = request_of(setting)
        assert (request.batch_size, request.seq_len) == (setting.batch, setting.length)
    assert pair.base.checkpointing != pair.other.checkpointing
    assert pair.not_said
    assert pair.assumed
    assert pair.measured > 1


def test_a_ratio_is_of_times_whatever_was_measured():
    (pair,) = [pair for pair in pairs().values() if pair.unit == "s" and pair.source == "torchtitan-97"]
    assert pair.measured == pytest.approx(4.9126 / 4.5459)
    assert replace(pair, unit="tokens/s").measured == pytest.approx(4.5459 / 4.9126)


def test_pairs_of_rows_are_in_the_half_of_their_row():
    held_out_names = held_out_pairs()
    for name in pairs().keys() & rows().keys():
        assert (name in held_out_names) == (name in held_out(rows()))
    others = pairs().keys() - rows().keys()
    assert len(held_out_names & others) == len(others) // 2


def test_what_remains_is_said_of_open_rows_and_pairs_alone():
    held_out_names = held_out(rows()) | {f"{name}, speed" for name in held_out_pairs()}
    assert remains().keys() <= rows().keys() | {f"{name}, speed" for name in pairs()}
    assert not held_out_names & remains().keys()
