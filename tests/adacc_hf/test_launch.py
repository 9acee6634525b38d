"""`adacc run`: settings are checked before the command starts, processes are prepared, and failures are explained."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adacc_hf import launch
from adacc_hf.cli import main
from adacc_hf.launch import run_child

ENVIRONMENT = "import os; print(os.environ['ADACC_HF_RUN_SETTINGS'])"
# Package with the only names that the startup module uses, in the place of Transformers.
FAKE_TRAINER = """
class CallbackHandler:
    def on_train_begin(self, args, state, control, **kwargs):
        print("begins")
"""
IS_WRAPPED = "import transformers.trainer as t; print(hasattr(t.CallbackHandler.on_train_begin, '__wrapped__'))"
WITHOUT_PACKAGE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "adacc_hf":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Missing())
"""
BEGIN = "import transformers.trainer as t; t.CallbackHandler().on_train_begin(None, None, None)"


@pytest.fixture
def fake_transformers(tmp_path: Path, monkeypatch) -> Path:
    """Put a package `transformers` that is imported at once first on PYTHONPATH. Return PYTHONPATH's folder."""
    folder = tmp_path / "packages"
    (folder / "transformers").mkdir(parents=True)
    (folder / "transformers" / "__init__.py").write_text("")
    (folder / "transformers" / "trainer.py").write_text(FAKE_TRAINER)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def run_code(code: str, *options: str, python: tuple[str, ...] = ()) -> int:
    return main(["run", *options, "--", sys.executable, *python, "-c", code])


def refusal_of(arguments: list[str], capsys) -> str:
    """Return the error message of a command that must not start."""
    assert main(["run", *arguments, "--", sys.executable, "-c", "print('started')"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("adacc run: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def settings_of(capfd, *options: str) -> dict:
    """Return the settings that a process of the command receives."""
    assert run_code(ENVIRONMENT, *options) == launch.NOT_TRAINED
    return json.loads(capfd.readouterr().out)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ((), {}),
        (("--memory-budget", "20GiB"), {"memory_budget": "20GiB"}),
        (("--memory-budget", "0.5"), {"memory_budget": 0.5}),
        (("--memory-budget=30000000",), {"memory_budget": "30000000"}),
        (("--exact",), {"exact": True}),
    ],
)
def test_options_reach_the_processes(options: tuple[str, ...], settings: dict, capfd) -> None:
    assert settings_of(capfd, *options) == settings


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"memory_budget": 0.4, "head": "plain", "actions": ["retain"]}'),
        ("c.yaml", "memory_budget: 0.4\nhead: plain\nactions: [retain]\n"),
        ("c.yml", "memory_budget: 0.4\nhead: plain\nactions: [retain]\n"),
    ],
)
def test_a_file_sets_fields_and_options_override_it(name: str, text: str, tmp_path: Path, capfd) -> None:
    path = tmp_path / name
    path.write_text(text)
    settings = {"memory_budget": 0.4, "head": "plain", "actions": ["retain"]}
    assert settings_of(capfd, "--config", str(path)) == settings
    options = ("--config", str(path), "--memory-budget", "1GiB", "--exact")
    assert settings_of(capfd, *options) == settings | {"memory_budget": "1GiB", "exact": True}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "c.yaml",
            "memory_bugdet: 20GiB",
            "memory_bugdet='20GiB' is not a setting of AdaccConfig: choose memory_budget",
        ),
        ("c.yaml", "memory_budget: 20", 'which may have been meant as "20GiB"'),
        ("c.yaml", "tracking: off", ', write "off" in quotes in YAML, or a number of steps'),
        ("c.yaml", "actions: [retain, recomputation]", "recomputation"),
        ("c.yaml", "codecs: [int3]", "codecs=['int3'] are unknown: choose from"),
        ("c.yaml", "- memory_budget", "must map fields of AdaccConfig to values"),
        ("c.yaml", "", "must map fields of AdaccConfig to values"),
        ("c.yaml", "a: [", "is not valid YAML"),
        ("c.json", "{", "is not valid JSON"),
        ("c.toml", "a = 1", "has the suffix '.toml': name the file .json, .yaml or .yml"),
    ],
)
def test_a_wrong_file_is_refused_before_the_command_starts(name, text, message, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(text)
    refusal = refusal_of(["--config", str(path)], capsys)
    assert f"--config={path}" in refusal
    assert message in refusal


def test_wrong_options_are_refused_before_the_command_starts(tmp_path: Path, capsys, monkeypatch) -> None:
    assert "memory_budget='20G' is not a size" in refusal_of(["--memory-budget", "20G"], capsys)
    missing = tmp_path / "missing.json"
    refusal = refusal_of(["--config", str(missing)], capsys)
    assert f"--config={missing} cannot be read (No such file or directory): check the path" in refusal
    (tmp_path / "c.json").write_text('{"head": "chunked"}')
    assert "leave out head, or exact" in refusal_of(["--exact", "--config", str(tmp_path / "c.json")], capsys)
    assert main(["run", "--exact"]) == main(["run", "--"]) == 2
    assert capsys.readouterr().err.count("COMMAND is missing: write it after --") == 2
    monkeypatch.setenv("ADACC_HF_RUN_RECORDS", str(tmp_path))
    assert "use `adacc run` once" in refusal_of([], capsys)


def test_settings_are_checked_without_torch(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("memory_budget: 20GiB\nhead: plain\n")
    code = (
        "import sys; from adacc_hf.cli import main; main(['run', '--config', 'c.yaml', '--', 'true']);"
        "print('torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"


def test_the_command_keeps_its_own_options(capfd) -> None:
    """After the command's name, options belong to the command, with and without `--`."""
    code = "import sys; print(sys.argv[1:])"
    command = [sys.executable, "-c", code, "--exact", "--", "--config", "x"]
    main(["run", "--", *command])
    main(["run", *command])
    assert capfd.readouterr().out == "['--exact', '--', '--config', 'x']\n" * 2


@pytest.mark.parametrize(
    ("code", "python", "message"),
    [
        ("pass", (), "The command ran Python, but did not import Transformers' Trainer"),
        ("import transformers.trainer", (), "imported Transformers' Trainer, but did not begin to train"),
        ("import transformers.trainer", ("-S",), "The command ran no Python, or Python without its startup module"),
        ("pass", ("-I",), "The command ran no Python, or Python without its startup module"),
        ("pass", ("-E",), "The command ran no Python, or Python without its startup module"),
    ],
)
def test_no_training_is_an_error(code: str, python: tuple[str, ...], message: str, fake_transformers, capfd) -> None:
    assert run_code(code, python=python) == launch.NOT_TRAINED
    error = capfd.readouterr().err
    assert error.startswith("adacc run: error: no Trainer began training")
    assert message in error


def test_a_failed_command_keeps_its_status(capfd) -> None:
    assert run_code("exit(9)") == 9
    message = "adacc run: error: the command ended with status 9 before a Trainer began training\n"
    assert capfd.readouterr().err == message


def test_a_command_that_cannot_start_is_explained(tmp_path: Path, capfd) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", "--", str(script)]) == 126
    assert f"write `adacc run -- python {script}`" in capfd.readouterr().err
    assert main(["run", "--", "no-such-command"]) == 127
    assert "no-such-command cannot be started: No such file or directory" in capfd.readouterr().err


def test_a_command_of_the_same_environment_is_named(tmp_path: Path, monkeypatch, capfd) -> None:
    """Without an activated environment, its commands are not on PATH."""
    (tmp_path / "own-command").write_text("")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert main(["run", "own-command"]) == 127
    assert f"activate the environment, or write {tmp_path / 'own-command'}" in capfd.readouterr().err


def test_the_users_sitecustomize_runs_too(fake_transformers: Path, capfd) -> None:
    (fake_transformers / "sitecustomize.py").write_text("print('runs'); value = 7")
    assert run_code(f"import sitecustomize; print(sitecustomize.value); {IS_WRAPPED}") == launch.NOT_TRAINED
    assert capfd.readouterr().out == "runs\n7\nTrue\n"


def test_processes_see_the_search_path_of_the_user(fake_transformers: Path, capfd) -> None:
    """Only the environment variable has the startup folder, for further processes."""
    code = "import sys; print([p for p in sys.path if 'startup' in p], sys.path.count(sys.argv[1]))"
    main(["run", sys.executable, "-c", code, str(fake_transformers)])
    assert capfd.readouterr().out == "[] 1\n"


def test_the_module_of_the_trainer_keeps_its_loader(fake_transformers: Path, capfd) -> None:
    code = (
        "import inspect, importlib, transformers.trainer as t; print(type(t.__loader__).__name__, vars(t.__loader__));"
        f"print(inspect.getsource(t) == {FAKE_TRAINER!r}); importlib.reload(t)"
    )
    run_code(f"{code}; {IS_WRAPPED}")
    loader, *others = capfd.readouterr().out.splitlines()
    path = str(fake_transformers / "transformers" / "trainer.py")
    assert loader == f"SourceFileLoader { ({'name': 'transformers.trainer', 'path': path}) }"
    assert others == ["True", "True"]


def test_an_interpreter_without_this_package_is_named(fake_transformers: Path, capfd) -> None:
    """Its training fails, instead of running without a policy."""
    assert run_code(WITHOUT_PACKAGE + BEGIN) == 1
    captured = capfd.readouterr()
    assert f"adacc_hf is not installed for {sys.executable}" in captured.err
    assert "begins" not in captured.out
    assert "before a Trainer began training" not in captured.err


def test_nothing_happens_outside_of_adacc_run(fake_transformers: Path) -> None:
    """A process that keeps PYTHONPATH, but not the settings."""
    environment = {**os.environ, "PYTHONPATH": f"{launch.startup_folder()}{os.pathsep}{fake_transformers}"}
    process = subprocess.run(
        [sys.executable, "-c", IS_WRAPPED], env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout == "False\n"


# Runs the command line in sys.argv by run_child, and exits with its status.
PARENT = "import os, sys; from adacc_hf.launch import run_child; sys.exit(run_child(sys.argv[1:], os.environ))"
# Makes standard input the controlling terminal, as a terminal emulator does, then does the same.
WITH_TERMINAL = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {PARENT}"
# Python's own reactions, also if the tests run in a shell's background or under nohup, which ignore signals.
REACTIONS = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); s.signal(s.SIGHUP, s.SIG_DFL)"
# Counts signals until 0.2 seconds have passed without one, or 200 seconds in all, and exits with 10 + their number.
COUNT = """
import signal, sys, time
numbers, end = [], time.monotonic() + 200
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
WAIT = "import time; print('ready', flush=True); time.sleep(600)"


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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_the_child_gets_a_signal_once(name: str) -> None:
    with start(PARENT, COUNT) as process:
        process.send_signal(signal.Signals[name])
        assert process.wait(240) == 11


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_the_status_names_the_signal_that_ended_the_child(name: str) -> None:
    with start(PARENT, WAIT) as process:
        process.send_signal(signal.Signals[name])
        assert process.wait(240) == 128 + signal.Signals[name]


def test_ctrl_c_reaches_the_child_once() -> None:
    """The terminal itself sends SIGINT to both processes, so it must not be forwarded too."""
    terminal, slave = pty.openpty()
    with start(WITH_TERMINAL, COUNT, stdin=slave) as process:
        os.write(terminal, b"\x03")
        assert process.wait(240) == 11
    os.close(terminal)
    os.close(slave)
