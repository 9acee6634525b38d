"""Measurements in separate processes: every way to end has a status and a reason."""

import os
from pathlib import Path

import pytest
import torch

from adacc_hf import InfeasibleBudgetError
from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.trials.isolation import CannotRunError, OverLimitError, run_here, run_isolated


def raise_error(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), ("out_of_memory", "OutOfMemoryError: CUDA out of memory")),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            (
                "out_of_memory",
                "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            ),
        ),
        (
            RuntimeError("Triton Error [CUDA]: out of memory"),
            ("out_of_memory", "RuntimeError: Triton Error [CUDA]: out of memory"),
        ),
        (
            RuntimeError("CUDA error: an illegal memory access"),
            ("error", "RuntimeError: CUDA error: an illegal memory access"),
        ),
        (InfeasibleBudgetError("too small", 7), ("out_of_memory", "too small")),
        (WrongResultError("wrong"), ("red", "wrong")),
        (CannotRunError("no GPU"), ("cannot_run", "no GPU")),
        (KeyError("x"), ("error", "KeyError: 'x'")),
    ],
    ids=["out-of-memory", "cublas", "triton", "illegal", "infeasible", "red", "cannot-run", "error"],
)
def test_errors_become_statuses(error: Exception, expected: tuple[str, str]) -> None:
    figures = run_here(raise_error, {"error": error})
    assert (figures["status"], figures["reason"]) == expected


def test_a_step_over_the_limit_keeps_its_figures() -> None:
    figures = run_here(raise_error, {"error": OverLimitError("takes 2, limit 1", {"peak_bytes": 2})})
    assert figures == {"status": "out_of_memory", "reason": "takes 2, limit 1", "peak_bytes": 2}


# The functions below run in the other process, which imports them by module name.
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str):
    """Return a function `act` in a module that the other process can import."""
    (tmp_path / "isolated_work.py").write_text(f"import os, time\ndef act(**arguments):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    def act() -> None: ...

    act.__module__, act.__qualname__ = "isolated_work", "act"
    return act


def test_it_runs_in_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    act = worker(monkeypatch, tmp_path, "return {'pid': os.getpid(), 'twice': 2 * arguments['number']}")
    figures = run_isolated(act, {"number": 21}, 120)
    assert figures["status"] == "measured"
    assert figures["twice"] == 42
    assert figures["pid"] != os.getpid()


@pytest.mark.parametrize("setting", [None, "backend:cudaMallocAsync"])
def test_a_gpu_gives_memory_out_as_the_user_says_or_without_fragments(monkeypatch, tmp_path, setting):
    name = "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.delenv(name, raising=False)
    if setting is not None:
        monkeypatch.setenv(name, setting)
    act = worker(monkeypatch, tmp_path, f"return {{'found': os.environ['{name}']}}")
    assert run_isolated(act, {})["found"] == (setting or "expandable_segments:True")


def test_a_process_that_dies_leaves_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    act = worker(monkeypatch, tmp_path, "os.kill(os.getpid(), 9)")
    figures = run_isolated(act, {}, 120)
    assert figures["status"] == "error"
    assert "SIGKILL" in figures["reason"]


def test_it_is_ended_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    act = worker(monkeypatch, tmp_path, "time.sleep(3600)")  # longer than the deadline of a test
    assert run_isolated(act, {}, 0.5) == {"status": "timeout", "reason": "no result after 0.5 s: raise --timeout"}
