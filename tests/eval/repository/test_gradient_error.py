"""The gradient-error table of a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adacc_hf import Action, profile_model
from adacc_hf.eval.repository import codecs, gradient_error
from adacc_hf.eval.repository.gradient_error import (
    LAYER_SPECIFIC,
    NO_OUTLIERS,
    RoundTrips,
    Scheme,
    accepts_options,
    codec_schemes,
    layer_specific_schemes,
    with_options,
)
from adacc_hf.eval.trials.gradients import compute_gradients, first_difference, relative_error
from adacc_hf.eval.trials.workload import Workload
from adacc_hf.kernels.codecs import get_codec, list_codecs
from adacc_hf.solve.simple_policies import uniform_policy

CHOSEN = [
    Scheme(name="int8", group_size=64, rounding="nearest"),
    Scheme(name="token_int4", scale="paper", rounding="nearest"),
    Scheme(name="token_int4", scale="signed", rounding="nearest"),
]
LAYERED = [Scheme(name=LAYER_SPECIFIC, scale="signed", group_size=64, rounding="nearest")]


@pytest.fixture
def _few_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the schemes to one of each kind that the table shows, because a hundred schemes take a minute."""
    monkeypatch.setattr(gradient_error, "codec_schemes", lambda: CHOSEN)
    monkeypatch.setattr(gradient_error, "layer_specific_schemes", lambda: LAYERED)


@pytest.mark.usefixtures("_few_schemes")
def test_record_and_tables(tiny: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "errors.json"
    argv = ["--only", "gradient", "--steps", "2", "--batches", "2", "--output", str(output)]
    assert codecs.main(argv, replace(tiny, attention="eager")) == 0
    record = json.loads(output.read_text())
    assert (record["run_info"]["steps"], record["run_info"]["batches"]) == (2, 2)
    training, *rows = record["train_info"]["points"].values()
    errors = {(row["name"], row["scale"]): row["error"] for row in rows}
    assert list(rows[0]) == ["name", "scale", "group_size", "rounding", "error", "round_trip_error"]
    assert 0 < errors["int8", None] < errors["token_int4", "signed"] < training["another_batch"]
    assert 0 < errors[LAYER_SPECIFIC, "signed"] < training["another_batch"]
    trips = {(row["name"], row["scale"]): row["round_trip_error"] for row in rows}
    assert 0 < trips["int8", None] < trips["token_int4", "signed"] < trips["token_int4", "paper"] < 1
    assert trips[LAYER_SPECIFIC, "signed"] is None
    printed = capsys.readouterr().out
    assert f"{errors['token_int4', 'paper']:.3f} |" in printed
    assert f"another batch: {training['another_batch']:.2f}" in printed


def test_training_lowers_the_loss(tiny: Workload, tmp_path: Path) -> None:
    settings = gradient_error.Settings(runner="x", output=tmp_path / "x.json")
    # A new model has a loss of ln 256 = 5.5, and 20 steps at this size bring it well below 5.
    assert gradient_error.train(tiny, tiny.batches(), 20, settings)[1] < 5.0


def test_table_puts_group_sizes_side_by_side() -> None:
    errors = {
        Scheme(name="int8", group_size=16, rounding="nearest"): 0.1,
        Scheme(name="int8", group_size=128, rounding="nearest"): 0.2,
        Scheme(name="token_int4", scale="paper", rounding="nearest"): 0.3,
    }
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in gradient_error.table_text(errors).splitlines()
    ]
    assert lines[2] == ["int8", "", "nearest", "", "0.100", "", "", "0.200"]
    assert lines[3] == ["token_int4", "paper", "nearest", "0.300", "", "", "", ""]


def test_root_mean_square() -> None:
    assert gradient_error.root_mean_square([3.0, 4.0, 5.0, 0.0]) == 50**0.5 / 2


def test_every_lossy_codec_is_there_with_all_its_options() -> None:
    schemes = codec_schemes()
    lossy = {name for name in list_codecs() if not get_codec(name).lossless}
    assert {scheme.name for scheme in schemes} == lossy | {NO_OUTLIERS}
    assert len(set(schemes)) == len(schemes)
    count = {name: sum(scheme.name == name for scheme in schemes) for name in lossy}
    # scales x roundings x group sizes
    assert count["outlier_int4"] == 3 * 2 * 4
    assert count["asymmetric_int4"] == 2 * 2 * 4
    assert count["int8"] == count["fp8"] == 2 * 4
    assert count["token_int4"] == 3 * 2


def test_takes_knows_each_codecs_scales() -> None:
    assert accepts_options("outlier_int4", {"scale": "signed"})
    assert not accepts_options("asymmetric_int4", {"scale": "signed"})
    assert not accepts_options("int8", {"scale": "paper"})


def saved_by_blocks(model, batch) -> int:
    """Count the float tensors that the blocks save, without parameters and masks, by another method."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    inside, count = [False], 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        two_valued = tensor.unique().numel() <= 2 and bool((tensor == 0).any())
        count += inside[0] and tensor.is_floating_point() and tensor.data_ptr() not in parameters and not two_valued
        return tensor

    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
        block.register_forward_hook(lambda *_: inside.__setitem__(0, False))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch)
    return count


def test_round_trips_take_what_blocks_save_and_nothing_else(tiny: Workload) -> None:
    batch = next(tiny.batches())
    expected = saved_by_blocks(tiny.model(), batch)
    assert expected > 0
    model = tiny.model()
    with RoundTrips(model, Scheme(name="int8", group_size=64)) as trips:
        model(**batch).loss.backward()
    assert trips.num_tensors == expected


def test_round_trips_change_gradients_and_then_leave_no_trace(tiny: Workload) -> None:
    model, batch = tiny.model(), next(tiny.batches())
    exact = compute_gradients(model, batch, 0)
    with RoundTrips(model, Scheme(name=NO_OUTLIERS, group_size=64)):
        int4 = compute_gradients(model, batch, 0)
    with RoundTrips(model, Scheme(name="int8", group_size=64)):
        int8 = compute_gradients(model, batch, 0)
    assert torch.equal(int4.loss, exact.loss)  # forward is unchanged
    # 4 more bits are 16 times finer. Half of that leaves room for errors other than rounding.
    assert relative_error(exact, int4) > 8 * relative_error(exact, int8) > 0
    assert first_difference(exact, compute_gradients(model, batch, 0)) is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_block_that_raises_does_not_leave_the_hooks_on(tiny: Workload) -> None:
    model, batch = tiny.model(), next(tiny.batches())
    fault = model.transformer.h[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    trips = RoundTrips(model, Scheme(name="int8"))
    with pytest.raises(ZeroDivisionError), trips:
        model(**batch)
    fault.remove()
    num_tensors = trips.num_tensors
    assert num_tensors > 0
    model(**batch).loss.backward()
    assert trips.num_tensors == num_tensors


def test_with_options_changes_each_codec_as_far_as_it_can(tiny: Workload) -> None:
    eager = replace(tiny, attention="eager")
    model, batch = eager.model(), next(eager.batches())
    policy = uniform_policy(profile_model(model, batch), Action.COMPRESS)
    scheme = Scheme(name=LAYER_SPECIFIC, scale="max7", group_size=32, rounding="stochastic")
    changed_policy = with_options(policy, scheme)
    options_by_codec = {}
    for (_, old_choice), (value, new_choice) in zip(
        policy.plans[0].choices, changed_policy.plans[0].choices, strict=True
    ):
        assert (old_choice.action, old_choice.codec) == (new_choice.action, new_choice.codec)
        options_by_codec[new_choice.codec] = dict(new_choice.options)
        assert new_choice.codec in (None, "bitmask") or dict(new_choice.options)["seed"] == value
    assert options_by_codec["outlier_int4"]["scale"] == options_by_codec["channel_int4"]["scale"] == "max7"
    assert options_by_codec["asymmetric_int4"]["scale"] == "range15"
    assert options_by_codec["bitmask"] == {}
    assert {options_by_codec[name]["group_size"] for name in ("outlier_int4", "asymmetric_int4", "int8")} == {32}
    assert options_by_codec["int8"]["rounding"] == "stochastic"


def test_layer_specific_schemes_are_all_different() -> None:
    assert len(set(layer_specific_schemes())) == 3 * 2 * 4
