"""Calls of the user's code with the callback: as many as in plain training, and in the same order.

A block that Dynamo cannot trace runs its Python once more in backward, under torch's checkpoint.
"""

import sys
from contextlib import nullcontext
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_builders import Tokens, tiny_model
from transformers import Trainer

from adacc_hf import AdaccCallback, AdaccSession

LENGTHS = (32, 32, 24, 32, 16, 24)
"""Lengths of the batches in turn, so that later steps have new sizes."""


class CountedTokens(Tokens):
    """Samples that note when they are read."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.calls.append(f"sample {index}")
        return super().__getitem__(index)


class CountedLoader(torch.utils.data.DataLoader):
    """Data loader that notes each batch it is asked for."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.dataset.calls.append("next batch")
            yield batch


class CountedTrainer(Trainer):
    """Trainer that notes its calls of the user's code in `calls`."""

    calls: list[str]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append("training_step")
        return super().training_step(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("compute_loss")
        return super().compute_loss(*args, **kwargs)


def collate_into(calls: list[str]) -> Any:
    """Return a collate function that notes its calls, and cuts batches to LENGTHS."""
    count = iter(range(1000))

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        calls.append("collate")
        length = LENGTHS[next(count) % len(LENGTHS)]
        return {name: torch.stack([sample[name][:length] for sample in samples]) for name in samples[0]}

    return collate


def counted_model(calls: list[str]) -> torch.nn.Module:
    """Return a model that notes its forwards, and the calls of hooks on it and on some of its modules."""
    model = tiny_model()
    forward = model.forward

    @wraps(forward)  # the Trainer reads the names of the arguments
    def counted_forward(*args: Any, **kwargs: Any) -> Any:
        calls.append("forward")
        return forward(*args, **kwargs)

    model.forward = counted_forward
    for name in ("", "transformer.wte", "transformer.h.0", "transformer.ln_f", "lm_head"):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(f"before {name}"))
        module.register_forward_hook(lambda *_, name=name: calls.append(f"after {name}"))
    return model


def calls_of(
    make_trainer: Any, callbacks: list[Any], resume: Any = None, in_backward: list[str] | None = None, **arguments: Any
) -> list[str]:
    """Train, and return the calls of the user's code in their order. If `in_backward` is given, blocks cannot be
    traced, and their calls in backward are added to it."""
    calls: list[str] = []
    model = counted_model(calls)
    if in_backward is not None:
        refuse_traces(model, calls, in_backward)
    trainer = make_trainer(callbacks, model=model, trainer_class=CountedTrainer, **arguments)
    trainer.calls, trainer.data_collator = calls, collate_into(calls)
    trainer.train_dataset = CountedTokens(calls)
    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(lambda *_: calls.append("optimizer.step"))
    trainer.train(resume_from_checkpoint=resume)
    return calls


def refuse_traces(model: torch.nn.Module, calls: list[str], in_backward: list[str]) -> None:
    """Let the blocks of `model` note their calls, by hooks at which Dynamo stops."""

    def note(*_: Any) -> None:
        torch._dynamo.graph_break()
        (calls if torch._C._current_autograd_node() is None else in_backward).append("block")

    for block in model.transformer.h:
        block.mlp.register_forward_pre_hook(note)


@pytest.mark.parametrize("budget", [0.6, "3MiB"])
def test_a_block_that_cannot_be_traced_runs_once_more_in_backward_at_most(make_trainer, budget):
    plain = calls_of(make_trainer, [], in_backward=(none := []), max_steps=4)
    callback = AdaccCallback(memory_budget=budget, exact=True)
    assert calls_of(make_trainer, [callback], in_backward=(again := []), max_steps=4) == plain
    assert callback.policy is not None
    num_blocks = plain.count("block") // 4
    assert not none
    assert num_blocks <= len(again) <= 4 * num_blocks


@pytest.mark.parametrize("budget", [0.6, "3MiB"])
@pytest.mark.parametrize("num_micro", [1, 2])
def test_the_users_code_is_called_as_in_plain_training(make_trainer, budget, num_micro):
    settings = {"max_steps": 4, "gradient_accumulation_steps": num_micro}
    plain = calls_of(make_trainer, [], **settings)
    callback = AdaccCallback(memory_budget=budget, exact=True)
    assert calls_of(make_trainer, [callback], **settings) == plain
    assert callback.policy is not None
    names = ("training_step", "compute_loss", "forward", "before lm_head", "after transformer.wte", "optimizer.step")
    assert [plain.count(name) for name in names] == [4 * num_micro] * 5 + [4]


def test_a_resumed_run_calls_the_users_code_as_in_plain_training(make_trainer, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    runs = []
    for callbacks in ([], [AdaccCallback(memory_budget=0.6, exact=True)]):
        first = calls_of(make_trainer, callbacks, max_steps=2, **settings)
        checkpoint = str(tmp_path / "run" / "checkpoint-2")
        again = [AdaccCallback(memory_budget=0.6, exact=True) for _ in callbacks]
        runs.append((first, calls_of(make_trainer, again, resume=checkpoint, max_steps=4, **settings)))
    assert runs[0] == runs[1]
    assert runs[0][1].count("optimizer.step") == 2


def calls_of_own_loop(budget: float | None) -> list[str]:
    calls: list[str] = []
    model = counted_model(calls)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("optimizer.step"))
    session = None if budget is None else AdaccSession(model, optimizer, memory_budget=budget, exact=True)
    for batch in islice(CountedLoader(CountedTokens(calls), batch_size=4, collate_fn=collate_into(calls)), 4):
        with nullcontext() if session is None else session.step(batch):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if session is not None:
        assert session.policy is not None
        session.close()
    return calls


def test_a_session_calls_the_users_code_as_its_loop_does():
    assert calls_of_own_loop(0.6) == calls_of_own_loop(None)


def test_tracking_and_the_guard_call_nothing_of_the_users(make_trainer):
    """Gradients under codecs are compared with exact ones in each step, and codecs that degrade them are searched."""
    settings = {"max_steps": 5, "learning_rate": 0.0}
    plain = calls_of(make_trainer, [], **settings)
    lossy = {"actions": ("retain", "compress"), "min_compress_bytes": 0, "memory_budget": 0.5, "tracking": 1}
    callback = AdaccCallback(**lossy, head="plain")
    assert calls_of(make_trainer, [callback], **settings) == plain
    assert sum(event["event"] == "tracking" for event in callback.history) >= 3


def run_rank(folder: Path) -> None:
    import trainer_builders as toys

    def make_trainer(callbacks: list[Any], **settings: Any) -> Any:
        return toys.tiny_trainer(folder / f"run{len(callbacks)}", callbacks, **settings)

    settings = {"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    runs = [calls_of(make_trainer, callbacks, **settings) for callbacks in ([], [AdaccCallback(**toys.LOSSLESS)])]
    toys.write_rank_results(folder, runs)


@pytest.mark.gate
def test_each_rank_calls_the_users_code_as_in_plain_training(run_two_ranks):
    for plain, adacc in run_two_ranks(__file__):
        assert plain == adacc
        assert plain.count("optimizer.step") == 5
        assert plain.count("forward") == 10


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
