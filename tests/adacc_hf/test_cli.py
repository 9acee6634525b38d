"""The `adacc` command: its output, and one line with exit status 2 for errors that the user can fix."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from adacc_hf import __version__
from adacc_hf.artifacts.files import COMPILED_FILE, HISTORY_FILE, POLICY_FILE, PROFILE_FILE, write_json
from adacc_hf.artifacts.policy import Policy
from adacc_hf.cli import main
from adacc_hf.kernels.codecs import list_codecs
from adacc_hf.solve.simple_policies import uniform_policy


@pytest.fixture
def files(tmp_path: Path, gpt2_like_profile) -> tuple[str, str]:
    """Paths of a saved policy and of its profile."""
    profile = gpt2_like_profile(num_blocks=2)
    profile.save(tmp_path / "profile.json")
    uniform_policy(profile, "recompute").save(tmp_path / "policy.json")
    return str(tmp_path / "policy.json"), str(tmp_path / "profile.json")


def test_explain_prints_the_policy(files, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    Path(files[1]).unlink()
    assert main(["explain", files[0]]) == 0
    assert capsys.readouterr().out == f"{Policy.load(files[0])}\n"


def test_explain_with_profile_gives_reasons(files, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["explain", files[0], "--profile", files[1]]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("  tanh "))
    assert re.search(r"recompute +recompute: ", row)
    assert "ms for 48.00 MiB; outlier_int4: " in row


def test_report_names_the_profile_that_is_missing(files, tmp_path: Path, capsys) -> None:
    Path(files[1]).unlink()
    assert "pass it with --profile" in refusal_of(["report", files[0], "--output", str(tmp_path / "out")], capsys)


def test_a_runs_folder_stands_for_its_files(tmp_path: Path, gpt2_like_profile, capsys) -> None:
    profile = gpt2_like_profile(num_blocks=2)
    policy = uniform_policy(profile, "recompute")
    run = tmp_path / "run"
    policy.save(run / POLICY_FILE)
    profile.save(run / PROFILE_FILE)
    tracked = {"step": 4, "event": "tracking", "error": 0.1, "gradient_error": 0.01}
    write_json(run / HISTORY_FILE, [tracked])
    assert main(["explain", str(run)]) == 0
    assert "ms for 48.00 MiB; outlier_int4: " in capsys.readouterr().out  # reasons come from the profile
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"wrote {run / 'report.html'} and report.md\n"
    assert "timeline.png" in (run / "report.md").read_text()  # drawn from the history alone
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.md").read_text() == (run / "report.md").read_text()


def test_a_folder_without_a_policy_is_one_line(tmp_path: Path, capsys) -> None:
    for command in ("explain", "report"):
        assert f"has no policy file, {POLICY_FILE} or {COMPILED_FILE}" in refusal_of([command, str(tmp_path)], capsys)


def test_codecs_lists_every_codec(capsys) -> None:
    assert main(["codecs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list_codecs()
    assert "lossless" in next(line for line in lines if line.startswith("bitmask"))


def test_version(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"adacc_hf {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["explain"], ["nonsense"], ["report"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: adacc" in capsys.readouterr().err


def refusal_of(arguments: list[str], capsys) -> str:
    """The one line that the refused command printed on stderr."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_missing_file_is_one_line(files, capsys) -> None:
    assert "policy file nowhere.json does not exist" in refusal_of(["explain", "nowhere.json"], capsys)
    assert "profile file nowhere.json" in refusal_of(["explain", files[0], "--profile", "nowhere.json"], capsys)


@pytest.mark.parametrize("content", ["{}", "null", "[1]", '[{"step": 1}]', '[{"step": "1", "event": "policy"}]'])
def test_a_file_that_is_no_history_is_one_line(files, tmp_path: Path, capsys, content: str) -> None:
    (tmp_path / HISTORY_FILE).write_text(content)
    message = refusal_of(["report", files[0], "--output", str(tmp_path / "out")], capsys)
    expected = f"{HISTORY_FILE} is not the history of a run: delete the file, or copy the run's {HISTORY_FILE} there"
    assert expected in message


def test_reader_that_stops_early_is_no_error(files) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "adacc_hf.cli", "explain", files[0]]
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=240)
    os.close(writer)
    assert (process.returncode, process.stderr) == (0, "")


def test_a_path_that_stdout_cannot_encode_is_escaped(files, tmp_path: Path) -> None:
    folder = tmp_path / "ünï"
    command = [sys.executable, "-m", "adacc_hf.cli", "report", files[0], "--output", str(folder)]
    surroundings = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = subprocess.run(command, capture_output=True, env=surroundings, check=False, timeout=240)
    assert (process.returncode, process.stderr) == (0, b"")
    assert process.stdout.decode("ascii").endswith("n\\xef/report.html and report.md\n")
    assert (folder / "report.md").is_file()
