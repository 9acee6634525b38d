"""`adacc eval RUNNER` passes the runner's options and returns its exit status."""

from importlib import import_module

import pytest

from adacc_hf import cli
from adacc_hf.cli import RUNNERS, main
from adacc_hf.eval import max_batch


@pytest.mark.parametrize("name", ["max-batch", "max_batch"])
@pytest.mark.parametrize("status", [0, 1])
def test_forwards_options_and_status(monkeypatch: pytest.MonkeyPatch, name: str, status: int) -> None:
    calls = []
    monkeypatch.setattr(max_batch, "main", lambda argv: calls.append(argv) or status)
    assert main(["eval", name, "--most", "3", "--output", "x"]) == status
    assert calls == [["--most", "3", "--output", "x"]]


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_runner_explains_itself(runner: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["eval", runner, "--help"])
    assert callable(import_module(f"adacc_hf.eval.{RUNNERS[runner][0]}").main)
    output = capsys.readouterr().out
    assert output.startswith(f"usage: adacc eval {runner} ")
    assert "--output" in output


def test_help_names_every_runner(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["eval", "--help"])
    output = capsys.readouterr().out
    assert all(f"  {name} " in output and text in output for name, (_, text) in RUNNERS.items())


def test_bad_setting_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "max_batch", "--threads", "0"]) == 2
    assert capsys.readouterr().err == "adacc eval: error: --threads=0 must be 1 or more\n"


def test_unknown_runner_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["eval", "nonsense"])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err


def test_what_a_wheel_lacks_is_refused_with_the_reason(monkeypatch, capsys):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="adacc_hf.eval.repository")

    monkeypatch.setattr(cli, "import_module", missing)
    assert main(["eval", "published"]) == 2
    assert "run it from a source checkout (pip install -e .)" in capsys.readouterr().err
