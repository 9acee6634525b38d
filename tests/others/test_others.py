"""Other packages' scripts, trainers and methods train equally with and without the callback."""

import pytest
from othersrun import cases, verdicts


@pytest.mark.others
@pytest.mark.timeout(1800)  # the first case of a group runs the whole group
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_others(case, outcomes, group_of, record_property):
    verdict = verdicts.judge(case, *outcomes(group_of[case.name]))
    peaks = (verdict.plain_peak, verdict.peak, verdict.plain_last_peak, verdict.last_peak)
    record_property("others row", (case.name, verdict.words, *map(mebibytes, peaks)))
    assert verdict.fault is None, verdict.fault


def mebibytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:.2f} MiB"
