"""A child process gets the signals, and its exit status is returned as a shell returns it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from adacc_hf.child_process import run_child

# Runs the command line in sys.argv by run_child, and exits with its status.
PARENT = "import os, sys; from adacc_hf.child_process import run_child; sys.exit(run_child(sys.argv[1:], os.environ))"
# Makes standard input the controlling terminal, as a terminal emulator does, then does the same.
WITH_TERMINAL = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {PARENT}"
# Python's own reactions, also if the tests run in a shell's background or under nohup, which ignore signals.
REACTIONS = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); s.signal(s.SIGHUP, s.SIG_DFL)"
# Counts signals until 0.2 seconds have passed without one, or 20 seconds in all, and exits with 10 + their number.
COUNT = """
import signal, sys, time
numbers, end = [], time.monotonic() + 20
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: numbers.append(number))
print("ready", flush=True)
count = -1
while time.monotonic() < end and (not numbers or count < len(numbers)):
    count = len(numbers)
    time.sleep(0.2)
sys.exit(10 + len(numbers))
"""
# Reports and waits, with Python's own reaction to signals.
WAIT = "import time; print('ready', flush=True); time.sleep(60)"


def start(parent: str, child: str, **options) -> subprocess.Popen:
    """Start `child` under `parent` in a new session, and wait until the child is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{REACTIONS}; {parent}", sys.executable, "-c", child],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
        **options,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("exit(7)", 7), ("import os; os.abort()", 128 + 6)])
def test_the_status_is_that_of_the_child(code: str, status: int) -> None:
    assert run_child([sys.executable, "-c", code], os.environ) == status


def test_the_child_gets_the_environment(capfd) -> None:
    code = "import os; print(os.environ['ADACC_TEST'])"
    assert run_child([sys.executable, "-c", code], {**os.environ, "ADACC_TEST": "value"}) == 0
    assert capfd.readouterr().out == "value\n"


def test_handlers_are_restored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(FileNotFoundError):
        run_child(["/nonexistent/command"], os.environ)
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_the_child_gets_a_signal_once(name: str) -> None:
    with start(PARENT, COUNT) as process:
        process.send_signal(signal.Signals[name])
        assert process.wait(30) == 11


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_the_status_names_the_signal_that_ended_the_child(name: str) -> None:
    with start(PARENT, WAIT) as process:
        process.send_signal(signal.Signals[name])
        assert process.wait(30) == 128 + signal.Signals[name]


def test_ctrl_c_reaches_the_child_once() -> None:
    """The terminal itself sends SIGINT to both processes, so it must not be forwarded too."""
    terminal, slave = pty.openpty()
    with start(WITH_TERMINAL, COUNT, stdin=slave) as process:
        os.write(terminal, b"\x03")
        assert process.wait(30) == 11
    os.close(terminal)
    os.close(slave)


def test_an_ignored_signal_stays_ignored() -> None:
    """As under nohup."""
    with start(f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {PARENT}", COUNT) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 11
