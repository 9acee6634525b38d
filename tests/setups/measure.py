"""One training of a set-up in a process of its own: live bytes, CPU time, losses and events of each step."""

import hashlib
import logging
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import setups
import torch
import transformers
from memory_meter import MemoryMeter
from transformers import TrainerCallback

from adacc_hf import AdaccCallback

LOSSLESS = ("retain", "recompute")


class StepRecorder(TrainerCallback):
    """Largest number of live bytes and CPU time of each step.

    A step lasts from the end of the previous step to its own end, so that loading data, generating texts and profiling
    between two steps belong to the second one. The first step begins with `start`.
    """

    def __init__(self, adacc: AdaccCallback | None) -> None:
        self.peaks: list[int] = []
        self.seconds: list[float] = []
        self.history: list[dict[str, Any]] = []
        """Events of the callback, each with the step that it was first seen in as `seen`."""
        self._adacc = adacc
        self.meter = MemoryMeter()

    @property
    def step(self) -> int:
        """Number of the current step, from 1."""
        return len(self.peaks) + 1

    def start(self) -> None:
        self.meter.reset_peak()
        self._begin = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.finish_step()

    def finish_step(self) -> None:
        """Note the current step, whether it has ended or failed, and begin the next one."""
        self.note_events()
        self.seconds.append(time.process_time() - self._begin)
        self.peaks.append(self.meter.peak_bytes)
        self.start()

    def note_events(self) -> None:
        """Note new events of the callback."""
        events = [] if self._adacc is None else self._adacc.history
        self.history += [{**event, "seen": self.step} for event in events[len(self.history) :]]


class LogRecorder(logging.Handler):
    """Messages of the logger adacc_hf, with the step in which each one was emitted."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__(logging.INFO)
        self.messages: list[dict[str, Any]] = []
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        message = {"step": self._recorder.step, "level": record.levelname, "message": record.getMessage()}
        self.messages.append(message)


def train(
    name: str, width: int, steps: int, budget: int | None, checkpointing: bool, limit: bool = False
) -> dict[str, Any]:
    """Train one set-up in this process and return its record. With a `budget`, an AdaccCallback keeps to it. With
    `limit`, the allocator refuses memory above the budget."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    adacc = None if budget is None else AdaccCallback(memory_budget=budget, actions=LOSSLESS)
    recorder = StepRecorder(adacc)
    log = LogRecorder(recorder)
    logger = logging.getLogger("adacc_hf")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    error = None
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder,
            "max_steps": steps,
            "gradient_checkpointing": checkpointing,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        transformers.set_seed(0)
        trainer = setups.SETUPS[name](width, options, [] if adacc is None else [adacc])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(recorder)
        recorder.start()
        if limit:
            recorder.meter.limit(budget)
        try:
            trainer.train()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            recorder.finish_step()
    recorder.meter.limit(None)
    recorder.note_events()
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "peaks": recorder.peaks,
        "seconds": recorder.seconds,
        "losses": [(repr(entry["loss"]), repr(entry.get("grad_norm"))) for entry in losses],
        "weights": weights_digest(trainer.model),
        "error": error,
        "history": recorder.history,
        "log": log.messages,
    }


def weights_digest(model: torch.nn.Module) -> str:
    """Return a hash of all parameters, to the last bit."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train_in_child(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Run `train` in a forked process, which has the modules of this one and none of its tensors."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(train, *args, **kwargs).result()
