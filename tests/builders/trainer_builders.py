"""A GPT-2 that trains in milliseconds, and Trainers for it whose runs can be compared bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forked_runs import run_forked
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from adacc_hf.adapt.run_profiler import TrainingLoop
from adacc_hf.price import measurement
from adacc_hf.torch_glue.memory import count_static_bytes
from adacc_hf.torch_glue.meters import CpuMemoryMeter

LOSSLESS = {"memory_budget": 0.6, "actions": ("retain", "recompute")}
"""Settings with which training is bit-equal to plain training, and which make the tiny model recompute some
activations."""


class Tokens(torch.utils.data.Dataset):
    """Random sequences of 32 tokens from a vocabulary of 97, the same in every run."""

    def __init__(self, num_sequences: int = 64, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 97, (num_sequences, 32), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@dataclass
class Run:
    """A finished training run: its Trainer and its logs."""

    trainer: Trainer
    logs: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [log["loss"] for log in self.logs if "loss" in log]

    @property
    def eval_losses(self) -> list[float]:
        return [log["eval_loss"] for log in self.logs if "eval_loss" in log]

    @property
    def gradient_norms(self) -> list[float]:
        return [log["grad_norm"] for log in self.logs if "grad_norm" in log]

    def assert_equals(self, other: Run) -> None:
        """Assert that all logged losses and gradient norms, and all final parameters, are bit-equal."""
        assert self.losses
        assert self.losses == other.losses
        assert self.eval_losses == other.eval_losses
        assert self.gradient_norms == other.gradient_norms
        own_state, other_state = self.trainer.model.state_dict(), other.trainer.model.state_dict()
        assert own_state.keys() == other_state.keys()
        different = [name for name in own_state if not torch.equal(own_state[name], other_state[name])]
        assert not different


def tiny_model(**settings: Any) -> GPT2LMHeadModel:
    """Return a GPT-2 with 2 layers of width 64, dropout 0.1 and the same parameters at every call."""
    torch.manual_seed(1)
    fields = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 97, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(
        GPT2Config(**{**fields, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **settings})
    )


@contextmanager
def run_graphs_eagerly() -> Iterator[None]:
    """Run Inductor's graphs operator by operator. No code is generated, so that results can be compared bit for bit."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx

    run = partial(compile_fx.compile_fx, inner_compile=lambda module, *_, **__: make_boxed_func(module))
    no_cache = torch._functorch.config.patch(enable_autograd_cache=False)  # there is no code to cache
    torch._dynamo.reset()
    with mock.patch.object(compile_fx, "compile_fx", run), no_cache:
        yield
    torch._dynamo.reset()


@pytest.fixture
def eager_graphs() -> Iterator[None]:
    """Run compiled graphs operator by operator in the test."""
    with run_graphs_eagerly():
        yield


@pytest.fixture(scope="session")
def make_model():
    """Return `make_model(**settings)`, see `tiny_model`."""
    return tiny_model


@pytest.fixture(scope="session")
def lossless():
    """Return keyword arguments of a callback that changes no bit of the training."""
    return LOSSLESS


def tiny_trainer(
    folder: Path,
    callbacks: list[TrainerCallback] | None = None,
    model: PreTrainedModel | None = None,
    trainer_class: type[Trainer] = Trainer,
    **arguments: Any,
) -> Trainer:
    """Return a Trainer on the CPU for 5 steps that writes its checkpoints to `folder`."""
    settings = {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "max_steps": 5,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "seed": 3,
    }
    return trainer_class(
        model=model if model is not None else tiny_model(),
        args=TrainingArguments(**{**settings, **arguments}),
        train_dataset=Tokens(),
        eval_dataset=Tokens(8, seed=1),
        callbacks=callbacks,
    )


@pytest.fixture
def make_trainer(tmp_path):
    """Return `make_trainer(callbacks, model=None, trainer_class=Trainer, **arguments)`, see `tiny_trainer`."""
    return partial(tiny_trainer, tmp_path / "run")


@pytest.fixture
def run_two_ranks(tmp_path):
    """Return `run_two_ranks(script, *arguments)`, which runs `script` on two ranks and returns the contents of their
    rank0.json and rank1.json."""

    def run(script: str, *arguments: str) -> list[Any]:
        process = run_forked(script, str(tmp_path), *arguments, num_ranks=2)
        assert process.returncode == 0, process.stderr[-8000:]
        return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]

    return run


def write_rank_results(folder: Path, results: Any) -> None:
    """Write this rank's results to the file that `run_two_ranks` reads, and end the process group. If the group is not
    ended, gloo's threads may still run when Python exits, and the process sometimes aborts."""
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def late_policy(monkeypatch):
    """Let the first steps run under torch's checkpoint and profile a later batch, like runs whose first batch skips
    blocks."""
    monkeypatch.setattr(TrainingLoop, "num_unrecorded_steps", 1)


@pytest.fixture
def train(make_trainer):
    """Return `train(callbacks, resume=None, **arguments)`, which trains and returns the finished Run."""

    def run(callbacks: list[TrainerCallback] | None = None, resume: Any = None, **arguments: Any) -> Run:
        trainer = make_trainer(callbacks, **arguments)
        trainer.train(resume_from_checkpoint=resume)
        return Run(trainer, trainer.state.log_history)

    return run


class Sharpen(TrainerCallback):
    """Callback that multiplies the weights of queries and keys by `factor` at `step`, so that attention is as sharp as
    in a trained model."""

    def __init__(self, factor: float, step: int = 4) -> None:
        self.factor, self.step = factor, step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for block in model.transformer.h if state.global_step == self.step else ():
            block.attn.c_attn.weight.data[:, : 2 * block.attn.split_size] *= self.factor


@pytest.fixture(scope="session")
def sharpen():
    """Return `sharpen(factor, step=4)`, a callback that makes gradients depend on queries and keys more than on all
    else. At a factor of 20 INT4 degrades the gradients under fused attention, whose backward recomputes the softmax
    from queries and keys."""
    return Sharpen


class MeasureStep(TrainerCallback):
    """Callback that measures the peak of live bytes in one step, from its first micro-batch to the end of the
    optimizer's step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.peak_bytes = 0

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step + 1 == self.step:
            self.static_bytes = count_static_bytes(model, {}, optimizer)
            self.meter = CpuMemoryMeter()
            self.meter.__enter__()

    def on_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.meter.__exit__(None, None, None)
            self.peak_bytes = self.static_bytes + self.meter.peak_bytes


@pytest.fixture(scope="session")
def measure_step_peak():
    """Return `measure_step_peak(step)`, a callback with the `peak_bytes` of one step. Batches are not counted."""
    return MeasureStep


@pytest.fixture(scope="session")
def traces():
    """Return `traces(trainer)`, all state that a callback could leave on a model or a Trainer, for comparison."""

    def state_of(trainer: Trainer) -> dict[str, Any]:
        handler = trainer.callback_handler
        return {
            "modules": {name: _attributes(module) for name, module in trainer.model.named_modules()},
            "state": list(trainer.model.state_dict()),
            "tensors": {name: sorted(vars(tensor)) for name, tensor in _tensors(trainer.model)},
            "gradients": {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad},
            "use_cache": trainer.model.config.use_cache,
            "trainer": sorted(vars(trainer)),
            "handler": sorted(vars(handler)),
            "callbacks": [id(callback) for callback in handler.callbacks],
            "callback attributes": [sorted(vars(callback)) for callback in handler.callbacks],
        }

    return state_of


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of one module: hooks by number and function, other values of `__dict__` as text."""
    return {
        name: sorted(map(repr, value.items())) if name.endswith("_hooks") else repr(value)
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules", "config", "generation_config")
    }


@pytest.fixture
def heads_take(monkeypatch):
    """Return `heads_take(plain=..., chunked=...)`, which sets the times in milliseconds that a profile measures for the
    two heads."""

    def set_times(**ms: float) -> None:
        times = {compute: ms[name] for name, compute in measurement.PRICED_HEADS.items()}
        monkeypatch.setattr(measurement.Measurement, "head_ms", lambda _, loss, compute: times[compute])

    return set_times
