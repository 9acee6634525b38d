"""Lines on a run's progress that are visible without a configuration of logging."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from adacc_hf import solve_policy
from adacc_hf.adapt.announcements import announce, describe_costs, describe_coverage
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.simple_policies import checkpoint_policy

ANNOUNCE = "from adacc_hf.adapt.announcements import announce; announce('profiling %d blocks', 4)"


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        ("", "profiling 4 blocks\n"),
        ("import logging; logging.basicConfig(format='root: %(message)s')", "root: profiling 4 blocks\n"),
        ("import logging; logging.getLogger('adacc_hf.progress').setLevel(logging.WARNING)", ""),
    ],
    ids=["not configured", "configured", "switched off"],
)
def test_a_line_is_shown_once_whatever_logging_is(configuration: str, expected: str) -> None:
    code = f"import adacc_hf.adapt.announcements\n{configuration}\n{ANNOUNCE}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in process.stderr.splitlines(keepends=True) if "profiling" in line]
    assert "".join(lines) == expected


def test_only_the_first_rank_shows_a_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("adacc_hf.adapt.announcements.is_first_rank", lambda: False)
    announce("profiling")
    assert not caplog.records


def test_costs_are_relative_to_plain_training(gpt2_like_profile: Any) -> None:
    profile = gpt2_like_profile(num_blocks=4)
    policy = solve_policy(profile, 0.5)
    text = describe_costs(policy, profile)
    plain = format_bytes(profile.plain_stored_bytes)
    assert f"stores {format_bytes(policy.predicted_stored_bytes)}, 50% of plain training's {plain}" in text
    assert "of plain training's time)" in text
    assert describe_costs(policy, None) == policy.summary()


def test_coverage_names_what_could_not_be_replayed(gpt2_like_profile: Any) -> None:
    profile = gpt2_like_profile(num_blocks=4)
    history = [{"event": "policy", "step": 0}]
    text = describe_coverage(solve_policy(profile, 0.5), profile, history)
    assert text == "block calls: 4 with an action for each activation. All steps followed their policies."
    untrusted = replace(profile, kinds=tuple(replace(kind, untrusted="it draws numbers") for kind in profile.kinds))
    text = describe_coverage(checkpoint_policy(profile), untrusted, history)
    assert text.startswith("block calls: 4 under torch's checkpoint (not replayable: it draws numbers).")
