"""Lines on a run's progress that are visible without a configuration of logging."""

import subprocess
import sys
import threading
import time

import pytest

from adacc_hf.torch_glue import progress
from adacc_hf.torch_glue.progress import announce, reported_if_slow

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
    announce("profiling")
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.0)
    with reported_if_slow("solving"):
        time.sleep(0.05)
    assert not caplog.records


def test_a_slow_phase_is_reported_while_it_lasts_and_at_its_end(monkeypatch, caplog) -> None:
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.01)
    num_threads = threading.active_count()
    with reported_if_slow("solving for another size"):
        deadline = time.monotonic() + 240
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
        assert caplog.messages == ["Adacc: solving for another size takes more than 0 s"]
    assert caplog.messages[1].startswith("Adacc: solving for another size: done after ")
    assert threading.active_count() == num_threads


def test_a_fast_phase_is_not_reported(caplog) -> None:
    with reported_if_slow("solving"):
        pass
    assert not caplog.messages
