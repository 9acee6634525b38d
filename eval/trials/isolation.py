"""Measurements in a process of their own: leftover memory and broken state end with the process.

    python -m adacc_hf.eval.trials.isolation

reads orders {"function": "module:name", "arguments": {...}, "result": "file"} from standard input, one per line. A
`Worker` writes them.
"""

from __future__ import annotations

import json
import os
import select
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
    """Run `function(**arguments)` in this process. Return its figures with a status, and the reason if it is not
    MEASURED.

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
    """Run like `run_here`, in a new process. After `timeout_s` seconds, end the process and its children."""
    with Worker() as worker:
        return worker(function, arguments, timeout_s)


class Worker:
    """Process that runs orders one after the other. Each order can reuse what earlier ones built.

    After an error or a timeout the next order gets a new process, because the old one's device may be unusable.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="adacc-eval-")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()
        self._folder.cleanup()

    def __call__(self, function: Callable[..., Figures], arguments: Figures, timeout_s: float | None = None) -> Figures:
        result = self._path("result.json")
        result.unlink(missing_ok=True)
        name = f"{function.__module__}:{function.__qualname__}"
        process = self._process = self._process or self._start()
        figures: Figures | None = None
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # its error output explains more
                process.stdin.write(json.dumps({"function": name, "arguments": arguments, "result": str(result)}))
                process.stdin.write("\n")
                process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout_s)[0]:
                return failure(Status.TIMEOUT, f"no result after {timeout_s:g} s: raise --timeout")
            if not process.stdout.readline():
                return failure(Status.ERROR, _exit_reason(process.wait(), self._path("errors").read_text()))
            figures = json.loads(result.read_text(encoding="utf-8"))
            return figures
        finally:
            if figures is None or figures["status"] == Status.ERROR.value:
                self._end()

    def _start(self) -> subprocess.Popen[str]:
        with self._path("errors").open("w", encoding="utf-8") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def _end(self) -> None:
        if self._process is not None:
            end_process(self._process)
            with suppress(BrokenPipeError):  # an order that was not read
                self._process.__exit__(None, None, None)
            self._process = None

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)


def end_process(process: subprocess.Popen[Any]) -> None:
    """End the process and its children, which share its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _exit_reason(code: int, errors: str) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}; SIGKILL usually means that the machine ran out of memory"
    lines = [line for line in errors.splitlines() if line.strip()]
    return f"exit status {code}: {lines[-1] if lines else 'no message'}"


def main() -> int:
    """Run the orders on standard input, one per line; write their figures, and reply after each."""
    # Output of an order must not mix with the replies: redirect standard output to standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _exit_with_parent(os.getppid())
    for line in sys.stdin:
        order = json.loads(line)
        module, _, name = order["function"].partition(":")
        figures = run_here(getattr(import_module(module), name), order["arguments"])
        Path(order["result"]).write_text(json.dumps(figures), encoding="utf-8")
        print("done", file=replies, flush=True)
    return 0


def _exit_with_parent(parent: int) -> None:
    """End this process group when its parent has ended, so that a killed run leaves no computing process behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    from adacc_hf.eval.trials import isolation

    sys.exit(isolation.main())  # so that the functions raise the imported module's classes, not those of __main__
