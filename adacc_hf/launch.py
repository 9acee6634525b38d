"""Implementation of `adacc run`, which runs a training command with AdaccCallback in every Trainer of its processes.

The folder callbacks/startup is put first on PYTHONPATH. Every Python process of the command imports `sitecustomize`
from there, which adds the callback to each Trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from adacc_hf.artifacts.config import AdaccConfig

NOT_TRAINED = 2
"""Exit status of `adacc run` if the command succeeded but no Trainer began training."""
SETTINGS_VARIABLE, RECORDS_VARIABLE = "ADACC_HF_RUN_SETTINGS", "ADACC_HF_RUN_RECORDS"
"""Environment variables that callbacks/startup/sitecustomize.py reads."""
NEXT_STEPS = {
    "trainer": (
        "The command imported Transformers' Trainer, but did not begin to train. Check that its options ask for "
        "training (such as --do_train), and that it trains on this machine. A command that only evaluates needs no "
        "Adacc"
    ),
    "python": (
        "The command ran Python, but did not import Transformers' Trainer. Adacc works with this Trainer and the "
        "classes derived from it, such as TRL's. In Lightning use AdaccLightningCallback, in your own loop AdaccSession"
    ),
    "": (
        "The command ran no Python, or Python without its startup module. Leave out Python's options -I, -E and -S. A "
        "script that sets PYTHONPATH has to keep the earlier value (PYTHONPATH=src:$PYTHONPATH). Otherwise pass "
        "callbacks=[AdaccCallback(...)] to the Trainer"
    ),
}
"""Advice for runs in which no Trainer began training, by the last event that callbacks/startup/sitecustomize.py
recorded."""


def add_parser(commands: Any) -> None:
    """Add `run` to the argument parsers of the `adacc` command."""
    parser = commands.add_parser(
        "run",
        help="run a training command with AdaccCallback in every Trainer",
        usage="adacc run [-h] [--memory-budget SIZE] [--exact] [--config FILE] -- COMMAND ...",
        description="Run COMMAND, such as `python train.py`, `torchrun`, `accelerate launch` or `trl sft`, with "
        "AdaccCallback in every Trainer of its processes. The exit status is the command's. If the command succeeds "
        f"and no Trainer began training, it is {NOT_TRAINED}.",
    )
    parser.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="peak of a step, such as 20GiB, or a fraction of plain training's activations, such as 0.5 (default: "
        "auto, a peak that fits the device)",
    )
    parser.add_argument(
        "--exact", action="store_true", help="use no lossy codec: losses and gradients equal plain training's"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="JSON or YAML file with fields of AdaccConfig, which options override",
    )
    parser.add_argument("child", nargs=argparse.REMAINDER, metavar="COMMAND", help="command and its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the training command of `adacc run` after checking the settings, and return the exit status.

    Raises ValueError or OSError, before the command starts, if a setting is wrong.
    """
    command = arguments.child[1:] if arguments.child[:1] == ["--"] else arguments.child
    if not command:
        raise ValueError("COMMAND is missing: write it after --, for example `adacc run -- python train.py`")
    if RECORDS_VARIABLE in os.environ:
        raise ValueError("this command was itself started by `adacc run`: use `adacc run` once, around all commands")
    settings = json.dumps(config_of(arguments).changed_settings)
    with TemporaryDirectory(prefix="adacc-run-") as records:
        try:
            status = run_child(command, child_environment(os.environ, settings, records))
        except OSError as error:
            return _refuse_command(command[0], error)
        events = os.listdir(records)
    if "training" in events:
        return status
    if status:
        _print_launch_error(f"the command ended with status {status} before a Trainer began training")
        return status
    last_event = next((event for event in ("trainer", "python") if event in events), "")
    _print_launch_error(f"no Trainer began training, so that nothing ran with AdaccCallback. {NEXT_STEPS[last_event]}")
    return NOT_TRAINED


def config_of(arguments: argparse.Namespace) -> AdaccConfig:
    """Return the AdaccConfig for the options in `arguments`. They override the settings in the file of --config."""
    config = AdaccConfig() if arguments.config is None else read_config(arguments.config)
    if arguments.memory_budget is not None:
        config = config.with_overrides(memory_budget=arguments.memory_budget)
    return config.with_overrides(exact=True) if arguments.exact else config


def read_config(path: Path) -> AdaccConfig:
    """Read an AdaccConfig from a JSON or YAML file with its fields.

    Raises ValueError for another format, an unknown field or a value outside its range. The message names the file.
    """
    settings = _parse_settings_file(path)
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ValueError(f"--config={path} must map fields of AdaccConfig to values, such as `memory_budget: 20GiB`")
    try:
        return AdaccConfig().with_overrides(**settings)
    except (TypeError, ValueError) as error:  # TypeError: an unknown field
        raise ValueError(f"--config={path}: {error}") from None


def _parse_settings_file(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--config={path} cannot be read ({error.strerror}): check the path") from None
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"--config={path} is not valid JSON: {error}") from None
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--config={path} has the suffix {path.suffix!r}: name the file .json, .yaml or .yml")
    import yaml  # required by Transformers and Accelerate

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--config={path} is not valid YAML: {error}") from None


def child_environment(environment: Mapping[str, str], settings: str, records: str) -> dict[str, str]:
    """Return the environment variables for the command of `adacc run`.

    The result is `environment` with the startup folder first on PYTHONPATH, and with two more variables: the `settings`
    in JSON, and the folder `records`.
    """
    search_path = [startup_folder(), *filter(None, [environment.get("PYTHONPATH")])]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(search_path),
        SETTINGS_VARIABLE: settings,
        RECORDS_VARIABLE: records,
    }


def startup_folder() -> str:
    """Return the folder of the `sitecustomize` module.

    The callbacks package is not imported to find the folder, because this would import torch.
    """
    spec = find_spec("adacc_hf.callbacks")
    assert spec is not None  # a package of this distribution
    assert spec.submodule_search_locations
    return os.path.join(os.path.abspath(spec.submodule_search_locations[0]), "startup")


def _refuse_command(name: str, error: OSError) -> int:
    """Print the reason why the command `name` cannot be started. Return the exit status that a shell would return: 127
    if the command is not found, else 126."""
    hint = ""
    if name.endswith(".py"):
        hint = f"; to run a script, write `adacc run -- python {name}`"
    elif os.path.basename(name) == name and (command := Path(sys.executable).with_name(name)).exists():
        hint = f"; activate the environment, or write {command}"
    _print_launch_error(f"{name} cannot be started: {error.strerror}{hint}")
    return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


def _print_launch_error(text: str) -> None:
    print(f"adacc run: error: {text}", file=sys.stderr, flush=True)


# Child process with the user's command: signals are forwarded, and the exit status is returned.


NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit statuses that shells return for a command that cannot be executed or is not found."""
FORWARDED = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
"""Signals that `adacc run` forwards to its child process."""
FROM_TERMINAL = tuple(getattr(signal, name) for name in ("SIGINT", "SIGQUIT") if hasattr(signal, name))
"""Signals that the child process gets from the terminal, like every process of the foreground group. `adacc run` only
waits for the child's reaction."""


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `command` to the end. Return the command's exit status, or 128 + n if signal n ended the command. Signals
    that this process ignores, such as SIGHUP under `nohup`, stay ignored, also in the child.

    Raises OSError if the command cannot be started.
    """
    child = subprocess.Popen(command, env=environment)

    def forward(number: int, _: FrameType | None) -> None:
        if number in FORWARDED:
            child.send_signal(number)

    handlers = {number: signal.getsignal(number) for number in (*FORWARDED, *FROM_TERMINAL)}
    # Python could not restore a handler that it has not set (None).
    replaced = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in replaced:
        signal.signal(number, forward)
    try:
        status = child.wait()
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status
