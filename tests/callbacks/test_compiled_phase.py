"""The phase of a run with torch_compile=True: its files, its fallback steps, and ways of compiling that are refused."""

import json

import pytest
import torch
from torch._inductor import config as inductor
from transformers import TrainerCallback

from adacc_hf import AdaccCallback, Policy
from adacc_hf.artifacts.errors import UncoveredBlockError
from adacc_hf.artifacts.files import COMPILED_FILE, HISTORY_FILE
from adacc_hf.compiler import CompiledPolicy

# Importing Inductor raises torch's own deprecation warnings. Tracing a loss after another graph does so, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


SETTINGS = {"memory_budget": 0.5, "actions": ("retain", "recompute")}


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert inductor.custom_partitioner_fn is None


def test_a_compiled_run_keeps_to_its_share_and_trains_as_plainly(make_model, train) -> None:
    plain = train(torch_compile=True, max_steps=3, model=make_model(n_layer=1))
    callback = AdaccCallback(**SETTINGS)
    run = train([callback], torch_compile=True, max_steps=3, model=make_model(n_layer=1))
    policy = callback.compiled_policy
    assert 0 < policy.stored_bytes <= 0.5 * policy.plain_bytes
    # Inductor fuses other operators together, so that sums may be computed in another order.
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    events = [event for event in callback.history if event["event"] == "policy"]
    assert sum(event["stored_bytes"] for event in events[-len(policy.call_plans) :]) == policy.stored_bytes
    assert run.logs[-1]["adacc/stored_gib"] == policy.stored_bytes / 2**30


@pytest.mark.usefixtures("eager_graphs")
def test_a_resumed_compiled_run_continues_with_the_policy_of_its_checkpoint(make_model, train, tmp_path) -> None:
    callback, settings = AdaccCallback(**SETTINGS), {"torch_compile": True, "max_steps": 3}
    train([callback], save_steps=2, save_strategy="steps", model=make_model(n_layer=1), **settings)
    policy, checkpoint = callback.compiled_policy, tmp_path / "run" / "checkpoint-2"
    for folder in (tmp_path / "run", checkpoint):
        assert CompiledPolicy.load(folder / COMPILED_FILE) == policy
        assert json.loads((folder / HISTORY_FILE).read_text()) == callback.history

    torch._dynamo.reset()
    resumed = AdaccCallback(**SETTINGS)
    train([resumed], resume=str(checkpoint), model=make_model(n_layer=1), **settings)
    num_events = len(callback.history)
    assert resumed.history[:num_events] == callback.history
    assert [(event["step"], event["event"]) for event in resumed.history[num_events:]] == [(3, "policy")] * 2
    assert {plan.digest: plan.stored for plan in resumed.compiled_policy.regions} == {
        plan.digest: plan.stored for plan in policy.call_plans
    }


class RunEagerly(TrainerCallback):
    """Callback that lets torch run the model without compiled graphs from the third step on."""

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == 2:
            torch.compiler.set_stance("force_eager")


@pytest.mark.usefixtures("eager_graphs")
def test_a_step_without_compiled_graphs_ends_a_run_that_must_be_covered(make_model, train, caplog) -> None:
    callback = AdaccCallback(**SETTINGS | {"memory_budget": 0.7, "on_uncovered": "error"})
    try:
        with pytest.raises(UncoveredBlockError, match=r"all blocks .* a forward without compiled graphs.*_limit"):
            train([callback, RunEagerly()], torch_compile=True, max_steps=4, model=make_model(n_layer=1))
    finally:
        torch.compiler.set_stance("default")
    assert callback.session.is_closed
    assert not any("on_uncovered" in text and "no effect" in text for text in caplog.messages)
    assert any(text.startswith("Adacc: memory_budget=0.7 with torch.compile: ") for text in caplog.messages)


@pytest.mark.usefixtures("eager_graphs")
def test_steps_without_compiled_graphs_are_reported(make_model, train, caplog) -> None:
    try:
        callbacks = [AdaccCallback(**{**SETTINGS, "memory_budget": 0.7}), RunEagerly()]
        run = train(callbacks, torch_compile=True, max_steps=4, model=make_model(n_layer=1))
    finally:
        torch.compiler.set_stance("default")
    assert caplog.text.count("Adacc: a forward ran without compiled graphs") == 1
    assert ["adacc/stored_gib" in log for log in run.logs[:4]] == [True, True, False, False]


def test_a_policy_for_the_executor_is_refused(make_trainer) -> None:
    policy = Policy(plans=(), blocks=(), predicted_stored_bytes=0, predicted_peak_bytes=0, predicted_overhead_ms=0.0)
    with pytest.raises(ValueError, match="policy=Policy belongs to runs without torch_compile"):
        make_trainer([AdaccCallback(policy=policy)], torch_compile=True).train()


def test_a_model_that_is_compiled_by_other_means_is_refused(make_model, make_trainer) -> None:
    model = make_model(n_layer=1)
    model.compile(backend="eager")
    with pytest.raises(RuntimeError, match="no compiled graph reached Adacc in the first step"):
        make_trainer([AdaccCallback(**SETTINGS)], torch_compile=True, model=model).train()
