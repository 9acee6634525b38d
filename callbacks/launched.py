"""Code that `adacc run` executes in the training process: adds AdaccCallback to a Trainer when training begins."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from transformers import TrainerState
from transformers.trainer_callback import CallbackHandler

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.callbacks.adacc import AdaccCallback
from adacc_hf.callbacks.step_recorder import StepRecorder
from adacc_hf.callbacks.trainer_guard import calling_trainer


def add_adacc_callback(handler: CallbackHandler, state: TrainerState, settings: str) -> None:
    """Add an AdaccCallback to the callbacks of a Trainer that begins to train, and print a line on the main process.
    `settings` are the fields of AdaccConfig in JSON. If the Trainer already has an AdaccCallback, no callback is added.
    A further field, "verify", contains settings of a StepRecorder, which `adacc verify` needs."""
    fields = json.loads(settings)
    verify = fields.pop("verify", None)
    config = AdaccConfig(**fields)
    callback = next((one for one in handler.callbacks if isinstance(one, AdaccCallback)), None)
    if verify is not None and verify["is_plain"]:
        others = [one for one in handler.callbacks if not isinstance(one, AdaccCallback)]
        handler.callbacks[:] = [*others, StepRecorder(Path(verify["folder"]), verify["num_steps"], None)]
        return
    if callback is None:
        callback = AdaccCallback(config)
        handler.callbacks.append(callback)
    if verify is not None:
        handler.callbacks.append(StepRecorder(Path(verify["folder"]), verify["num_steps"], callback))
    caller = calling_trainer(callback)
    if caller is None:
        raise RuntimeError(
            "adacc run: a training loop calls the callbacks of a Trainer without its Trainer, so that AdaccCallback "
            "cannot work: train without `adacc run`, and use AdaccSession in this loop"
        )
    if state.is_world_process_zero:
        shown = {"memory_budget": callback.config.memory_budget, **callback.config.changed_settings}
        settings_text = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        note = "" if callback.config == config else "; the script added it, and its settings override adacc run's"
        print(
            f"adacc run: {type(caller[0]).__name__} trains with {type(callback).__name__}({settings_text}) in process "
            f"{os.getpid()}{note}",
            file=sys.stderr,
            flush=True,
        )
