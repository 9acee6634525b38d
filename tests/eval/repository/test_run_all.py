"""`adacc eval all`: the order of runners, skipped runners, and the results of failures."""

import json
import math
import tarfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adacc_hf.artifacts.files import write_json
from adacc_hf.cli import RUNNERS
from adacc_hf.eval.records.ledger import RecordError
from adacc_hf.eval.records.records import OUT_OF_TIME
from adacc_hf.eval.repository import run_all
from adacc_hf.eval.repository.points import save_points
from adacc_hf.eval.repository.run_all import NAMES, ON_GPU, Stage, stages_of


class Runners:
    """Substitute for the commands. Each call writes a record and a table."""

    def __init__(self, failing: str = "", out_of_time: str = "") -> None:
        self.failing = failing
        self.out_of_time = out_of_time
        self.commands: dict[str, list[str]] = {}

    def __call__(self, command: Sequence[str]) -> int:
        name, options = command[1], list(command[2:])
        if name == "killed":
            raise KeyboardInterrupt
        self.commands[name] = options
        output = Path(options[options.index("--output") + 1])
        info = {"runner": output.stem, "seed": 0, "threads": 1, "device": "cpu"}
        write_json(output, {"run_info": info, "train_info": {"points": {}}, "meta_info": {"notes": ""}})
        output.with_suffix(".md").write_text(name)
        return OUT_OF_TIME if name == self.out_of_time else int(name == self.failing)


@pytest.fixture(autouse=True)
def _no_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "check_record", lambda record: None)


def run(folder: Path, runners: Runners, *argv: str) -> int:
    return run_all.main([*argv, "--output", str(folder / "all.json")], runners)


def test_every_runner_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    runners = Runners()
    assert run(tmp_path, runners, "--clock", "cpu", "--notes", "busy day") == 0
    assert list(runners.commands) == list(NAMES)
    options = runners.commands["max-batch"]
    assert options[:2] == ["--output", str(tmp_path / "max-batch" / "max_batch.json")]
    assert {"--seed=0", "--threads=1", "--device=cpu", "--notes=busy day"} <= set(options)
    assert "--clock" not in options
    assert runners.commands["throughput"][-2:] == ["--clock", "cpu"]


def test_no_runner_is_left_out() -> None:
    expected = sorted(set(RUNNERS) - {"all", "downstream"})
    assert sorted(NAMES) == sorted(stage.runner for stage in stages_of("cpu")) == expected
    assert sorted({stage.runner for stage in stages_of("cuda")}) == expected
    keys = [stage.key for stage in stages_of("cuda")]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("stage", ON_GPU, ids=lambda stage: stage.key)
def test_the_options_for_a_gpu_are_those_of_the_runner(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the runner parses its options and then raises for the missing device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = import_module(f"adacc_hf.eval.{RUNNERS[stage.runner][0]}")
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        module.main([*stage.options.split(), "--device=cuda"])


def test_a_slice_goes_on_where_time_was_over_and_tries_nothing_twice(tmp_path: Path) -> None:
    """The second runner fails, and the third has no time left. The next slice begins with the third."""
    argv = ("--runners", "loss", "peers", "longest", "published", "--resume", "--minutes", "9")
    first = Runners(failing="peers", out_of_time="longest")
    assert run(tmp_path, first, *argv) == OUT_OF_TIME
    assert list(first.commands) == ["loss", "peers", "longest"]
    assert json.loads((tmp_path / "all.json").read_text())["meta_info"]["status"] == "running"
    second = Runners()
    assert run(tmp_path, second, *argv) == 1
    assert list(second.commands) == ["longest", "published"]
    assert "--resume" in second.commands["longest"]
    minutes = float(second.commands["longest"][-1].removeprefix("--minutes="))
    assert 8.9 < minutes <= 9.0
    third = Runners()
    assert run(tmp_path, third, *argv) == 1
    assert third.commands == {}


def run_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, minutes: str) -> tuple[int, dict]:
    """Return the exit status and the record of a slice whose only runner is a program that executes `body`."""
    program = tmp_path / "runner.py"
    program.write_text(
        f"import json, pathlib, sys, time\noutput = pathlib.Path(sys.argv[sys.argv.index('--output') + 1])\n{body}\n"
    )
    real = run_all.subprocess.Popen
    monkeypatch.setattr(
        run_all.subprocess, "Popen", lambda command, **options: real([command[0], program, *command[3:]], **options)
    )
    monkeypatch.setattr(run_all, "POLL_INTERVAL_S", 0.05)
    status = run_all.main(
        [
            "--runners",
            "loss",
            "--resume",
            "--minutes",
            minutes,
            "--output",
            str(tmp_path / "w/all.json"),
            "--report",
            str(tmp_path / "out"),
        ]
    )
    return status, json.loads((tmp_path / "w/all.json").read_text())


POINT = (
    "output.parent.mkdir(parents=True)\n"
    "meta = {'status': 'running', 'date': 'today', 'device': 'GPU'}\n"
    "points = {'full, batch 2': {'status': 'error', 'reason': 'broken'}}\n"
    "part = output.with_suffix('.part')\n"
    "part.write_text(json.dumps({'train_info': {'points': points}, 'meta_info': meta}))\n"
    "part.replace(output)\n"
)


def test_what_is_under_way_ends_with_the_time_and_its_points_are_reported(monkeypatch, tmp_path):
    runs = tmp_path / "w/all.json"
    runs.parent.mkdir()
    monkeypatch.setattr(run_all.Ledger, "finish", lambda *a, **k: pytest.fail("there is more to do"))

    end_of_time = SimpleNamespace(monotonic=lambda: math.inf, perf_counter=time.perf_counter)

    def save_and_end_the_time(folder, report):
        save_points(folder, report)
        monkeypatch.setattr(run_all, "time", end_of_time)

    monkeypatch.setattr(run_all, "save_points", save_and_end_the_time)
    with pytest.raises(FileNotFoundError):  # an unfinished runner has no record
        run_program(monkeypatch, tmp_path, POINT + "time.sleep(600)", "9")
    assert "- full, batch 2: error: broken" in (tmp_path / "out/points.md").read_text()
    with tarfile.open(tmp_path / "out/records.tar.gz") as archive:
        assert "loss/loss.json" in archive.getnames()


def test_a_runner_that_hangs_does_not_take_the_next_slice_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_all, "MOST_SECONDS_WITHOUT_A_POINT", 0.3)
    status, record = run_program(monkeypatch, tmp_path, "time.sleep(3600)", "9")
    assert status == 1
    assert record["train_info"]["points"]["loss"]["status"] == "timeout"


def test_a_failure_is_told_and_tried_again(tmp_path: Path) -> None:
    assert run(tmp_path, Runners(failing="loss"), "--runners", "loss", "peers") == 1
    assert "ended with status 1" in (tmp_path / "all.md").read_text()
    again = Runners()
    assert run(tmp_path, again, "--runners", "loss", "peers", "--resume") == 0
    assert list(again.commands) == ["loss"]


def test_a_record_off_its_schema_is_a_fault_of_its_runner_alone(tmp_path, monkeypatch):
    def check(record: dict) -> None:
        if record["run_info"]["runner"] == "max_batch":
            raise RecordError("off its schema")

    monkeypatch.setattr(run_all, "check_record", check)
    runners = Runners()
    assert run(tmp_path, runners, "--runners", "max-batch", "loss") == 1
    assert list(runners.commands) == ["max-batch", "loss"]
    assert "max-batch: off its schema" in (tmp_path / "all.md").read_text()
