"""Comparison of the runs of other packages' code. These tests run no code of other packages."""

from typing import Any

import pytest
from othersrun import cases, verdicts

CASE = cases.Case(name="one", package="theirs")


def training(**changes: Any) -> dict[str, Any]:
    record = {"label": "one", "error": None, "logs": ["loss 1.0"], "num_steps": 2, "weights": "a", "actions": None}
    return {**record, "step_peaks": [3, 2], **changes}


def outcome(*trainings: dict[str, Any], **results: str) -> dict[str, Any]:
    return {"results": results, "trainings": list(trainings)}


def adacc(**changes: Any) -> dict[str, Any]:
    return training(actions={"recompute": 1}, step_peaks=[2, 1], **changes)


def test_two_trainings_that_are_the_same() -> None:
    verdict = verdicts.judge(CASE, outcome(training()), outcome(adacc()))
    assert verdict == verdicts.Verdict("bit-equal", None, 3, 2, 1, 2)


@pytest.mark.parametrize("changes", [{"logs": ["loss 1.1"]}, {"logs": []}, {"weights": "b"}, {"num_steps": 1}])
def test_what_differs_is_a_fault(changes: dict[str, Any]) -> None:
    verdict = verdicts.judge(CASE, outcome(training()), outcome(adacc(**changes)))
    assert verdict.words == "FAILS"
    assert "without the callback" in verdict.fault


def test_a_callback_that_does_nothing_is_a_fault() -> None:
    assert "did nothing" in verdicts.judge(CASE, outcome(training()), outcome(training())).fault


def test_an_error_is_a_fault_unless_it_is_the_refusal_that_is_known() -> None:
    refused = cases.Case(name="one", package="theirs", refused="not for prefixes")
    with_error = outcome(one="ValueError: not for prefixes")
    assert verdicts.judge(CASE, outcome(training()), with_error).fault
    assert verdicts.judge(refused, outcome(training()), with_error).fault is None
    assert verdicts.judge(refused, outcome(training()), outcome(adacc())).fault
    assert verdicts.judge(refused, outcome(one="TypeError"), with_error).fault
