"""After train() the model and its Trainer are in the state that plain training leaves, also if the run fails."""

import re
from queue import SimpleQueue

import pytest
from transformers import Trainer, TrainerCallback

from adacc_hf import AdaccCallback, InfeasibleBudgetError
from adacc_hf.callbacks import ThroughputCallback


class PlannedError(Exception):
    """Error that a test raises on purpose."""


def raise_at_call(number: int, error: BaseException, is_lasting: bool = False):
    """Return a function that raises at its `number`-th call, and at all later calls if `is_lasting`. A profile's calls
    count, because no profile restores a queue."""
    calls = SimpleQueue()

    def function(*args, **kwargs):
        calls.put(None)
        if calls.qsize() == number or (is_lasting and calls.qsize() > number):
            raise error

    return function


def fail_in_forward(trainer: Trainer, number: int) -> None:
    forward = trainer.model.transformer.h[1].mlp.forward
    # An error that only a forward of the profile raises does not end the run.
    fail = raise_at_call(number, PlannedError("forward"), is_lasting=True)

    def failing(hidden):
        fail()
        return forward(hidden)

    trainer.model.transformer.h[1].mlp.forward = failing


def fail_in_backward(trainer: Trainer, number: int) -> None:
    fail = raise_at_call(number, PlannedError("backward"))
    trainer.model.transformer.h[0].attn.c_attn.weight.register_hook(lambda gradient: fail())


def fail_in_data_loader(trainer: Trainer, number: int) -> None:
    fail = raise_at_call(number, PlannedError("data"))
    collate = trainer.data_collator

    def collating(samples):
        fail()
        return collate(samples)

    trainer.data_collator = collating


def interrupt_in_optimizer(trainer: Trainer, number: int) -> None:
    trainer.add_callback(Failing("on_optimizer_step", number, KeyboardInterrupt()))


FAILURES = {
    "forward": fail_in_forward,
    "backward": fail_in_backward,
    "data": fail_in_data_loader,
    "interrupt": interrupt_in_optimizer,
}


class Failing(TrainerCallback):
    """Callback that raises at the `number`-th call of `event`."""

    def __init__(self, event: str, number: int = 1, error: BaseException | None = None) -> None:
        setattr(self, event, raise_at_call(number, error or PlannedError(event)))


@pytest.fixture
def callbacks(lossless):
    return [AdaccCallback(**lossless), ThroughputCallback(warmup_steps=1)]


def assert_same_traces(state, expected) -> None:
    """Assert that two Trainers, with a model each, are in the same state."""
    for name in ("state", "tensors", "gradients", "use_cache", "trainer", "handler"):
        assert state[name] == expected[name], name
    for name, attributes in expected["modules"].items():
        assert _without_addresses(state["modules"][name]) == _without_addresses(attributes), name


def _without_addresses(attributes: dict[str, str]) -> dict[str, str]:
    """Return the attributes without the addresses of objects and the numbers of hooks, which differ between two
    models."""
    return {name: re.sub(r"0x[0-9a-f]+|\(\d+, ", "", str(value)) for name, value in attributes.items()}


def failed_traces(trainer, traces):
    with pytest.raises((PlannedError, KeyboardInterrupt)):
        trainer.train()
    return traces(trainer)


def test_a_finished_run_leaves_no_trace(make_trainer, traces, callbacks):
    trainer, plain = make_trainer(callbacks), make_trainer(callbacks)
    for callback in callbacks:
        plain.remove_callback(callback)
    plain.train()
    trainer.train()
    for callback in callbacks:
        trainer.remove_callback(callback)
    assert_same_traces(traces(trainer), traces(plain))


@pytest.mark.parametrize("step", [1, 2, 4], ids=["first-step", "before-policy", "under-policy"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_run_leaves_no_trace(make_trainer, traces, callbacks, failure, step):
    # Two equal Trainers fail in the same way. The one without our callbacks defines the expected state.
    trainer, plain = make_trainer(callbacks), make_trainer()
    for trainer_or_plain in (trainer, plain):
        FAILURES[failure](trainer_or_plain, step)
    state = failed_traces(trainer, traces)
    expected = failed_traces(plain, traces)
    assert_same_traces(state, expected)


EVENTS = (
    "on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_step_end", "on_log", "on_evaluate",
    "on_prediction_step", "on_save", "on_epoch_end", "on_train_end",
)  # fmt: skip


@pytest.mark.parametrize(
    ("event", "place"), [(event, ("before", "after")[index % 2]) for index, event in enumerate(EVENTS)]
)
def test_another_callback_that_fails_leaves_no_trace(make_trainer, traces, callbacks, event, place):
    settings = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 3, "save_steps": 3, "max_steps": 4}
    order = (
        (lambda own_callbacks: [Failing(event), *own_callbacks])
        if place == "before"
        else (lambda own_callbacks: [*own_callbacks, Failing(event)])
    )
    trainer = make_trainer(order(callbacks), gradient_accumulation_steps=2, **settings)
    plain = make_trainer(order([]), gradient_accumulation_steps=2, **settings)
    state_before = traces(trainer)
    state = failed_traces(trainer, traces)
    assert_same_traces(state, failed_traces(plain, traces))
    for name in ("callbacks", "callback attributes"):
        assert state[name] == state_before[name], name


def test_training_goes_on_after_a_failure(make_trainer, make_model, callbacks, lossless, train):
    model = make_model()
    trainer = make_trainer(callbacks, model=model)
    trainer.add_callback(Failing("on_step_end", 4))
    with pytest.raises(PlannedError):
        trainer.train()
    assert len(trainer.callback_handler.callbacks) == len(set(trainer.callback_handler.callbacks))
    model.load_state_dict(make_model().state_dict())
    train(callbacks, model=model).assert_equals(train())


class OutOfMemoryOnce(Trainer):
    """Trainer that runs out of memory in the 4th step of its first attempt."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fail = raise_at_call(4, RuntimeError("CUDA out of memory."))

    def training_step(self, *args, **kwargs):
        self.fail()
        return super().training_step(*args, **kwargs)


def test_auto_find_batch_size_starts_over(make_trainer, make_model, traces, lossless, callbacks):
    class CountBegins(TrainerCallback):
        begins = 0

        def on_train_begin(self, args, state, control, **kwargs):
            self.begins += 1

    count = CountBegins()
    trainer = make_trainer([*callbacks, count], trainer_class=OutOfMemoryOnce, auto_find_batch_size=True)
    trainer.train()
    assert count.begins == 2
    assert callbacks[0].policy is not None
    assert [event["step"] for event in callbacks[0].history if event["event"] == "policy"] == [1]
    assert not trainer.model._forward_pre_hooks
    assert not {"_run_epoch", "_adacc_guard"} & vars(trainer).keys()


def test_an_infeasible_budget_is_raised_from_train_and_leaves_the_model_clean(make_trainer, traces):
    trainer, plain = make_trainer([AdaccCallback(memory_budget=0.01)]), make_trainer(max_steps=2)
    with pytest.raises(
        InfeasibleBudgetError, match=r"memory_budget=0\.01 .* the least possible is \d+ bytes"
    ) as error_info:
        trainer.train()
    plain.train()
    assert f"least possible is {error_info.value.smallest_budget_bytes} bytes" in str(error_info.value)
    assert_same_traces(traces(trainer), traces(plain))


def test_training_that_goes_on_without_the_callback_is_warned_of_once(make_trainer, lossless, caplog):
    callback = AdaccCallback(**lossless)

    class DetachAfterStep2(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                callback.detach()

    make_trainer([callback, DetachAfterStep2()], max_steps=5).train()
    warnings = [message for message in caplog.messages if "training continues at step 2" in message]
    assert len(warnings) == 1
    assert "trains without a policy" in warnings[0]
