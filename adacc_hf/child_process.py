"""Execution of the user's command by `adacc run` in a child process, with signals forwarded and the status returned."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit statuses that shells return for a command that cannot be executed or is not found."""
FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
"""Signals that `adacc run` forwards to its child process."""
FROM_TERMINAL = ("SIGINT", "SIGQUIT")
"""Signals that a terminal sends to every process of the foreground group. The child process gets these signals from the
terminal, so they are not forwarded."""


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `command` to the end. Return the command's exit status, or 128 + n if signal n ended the command.

    Raises OSError if the command cannot be started.
    """
    child: subprocess.Popen[bytes] | None = None
    early_signals: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if signal.Signals(number).name in FROM_TERMINAL and _is_in_foreground():
            return
        if child is None:
            early_signals.append(number)
        else:
            child.send_signal(number)

    with _signal_handler(forward):
        child = subprocess.Popen(command, env=environment)
        for number in early_signals:
            child.send_signal(number)
        status = child.wait()
    return 128 - status if status < 0 else status


@contextmanager
def _signal_handler(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handle` for the signals in FORWARDED inside the `with` block.

    Signals that this process ignores, such as SIGHUP under `nohup`, stay ignored, also in the child. Handlers that were
    not set by Python (None) stay too, because Python could not restore such handlers.
    """
    handlers = {number: signal.getsignal(number) for number in FORWARDED}
    replaced = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in replaced:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Return True if this process is in the terminal's foreground group, whose processes get the terminal's signals."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:  # no controlling terminal
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)
