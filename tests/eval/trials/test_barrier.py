"""The correctness gate before timing: the allowed error of a lossless method, on a device with a fixed order of sums
and on one without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.trials import barrier
from adacc_hf.eval.trials.barrier import Reference, check, reference_gradients
from adacc_hf.eval.trials.gradients import ROUNDING, Gradients
from adacc_hf.eval.trials.methods import InstalledMethod, Promise
from adacc_hf.eval.trials.model_under_test import Subject

SUBJECT = Subject(preset="demo", batch=1, tokens=16)


def gradients(off: float) -> Gradients:
    """Return the gradients of one parameter, `off` away from those of another run."""
    return Gradients(torch.tensor(2.0), {"weight": torch.tensor([1.0 + off, 0.0])})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Return the list of the next steps' gradient errors, which a test fills and must use up."""
    offs: list[float] = []
    monkeypatch.setattr(barrier, "step_gradients", lambda *_: gradients(offs.pop(0)))
    yield offs
    assert offs == []


def test_noise_is_the_worst_of_three_runs(runs: list[float]) -> None:
    """The first two of the three runs are equal by chance."""
    runs += [0.0, 0.0, 1e-3]
    reference = reference_gradients(SUBJECT, SUBJECT.model(), SUBJECT.example())
    assert reference.noise == pytest.approx(1e-3, rel=1e-3)  # float32 represents 1 + 1e-3 to 1e-7


@pytest.mark.parametrize(("device", "is_red"), [("cpu", True), ("cuda", False)])
def test_a_gpu_may_add_in_another_order_though_no_run_showed_it(runs: list[float], device: str, is_red: bool) -> None:
    subject = Subject(preset="demo", batch=1, tokens=16, device=device)
    model = torch.nn.Linear(1, 1)
    installed = InstalledMethod(call=model, promise=Promise.EXACT)
    reference = Reference(name="plain", batch=SUBJECT.example(), gradients=gradients(0.0), noise=0.0)
    runs += [ROUNDING["fp32"] / 2] if is_red else [ROUNDING["fp32"] / 2] * 3
    if is_red:
        with pytest.raises(WrongResultError, match="weight differs"):
            check(subject, model, installed, reference)
    else:
        errors = check(subject, model, installed, reference)
        assert errors["gradient_error"] == pytest.approx(ROUNDING["fp32"] / 2, rel=0.02)  # of float32's own 1e-7


def test_what_is_wrong_is_red_on_a_gpu_too(runs: list[float]) -> None:
    subject = Subject(preset="demo", batch=1, tokens=16, device="cuda")
    model = torch.nn.Linear(1, 1)
    reference = Reference(name="plain", batch=SUBJECT.example(), gradients=gradients(0.0), noise=0.0)
    runs += [2 * ROUNDING["fp32"]]
    with pytest.raises(WrongResultError, match="weight differs"):
        check(subject, model, InstalledMethod(call=model, promise=Promise.EXACT), reference)
