"""Published measurements as data: complete, of known models, halved once and for all."""

from dataclasses import asdict

import pytest

from adacc_hf.estimate.devices import NAMES
from adacc_hf.estimate.fake_model import PRECISIONS
from adacc_hf.estimate.static_memory import OPTIMIZERS
from adacc_hf.eval.published.measurements import (
    METERS,
    UNITS,
    held_out,
    looked_at_again,
    model_config,
    rows,
    second_looks,
    sources,
    undecidable,
)
from adacc_hf.eval.published.prediction import CHECKPOINTING, request_of


def test_there_are_enough_of_enough_sources():
    counted = [row for row in rows().values() if row.set_aside is None]
    assert len(counted) >= 30
    assert len({row.source for row in rows().values()}) >= 10
    assert {row.source for row in rows().values()} | {item.source for item in undecidable()} <= sources().keys()


@pytest.mark.parametrize("name", rows())
def test_a_row_is_of_what_the_planner_knows(name):
    row = rows()[name]
    assert row.precision in PRECISIONS
    assert row.optimizer in OPTIMIZERS
    assert row.device in NAMES
    assert row.checkpointing in CHECKPOINTING
    assert row.meter in METERS
    assert row.unit in UNITS
    assert row.not_said
    assert row.assumed, "what a source does not say is assumed in words"
    assert (row.context_mb > 0) == (row.meter == "nvidia-smi")
    request = request_of(row)
    assert request.batch_size == row.batch
    assert request.workload.sharding.num_devices == row.devices


def test_the_halves_do_not_depend_on_the_order_of_rows():
    away = held_out(rows())
    assert len(away) == len(rows()) // 2
    assert away == held_out(list(reversed(list(rows()))))


def test_a_second_look_changes_what_it_says_and_no_figure():
    for look in second_looks():
        assert set(look.sources) <= sources().keys()
        of_it = [row for row in rows().values() if look.is_for(row)]
        assert of_it, look.reason
    row = rows()["litgpt phi-1.5 batch 1"]
    again, of_model = looked_at_again(row)
    assert again.lora == {**row.lora, "dropout": 0.05}
    assert of_model == {"hidden_act": "gelu_pytorch_tanh"}
    assert model_config(row.model, of_model).hidden_act == "gelu_pytorch_tanh"
    assert {name for name, value in asdict(again).items() if value != asdict(row)[name]} == {"lora"}


def test_speeds_are_compared_with_rows_that_are_there():
    compared = [row for row in rows().values() if row.speed is not None and "against" in row.speed]
    assert compared
    for row in compared:
        other = rows()[row.speed["against"]]
        assert (other.checkpointing, row.checkpointing) == ("none", "full")
        assert row.over(other) > 1
