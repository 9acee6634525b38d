"""`adacc eval all`: what is run in which order, what is skipped, what comes of failures."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch

from adacc_hf.artifacts.files import write_json
from adacc_hf.cli import RUNNERS
from adacc_hf.eval import everything
from adacc_hf.eval.everything import NAMES, ON_GPU, SAMPLE_ROWS, default_order
from adacc_hf.eval.records import schemas
from adacc_hf.eval.tasks.lm_eval_tasks import PAPER_TASKS, load_tasks


class Runners:
    """Stand for the commands: each leaves a record and a table."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.commands: dict[str, list[str]] = {}

    def __call__(self, command: Sequence[str]) -> int:
        name, options = command[1], list(command[2:])
        if name == "killed":
            raise KeyboardInterrupt
        self.commands[name] = options
        output = Path(options[options.index("--output") + 1])
        points = {"none/training": {"folder": "none-0123"}} if name == "table4" else {}
        info = {"runner": output.stem, "seed": 0, "threads": 1, "device": "cpu"}
        write_json(output, {"run_info": info, "train_info": {"points": points}, "meta_info": {"notes": ""}})
        output.with_suffix(".md").write_text(name)
        return int(name == self.failing)


@pytest.fixture(autouse=True)
def _no_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "check_record", lambda record: None)


def run(folder: Path, runners: Runners, *argv: str) -> int:
    return everything.main([*argv, "--output", str(folder / "all.json")], runners)


def test_every_runner_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    runners = Runners()
    assert run(tmp_path, runners, "--clock", "cpu", "--notes", "busy day") == 0
    assert list(runners.commands) == list(NAMES)
    options = runners.commands["max-batch"]
    assert options[:2] == ["--output", str(tmp_path / "max-batch" / "max_batch.json")]
    assert {"--seed=0", "--threads=1", "--device=cpu", "--notes=busy day"} <= set(options)
    assert "--clock" not in options
    assert runners.commands["throughput"][-2:] == ["--clock", "cpu"]
    model = ["--model", str(tmp_path / "table4" / "none-0123")]
    assert runners.commands["cloze"][-2:] == model
    assert runners.commands["downstream"][-4:] == [*model, "--data_dir", str(SAMPLE_ROWS)]


def test_no_runner_is_left_out() -> None:
    halves = {"gradient-error", "codec-bandwidth"}  # which codecs runs
    expected = sorted(set(RUNNERS) - halves - {"all"})
    assert sorted(NAMES) == sorted(default_order("cpu")) == sorted(default_order("cuda")) == expected
    assert set(ON_GPU) <= set(NAMES)


def test_a_gpu_gets_work_for_a_gpu_and_the_wanted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    runners = Runners()
    assert run(tmp_path, runners, "--device", "cuda") == 0
    names = list(runners.commands)
    assert names[:2] == ["throughput", "codecs"]
    assert names.index("solver") > names.index("max-batch")
    for name in ("throughput", "max-batch"):
        assert {"--preset=gpt2-345m", "--precision=bf16", "--device=cuda"} <= set(runners.commands[name])
    assert "--preset=gpt2-345m" not in runners.commands["table4"]


@pytest.mark.parametrize("name", ON_GPU)
def test_the_options_for_a_gpu_are_those_of_the_runner(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a runner gets as far as asking for one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = import_module(f"adacc_hf.eval.{RUNNERS[name][0]}")
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        module.main([*ON_GPU[name], "--device=cuda"])


def test_a_failure_is_told_and_tried_again(tmp_path: Path) -> None:
    assert run(tmp_path, Runners(failing="loss"), "--runners", "loss", "solver") == 1
    assert "ended with status 1" in (tmp_path / "all.md").read_text()
    again = Runners()
    assert run(tmp_path, again, "--runners", "loss", "solver", "--resume") == 0
    assert list(again.commands) == ["loss"]


def test_what_needs_a_model_says_so(tmp_path: Path) -> None:
    assert run(tmp_path, Runners(), "--runners", "cloze") == 1
    assert "cloze: needs the model that table4 trains" in (tmp_path / "all.md").read_text()


def test_a_cut_run_goes_on_with_the_runner_that_is_missing(tmp_path: Path) -> None:
    killed = Runners()

    def dies_at_solver(command: Sequence[str]) -> int:
        return killed(["eval", "killed"]) if command[1] == "solver" else killed(command)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, dies_at_solver, "--runners", "loss", "solver", "codecs")
    again = Runners()
    assert run(tmp_path, again, "--runners", "loss", "solver", "codecs") == 0
    assert list(again.commands) == ["solver", "codecs"]


def test_results_are_published_in_one_folder(tmp_path: Path) -> None:
    assert (
        run(
            tmp_path / "run",
            Runners(failing="loss"),
            "--runners",
            "loss",
            "max-batch",
            "--publish",
            str(tmp_path / "p"),
        )
        == 1
    )
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["max_batch.json", "max_batch.md"]


def test_a_record_off_its_schema_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(record: dict) -> None:
        raise ValueError(record["run_info"]["runner"])

    monkeypatch.setattr(everything, "check_record", check)
    with pytest.raises(ValueError, match="max_batch"):
        run(tmp_path, Runners(), "--runners", "max-batch")


@pytest.mark.usefixtures("offline")
def test_sample_rows_are_in_the_hubs_schema() -> None:
    tasks = load_tasks(PAPER_TASKS, SAMPLE_ROWS)
    assert {name: len(task.eval_docs) for name, task in tasks.items()} == dict.fromkeys(PAPER_TASKS, 8)


def test_nothing_is_measured_where_records_cannot_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runners = Runners()
    monkeypatch.setattr(schemas.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"jsonschema: pip install 'adacc-hf\[eval\]'"):
        everything.main(["--output", str(tmp_path / "all.json")], runners)
    assert runners.commands == {}
