"""Code that `adacc run` and `adacc verify -- COMMAND` execute in the training process: adds callbacks to a Trainer."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.callbacks.adacc import AdaccCallback
from adacc_hf.callbacks.trainer_guard import calling_trainer
from adacc_hf.torch_glue.fingerprints import fingerprint, gradient_fingerprints


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
    trainer, _ = calling_trainer(callback)
    if state.is_world_process_zero:
        shown = {"memory_budget": callback.config.memory_budget, **callback.config.changed_settings}
        settings_text = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        note = "" if callback.config == config else "; the script added it, and its settings override adacc run's"
        print(
            f"adacc run: {type(trainer).__name__} trains with {type(callback).__name__}({settings_text}) in process "
            f"{os.getpid()}{note}",
            file=sys.stderr,
            flush=True,
        )


class StepRecorder(TrainerCallback):
    """Callback of `adacc verify` that writes the file rank-N.json into `folder`: fingerprints and times of the first
    `num_steps` steps, after which training ends. If a process trains several times, only the first training is
    recorded. `adacc` is the callback whose policy is recorded, or None."""

    def __init__(self, folder: Path, num_steps: int, adacc: AdaccCallback | None) -> None:
        self.folder = folder
        self.num_steps = num_steps
        self._adacc = adacc
        self._records: list[dict[str, Any]] = []
        self._step_ms: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        before = time.perf_counter()
        self._records.append(dict(gradient_fingerprints(model.named_parameters())))
        self._start += time.perf_counter() - before

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._step_ms.append(1e3 * (time.perf_counter() - self._start))
        control.should_log = True
        control.should_training_stop |= state.global_step >= self.num_steps
        self.on_epoch_end(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        control.should_save = control.should_evaluate = False

    def on_log(self, *args: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss")
        if loss is not None and self._records:
            self._records[-1] = {"loss": fingerprint(torch.tensor(float(loss)).double()), **self._records[-1]}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        path = self.folder / f"rank-{args.process_index}.json"
        if path.exists():
            return
        weights = {f"weight {name}": fingerprint(weight) for name, weight in model.named_parameters()}
        policy = None if self._adacc is None else self._adacc.policy
        record = {
            "records": [*self._records, weights],
            "step_ms": self._step_ms,
            "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            "policy": None if policy is None else policy.to_json(),
        }
        path.write_text(json.dumps(record))
