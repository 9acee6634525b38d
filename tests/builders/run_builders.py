"""Runs of a Trainer with batches of chosen lengths, memory that runs out, or a loss that spikes."""

from typing import Any, ClassVar

import torch
from transformers import Trainer

from adacc_hf import AdaccCallback
from adacc_hf.adapt.run_profiler import RunProfiler
from adacc_hf.solve.simple_policies import uniform_policy


def events(callback: AdaccCallback, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind in the history of `callback`."""
    return [event for event in callback.history if event["event"] == kind]


class Lengths(torch.utils.data.Dataset):
    """Sequences of the requested lengths, `batch_size` of each for one batch."""

    def __init__(self, lengths, batch_size=4):
        generator = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(0, 97, (n,), generator=generator) for n in lengths for _ in range(batch_size)]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class InOrder(Trainer):
    """Trainer that draws the samples in their order."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def run_lengths(make_trainer, lengths, callbacks, trainer_class=InOrder, watch=None, **settings):
    """Train one step on a batch of each of `lengths`, and return the Trainer. `watch` is called with it before."""
    trainer = make_trainer(callbacks, trainer_class=trainer_class, max_steps=len(lengths), **settings)
    trainer.train_dataset = Lengths(lengths)
    if watch is not None:
        watch(trainer)
    trainer.train()
    return trainer


class OutOfMemory(Trainer):
    """Trainer that runs out of memory in forward or in the middle of backward, at the steps in `fails`."""

    fails: ClassVar[list[tuple[int, str]]] = []

    def compute_loss(self, model, inputs, *args, **kwargs):
        result = super().compute_loss(model, inputs, *args, **kwargs)
        for step, failure_place in list(self.fails):
            if step == self.state.global_step + 1:
                self.fails.remove((step, failure_place))
                if failure_place == "forward":
                    raise torch.OutOfMemoryError("no room in forward")
                self.fail_once_in_backward(model.transformer.h[0].ln_1.weight)
        return result

    def fail_once_in_backward(self, parameter):
        def fail(gradients):
            handle.remove()
            raise torch.OutOfMemoryError("no room in backward")

        # The hook belongs to the graph. With a hook on the parameter itself no retry would happen.
        handle = torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(fail)


def failing(*fails):
    """Return a Trainer class that runs out of memory at the given (step, "forward" or "backward")."""
    return type("Failing", (OutOfMemory,), {"fails": list(fails)})


def refuse_profiles_of(length, monkeypatch):
    """Let no batch with sequences of `length` be recorded."""
    original = RunProfiler.begin

    def begin(profiler, installation, optimizer, inputs, *args, **kwargs):
        if inputs["input_ids"].shape[1] != length:
            original(profiler, installation, optimizer, inputs, *args, **kwargs)

    monkeypatch.setattr(RunProfiler, "begin", begin)


class SpikeLoss(Trainer):
    """Trainer whose loss is ten times as large in step 9."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * (10.0 if self.state.global_step + 1 == 9 else 1.0)


def compress_first(profile, *_):
    """Solve as `solve_policy` does, but compress every activation."""
    return uniform_policy(profile, "compress")
