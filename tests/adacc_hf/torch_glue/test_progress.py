"""Lines on a run's progress that are visible without a configuration of logging."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from adacc_hf.torch_glue import progress
from adacc_hf.torch_glue.progress import (
    PROFILING,
    SOLVING,
    SlowReport,
    announce,
    interruption,
    interruptions_since,
    reported_if_slow,
)

ANNOUNCE = "from adacc_hf.torch_glue.progress import announce; announce('profiling %d blocks', 4)"


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
    code = f"import adacc_hf.torch_glue.progress\n{configuration}\n{ANNOUNCE}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in process.stderr.splitlines(keepends=True) if "profiling" in line]
    assert "".join(lines) == expected


def test_a_line_stands_above_a_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """The bar is cleared before the line, and drawn again after it."""
    from tqdm import tqdm

    monkeypatch.setattr(progress.logging.getLogger(), "handlers", [])
    with tqdm(total=3, file=sys.stderr, ascii=True) as bar:
        bar.update()
        announce("profiling")
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert "profiling" in lines
    place = lines.index("profiling")
    assert not lines[place - 1].strip(), "the bar before the line is cleared"
    assert any("1/3" in line for line in lines[place:]), "the bar is drawn again"


def test_only_the_first_rank_shows_a_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "is_first_rank", lambda: False)
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.0)
    announce("profiling")
    with reported_if_slow("profiling"):
        time.sleep(0.05)
    assert not caplog.records


def wait_for_report(caplog) -> None:
    deadline = time.monotonic() + 60
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_slow_phase_is_reported_while_it_lasts_and_at_its_end(monkeypatch, caplog) -> None:
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.02)
    num_threads = threading.active_count()
    with reported_if_slow("solving"):
        wait_for_report(caplog)
        assert caplog.messages == ["Adacc: solving: 0 s so far"]
    assert caplog.messages[-1] == "Adacc: solving: done after 0 s"
    assert threading.active_count() == num_threads


def test_a_fast_phase_is_not_reported(caplog) -> None:
    with reported_if_slow("solving"):
        pass
    SlowReport("a step", normal_seconds=60.0).end()
    assert not caplog.messages


def test_the_first_report_of_a_step_comes_after_its_normal_time(monkeypatch, caplog) -> None:
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.0)
    report = SlowReport("a step", normal_seconds=60.0)
    time.sleep(0.05)
    report.end()
    assert not caplog.messages


def test_an_error_in_a_phase_ends_its_report(monkeypatch, caplog) -> None:
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.0)
    num_threads = threading.active_count()

    def fail() -> None:
        wait_for_report(caplog)
        raise KeyError

    with pytest.raises(KeyError), reported_if_slow("solving"):
        fail()
    assert threading.active_count() == num_threads
    assert caplog.messages[-1] == "Adacc: solving: failed after 0 s"


def test_a_report_ends_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.0)
    report = SlowReport("a step")
    wait_for_report(caplog)
    report.end()
    report.end(has_failed=True)
    assert [message for message in caplog.messages if " after " in message] == ["Adacc: a step: done after 0 s"]


def test_an_interruption_is_timed_and_reported(monkeypatch, caplog) -> None:
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.0)
    with interruption(SOLVING, "solving for another size"):
        pass
    started = time.perf_counter()
    caplog.clear()
    with interruption(PROFILING, "profiling a batch"):
        wait_for_report(caplog)
        time.sleep(0.05)
    with pytest.raises(KeyError), interruption(SOLVING, "solving"):
        raise KeyError
    ended = time.perf_counter()
    profiling, solving = interruptions_since(started)
    assert (profiling.kind, solving.kind) == (PROFILING, SOLVING)
    assert 0.05 <= profiling.seconds <= ended - started
    assert "Adacc: profiling a batch: done after 0 s" in caplog.messages


def test_another_thread_does_not_interrupt_training() -> None:
    started = time.perf_counter()

    def solve() -> None:
        with interruption(SOLVING, "solving"):
            pass
        assert len(interruptions_since(started)) == 1

    thread = threading.Thread(target=solve)
    thread.start()
    thread.join()
    assert interruptions_since(started) == []
