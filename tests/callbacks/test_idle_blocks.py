"""Training in which some blocks run without gradients: a teacher next to its student, and networks that train in
turn."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback

from adacc_hf import AdaccCallback
from adacc_hf.adapt import phases, policy_phases
from adacc_hf.artifacts.errors import UncalledBlocksError
from adacc_hf.artifacts.files import POLICY_FILE

PARTS = ("student", "teacher")
TEACHER = {f"teacher.transformer.h.{index}" for index in range(2)}


class Pair(torch.nn.Module):
    """Two models that learn from a text and from each other. `trained(step)` returns the names of those that train."""

    def __init__(self, model, trained):
        super().__init__()
        self.student, self.teacher = model, copy.deepcopy(model)
        self.trained, self.step = trained, 0

    def forward(self, input_ids, labels):
        outputs = {}
        for part in PARTS:
            with torch.set_grad_enabled(torch.is_grad_enabled() and part in self.trained(self.step)):
                outputs[part] = getattr(self, part)(input_ids, labels=labels)
        student, teacher = outputs.values()
        return {"loss": student.loss + teacher.loss + mse_loss(student.logits, teacher.logits)}


class SetStep(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.step = state.global_step + 1


@pytest.fixture
def assert_equal_to_plain(train, make_model, lossless):
    """Return `assert_equal_to_plain(trained, max_steps)`, which trains a `Pair` with and without the callback and
    returns the callback."""

    def compare(trained, max_steps, **settings):
        callback, runs, states = AdaccCallback(**{**lossless, **settings}), [], []
        for callbacks in ([], [callback]):
            runs.append(train([SetStep(), *callbacks], model=Pair(make_model(), trained), max_steps=max_steps))
            states.append(torch.get_rng_state())
        runs[1].assert_equals(runs[0])
        assert torch.equal(*states)
        assert not any(module._forward_pre_hooks for module in runs[1].trainer.model.modules())
        return callback

    return compare


def policy_steps(callback):
    return [event["step"] for event in callback.history if event["event"] == "policy"]


@pytest.mark.parametrize("budget", [0.5, "4MiB"])
def test_a_policy_is_made_at_once_for_the_blocks_that_train(assert_equal_to_plain, budget):
    callback = assert_equal_to_plain(lambda _: {"student"}, 6, memory_budget=budget)
    assert policy_steps(callback) == [1]
    assert callback.policy.idle_blocks == TEACHER
    assert not callback.policy.is_plain
    measured_events = [event for event in callback.history if "measured_peak_bytes" in event]
    assert measured_events
    assert all(event["measured_peak_bytes"] <= 1.01 * event["peak_bytes"] for event in measured_events)


def test_blocks_that_train_later_get_plans(assert_equal_to_plain, monkeypatch):
    monkeypatch.setattr(policy_phases, "LOOK_STEPS", 3)
    callback = assert_equal_to_plain(lambda step: PARTS if step > 6 else {"student"}, 12)
    assert policy_steps(callback) == [1, 8]
    assert not callback.policy.idle_blocks


def test_blocks_that_never_train_together_are_profiled_a_few_times(assert_equal_to_plain, monkeypatch):
    monkeypatch.setattr(policy_phases, "LOOK_STEPS", 3)
    monkeypatch.setattr(policy_phases, "MOST_RESTARTS", 2)
    callback = assert_equal_to_plain(lambda step: {PARTS[step % 2]}, 12)
    assert len(policy_steps(callback)) == 3
    assert len(callback.policy.idle_blocks) == len(TEACHER)


class Thaw(TrainerCallback):
    """Trains the blocks from step 4 on, which were frozen before."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.transformer.h.requires_grad_(state.global_step >= 3)


def test_parameters_that_train_later_are_profiled_at_once(train, lossless):
    callback = AdaccCallback(**lossless)
    train([Thaw(), callback]).assert_equals(train([Thaw()]))
    assert policy_steps(callback) == [1, 4]


class WithSpare(nn.Module):
    """A model next to blocks of its class, or of another class, which it calls in no step, or from step 9 on."""

    def __init__(self, model, kind, begins=99):
        super().__init__()
        self.model, self.kind, self.begins, self.step = model, kind, begins, 0
        other = {"other class": nn.TransformerEncoderLayer(64, 2, 64, batch_first=True)}
        self.spare = nn.ModuleList([other.get(kind, copy.deepcopy(model.transformer.h[0])), nn.Identity()])
        if kind == "other class":
            self.spare[0].__class__ = type("Spare", (nn.TransformerEncoderLayer,), {})
        self.spare = self.spare[:1]

    def forward(self, input_ids, labels):
        output = self.model(input_ids, labels=labels)
        extra = self.model.transformer.wte(input_ids)
        if self.kind == "other method":  # as in models that call the feed-forward part of a block alone
            extra = self.spare[0].mlp(extra)
        elif self.step >= self.begins:
            extra = self.spare[0](extra)
            extra = extra[0] if isinstance(extra, tuple) else extra
        return {"loss": output.loss + extra.square().mean()}


@pytest.mark.parametrize(
    ("kind", "begins"), [("other class", 99), ("other method", 99), ("same class", 7), ("from a file", 99)]
)
def test_blocks_that_are_never_called_are_left_out(
    train, make_model, lossless, monkeypatch, caplog, tmp_path, kind, begins
):
    monkeypatch.setattr(phases, "MOST_STEPS", 2)
    monkeypatch.setattr(policy_phases, "LOOK_STEPS", 2)
    settings = {"block_classes": ("Spare", "GPT2Block")}

    def run(*callbacks):
        return train([SetStep(), *callbacks], model=WithSpare(make_model(), kind, begins), max_steps=12)

    plain, callback = run(), AdaccCallback(**lossless, **settings)
    run(callback).assert_equals(plain)
    assert policy_steps(callback)[0] == 4
    assert callback.policy.idle_blocks == ({"spare.0"} if begins == 99 else set())
    assert "1 of 3 blocks, spare.0 first, were not called by the last of 2 steps" in caplog.text
    assert ("block_classes=('GPT2Block',)" in caplog.text) == (kind == "other class")
    if kind == "from a file":  # as the warning suggests
        caplog.clear()
        callback = AdaccCallback(policy=str(tmp_path / "run" / POLICY_FILE), **settings)
        run(callback).assert_equals(plain)
        assert policy_steps(callback) == [0]
        assert "not called" not in caplog.text


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden):
        return self.mix(hidden)

    def mix(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))


def without_gradients(hidden, blocks):
    with torch.no_grad():
        return nn.Sequential(*blocks)(hidden)


def in_backward(hidden, blocks):
    """As in reversible networks, whose backward calls the blocks again."""
    return checkpoint(nn.Sequential(*blocks), hidden, use_reentrant=True)


def by_method(hidden, blocks):
    for block in blocks:
        hidden = block.mix(hidden)
    return hidden


def by_parts(hidden, blocks):
    for block in blocks:
        hidden = hidden + block.down(block.up(hidden))
    return hidden


class Caller(nn.Module):
    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.call = nn.Embedding(97, 16), nn.Linear(16, 97), call
        self.layers = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, input_ids, labels):
        logits = self.head(self.call(self.embedding(input_ids), list(self.layers)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize(
    ("call", "cause", "cure"),
    [
        (without_gradients, "ran without gradients .*no_grad", "train without Adacc, or name the classes of other"),
        (in_backward, "ran without gradients .*a reversible network", "train without Adacc, or name the classes"),
        (by_method, "were not called .*another method of them", r"let the model call block\(\.\.\.\)"),
        (by_parts, "were not called .*or only their parts", "or name the classes of modules that the model does call"),
        (lambda hidden, blocks: hidden, "were not called", "name the classes of modules that the model does call"),
    ],
    ids=["no_grad", "in backward", "by method", "by parts", "never"],
)
def test_the_error_has_the_cause_if_no_block_trains(train, lossless, call, cause, cure):
    with pytest.raises((UncalledBlocksError, RuntimeError), match=f"3 of 3 blocks, layers.0 first, {cause}.*{cure}"):
        train([AdaccCallback(**lossless, block_classes=("Mlp",))], model=Caller(call), max_steps=4)
