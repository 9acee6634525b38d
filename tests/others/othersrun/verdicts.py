"""Comparison of two runs of a case, one without and one with the callback."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from othersrun.cases import Case

Outcome = Mapping[str, Any]
"""Record of a child process: "results", errors by case, and "trainings"."""


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison, one line of the table."""

    words: str
    fault: str | None = None
    """Description of a fault of the callback or the case, or None."""
    plain_peak: int | None = None
    """Peak of live bytes over all steps without the callback."""
    peak: int | None = None
    """Peak of live bytes over all steps with the callback, including profiling and the steps before a policy."""
    last_peak: int | None = None
    """Peak of live bytes in the last step with the callback, which is under a policy."""
    plain_last_peak: int | None = None


def judge(case: Case, plain: Outcome, adacc: Outcome) -> Verdict:
    """Compare the two runs of a case's process."""
    runs = [[one for one in outcome["trainings"] if one["label"] == case.name] for outcome in (plain, adacc)]
    error = plain["results"].get(case.name)
    if error is not None or not runs[0]:
        return _fault(f"the case does not train without the callback either: {error}")
    error = adacc["results"].get(case.name)
    if case.refused is not None:
        if error is None or case.refused not in error:
            return _fault(f"the callback should refuse the case with {case.refused!r}, but the error is: {error}")
        return Verdict("refused, as expected", plain_peak=_most(runs[0]), plain_last_peak=_last(runs[0]))
    if error is not None:
        return _fault(f"with the callback: {error}", "FAILS")
    fault = difference(*runs)
    idle = [one for one in runs[1] if not (one["actions"] or {}).get("recompute")]
    if fault is None and idle and case.idle is None:
        fault = f"the callback did nothing: {idle[0]['actions']}"
    return Verdict(
        "bit-equal" if fault is None else "FAILS", fault, _most(runs[0]), _most(runs[1]), _last(runs[1]), _last(runs[0])
    )


def difference(plain: list[dict[str, Any]], adacc: list[dict[str, Any]]) -> str | None:
    """Describe the first difference between two lists of trainings, compared bit by bit. Return None if equal."""
    if [one["label"] for one in plain] != [one["label"] for one in adacc]:
        return f"{len(plain)} trainings without the callback, {len(adacc)} with it"
    for before, after in zip(plain, adacc, strict=True):
        for records in zip(before["logs"], after["logs"], strict=False):
            if records[0] != records[1]:
                return f"{before['label']}: logged {records[0]} without the callback, {records[1]} with it"
        for key in ("num_steps", "weights", "error"):
            if before[key] != after[key]:
                return f"{before['label']}: {key} {before[key]} without the callback, {after[key]} with it"
        if len(before["logs"]) != len(after["logs"]):
            return f"{before['label']}: {len(before['logs'])} logs without the callback, {len(after['logs'])} with it"
    return None


def _fault(words: str, short: str = "BROKEN") -> Verdict:
    return Verdict(short, words)


def _most(trainings: list[dict[str, Any]]) -> int | None:
    return max((peak for one in trainings for peak in one["step_peaks"]), default=None)


def _last(trainings: list[dict[str, Any]]) -> int | None:
    return max((one["step_peaks"][-1] for one in trainings if one["step_peaks"]), default=None)
