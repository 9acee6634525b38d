"""The report's files, and that their figures agree with the records."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.reports.report import policy_report
from adacc_hf.solve.simple_policies import random_policy, uniform_policy

PICTURES = ("policy_map.png", "memory.png")
FILES = {"report.md", "report.html", *PICTURES}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=3, attention="eager")


@pytest.fixture(scope="module")
def policy(profile):
    return random_policy(profile, seed=1, actions=("retain", "compress", "recompute"))


@pytest.fixture(scope="module")
def report(profile, policy, tmp_path_factory) -> Path:
    return policy_report(profile=profile, policy=policy).save(tmp_path_factory.mktemp("report") / "folder")


def markdown_rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the tables below `heading`, header and rule rows included."""
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in section.splitlines() if row[:1] == "|"]


def test_report_leaves_whole_files(report: Path) -> None:
    assert {file.name for file in report.parent.iterdir()} == FILES
    for name in PICTURES:
        assert (report.parent / name).read_bytes().startswith(PNG_SIGNATURE)
        assert f"({name})" in report.read_text()
    page = (report.parent / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(PICTURES)
    assert "http" not in page, "the page must not need the network"


def test_action_table_has_every_activation_of_every_plan(report: Path, profile, policy) -> None:
    rows = markdown_rows(report.read_text(), "Actions")
    cells = [row for row in rows if row[0] not in ("activation", "---")]
    expected = [(profile.kinds[0].names[index], str(choice)) for plan in policy.plans for index, choice in plan.choices]
    assert [(row[0], row[3]) for row in cells] == expected


def test_summary_gives_the_simulated_figures(report: Path, policy) -> None:
    text = report.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| this policy |"))
    assert f"| {policy.predicted_overhead_ms:.2f} |" in row
    plain = next(line for line in text.splitlines() if line.startswith("| plain |"))
    assert "| 100.0 % |" in plain


def test_the_first_paragraph_compares_the_policy_with_plain_training(report: Path, profile, policy) -> None:
    paragraph = report.read_text().split("\n\n")[1]
    peak, plain_peak = policy.predicted_peak_bytes, uniform_policy(profile, "retain").predicted_peak_bytes
    assert f"Policy: {policy.describe_actions()}." in paragraph  # counted as in the log
    assert f"peak at {format_bytes(peak)}, {100 * peak / plain_peak:.1f} % of plain training's" in paragraph
    assert "head" not in paragraph


def test_events_are_shown(tmp_path: Path, profile, policy) -> None:
    history = [
        {"step": 2, "event": "policy", "budget_bytes": 3 * 2**20, "solve_ms": 41.25, "head": None},
        {"step": 4, "event": "tracked"},
    ]
    text = policy_report(profile=profile, policy=policy, history=history).save(tmp_path).read_text()
    assert markdown_rows(text, "Events")[2:] == [
        ["2", "policy", "budget 3.00 MiB; solve ms 41.25; head -"],
        ["4", "tracked", ""],
    ]


def test_only_a_budget_of_the_peak_is_drawn(tmp_path: Path, profile, policy) -> None:
    """Only a peak budget is drawn, because a budget on stored bytes is not comparable to live bytes."""
    facts = {
        "none": (),
        "stored": (("budget_bytes", 2**30), ("budget_of", "stored")),
        "peak": (("budget_bytes", 2**30), ("budget_of", "peak")),
    }
    pictures = {}
    for name, pairs in facts.items():
        path = policy_report(profile=profile, policy=replace(policy, facts=pairs)).save(tmp_path / name)
        pictures[name] = (path.parent / "memory.png").read_bytes()
    assert pictures["none"] == pictures["stored"]
    assert pictures["none"] != pictures["peak"]


def test_policy_of_another_profile_is_refused(tmp_path: Path, gpt2_like_profile, policy) -> None:
    with pytest.raises(PolicyMismatchError, match="the policy has 3 blocks, the profile 4"):
        policy_report(profile=gpt2_like_profile(num_blocks=4, attention="eager"), policy=policy).save(tmp_path)


@pytest.mark.parametrize("name", ["matplotlib", "markdown_it"])
def test_a_missing_package_names_the_extra(tmp_path: Path, profile, policy, monkeypatch, name) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"needs {name}, .* pip install 'adacc-hf\[plot\]'"):
        policy_report(profile=profile, policy=policy).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_kinds_of_block_are_both_drawn(tmp_path: Path, tape_builder, profile_of) -> None:
    kinds = []
    for digest in ("encoder", "decoder"):
        tape = tape_builder()
        tape.operator("op", [tape.value("start", 4096)], [("out", 4096)], 1.0, save=[0, -1])
        kinds.append(tape.kind(digest=digest))
    profile = profile_of(kinds, [0, 0, 1, 1])
    text = policy_report(profile=profile, policy=uniform_policy(profile, "recompute")).save(tmp_path).read_text()
    assert "### Block: h.0 to h.1 (2 blocks)" in text
    assert "### Block: h.2 to h.3 (2 blocks)" in text


def test_folder_that_is_a_file_is_refused(tmp_path: Path, profile, policy) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(NotADirectoryError, match="taken is a file: choose another folder"):
        policy_report(profile=profile, policy=policy).save(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"
