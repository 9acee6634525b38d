"""Measurements, each in its own process: leftover memory and broken state end with the process.

`run_isolated` writes an order {"function": "module:name", "arguments": {...}} to a file, and the process runs it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from adacc_hf.artifacts.errors import AdaccError, InfeasibleBudgetError
from adacc_hf.eval.records.records import Figures, Status


class CannotRunError(AdaccError):
    """Error of a method that needs a device or a package that this machine does not have."""


class OverLimitError(AdaccError):
    """Error of a step that takes more memory than the limit. `figures` has the bytes."""

    def __init__(self, message: str, figures: Figures) -> None:
        super().__init__(message)
        self.figures = figures


def run_here(function: Callable[..., Figures], arguments: Figures, timeout_s: float | None = None) -> Figures:
    """Run `function(**arguments)` in this process.

    Return its figures with a status, and the reason if the status is not MEASURED.

    In this process there is no timeout.
    """
    from adacc_hf.eval.records.records import WrongResultError
    from adacc_hf.torch_glue.memory import is_out_of_memory

    try:
        return {"status": Status.MEASURED.value, **function(**arguments)}
    except OverLimitError as error:
        return {"status": Status.OUT_OF_MEMORY.value, "reason": str(error), **error.figures}
    except InfeasibleBudgetError as error:
        return failure(Status.OUT_OF_MEMORY, error)
    except WrongResultError as error:
        return failure(Status.RED, error)
    except CannotRunError as error:
        return failure(Status.CANNOT_RUN, error)
    except Exception as error:  # a peer's exception is its result, and must not end the table
        return failure(Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.ERROR, error)


def failure(status: Status, error: Exception | str) -> Figures:
    """Return the figures of a failed measurement: its status and the reason."""
    name = "" if isinstance(error, (str, AdaccError)) else f"{type(error).__name__}: "
    return {"status": status.value, "reason": f"{name}{' '.join(str(error).split())}"[:600]}


def run_isolated(function: Callable[..., Figures], arguments: Figures, timeout_s: float | None = None) -> Figures:
    """Do the same as `run_here`, in a new process. After `timeout_s` seconds, end the process and its children."""
    with tempfile.TemporaryDirectory(prefix="adacc-eval-") as folder:
        order, result, errors = (Path(folder, name) for name in ("order.json", "result.json", "errors"))
        name = f"{function.__module__}:{function.__qualname__}"
        order.write_text(json.dumps({"function": name, "arguments": arguments}), encoding="utf-8")
        command = [sys.executable, "-m", __name__, str(order), str(result), str(os.getpid())]
        with (
            errors.open("w", encoding="utf-8") as error_output,
            subprocess.Popen(command, stdout=error_output, stderr=error_output, start_new_session=True) as process,
        ):
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return failure(Status.TIMEOUT, f"no result after {timeout_s:g} s: raise --timeout")
            finally:
                end_process(process)
        if code:
            return failure(Status.ERROR, _exit_reason(code, errors.read_text(encoding="utf-8")))
        return json.loads(result.read_text(encoding="utf-8"))


def end_process(process: subprocess.Popen[Any]) -> None:
    """End the process and its children, which share its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _exit_reason(code: int, errors: str) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}; SIGKILL usually means that the machine ran out of memory"
    lines = [line for line in errors.splitlines() if line.strip()]
    return f"exit status {code}: {lines[-1] if lines else 'no message'}"


def main(order_file: str, result_file: str, parent: str) -> None:
    """Run the order in `order_file`, and write its figures to `result_file`."""
    _exit_with_parent(int(parent))
    order = json.loads(Path(order_file).read_text(encoding="utf-8"))
    module, _, name = order["function"].partition(":")
    figures = run_here(getattr(import_module(module), name), order["arguments"])
    Path(result_file).write_text(json.dumps(figures), encoding="utf-8")


def _exit_with_parent(parent: int) -> None:
    """End this process group when its parent has ended, so that a killed run leaves no computing process behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    from adacc_hf.eval.trials import isolation

    isolation.main(*sys.argv[1:])  # so that functions raise the imported module's classes, not __main__'s
