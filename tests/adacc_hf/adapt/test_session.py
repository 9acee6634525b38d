"""AdaccSession in a user's own loop: bit-equal to plain training, within the budget, and removed without traces."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.optim import optimizer as optimizers
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from adacc_hf import AdaccConfig, AdaccSession, remove_policy
from adacc_hf.adapt import session as session_module
from adacc_hf.adapt.policy_phases import OTHER_ORDER, AdaptivePhase
from adacc_hf.adapt.run_state import STATE_STEPS
from adacc_hf.price.live_step import OTHER_BACKWARD
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import least_policy
from adacc_hf.torch_glue.compat import CHECKPOINTING

LOSSLESS = {"actions": ("retain", "recompute"), "head": "plain"}
HALF = {"memory_budget": 0.5, **LOSSLESS}


def make_model(layers=3, dropout=0.1):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": layers, "n_head": 4, "use_cache": False}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops)).train()


def batch_of(seed, samples=8, tokens=16):
    ids = torch.randint(0, 61, (samples, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


BATCHES = [batch_of(seed) for seed in range(12)]


class NoSession:
    """A stand-in for a session in plain training."""

    def __init__(self, model, optimizer, **settings):
        self.state = SimpleNamespace(num_steps=0)

    def step(self, batch=None):
        return self

    micro_batch = step

    def run(self, fn, batch):
        return fn(batch)

    def close(self): ...

    def __enter__(self): ...

    def __exit__(self, *exception): ...


class Run:
    """The results of a loop: losses, final weights, session and model."""

    def __init__(self, model, losses, session):
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]
        self.losses, self.session, self.model = losses, session, model

    def assert_equals(self, other):
        assert self.losses == other.losses
        assert all(map(torch.equal, self.weights, other.weights))


def update(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def begin(**settings):
    """Return a model, an optimizer of its parameters, and their session."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, AdaccSession(model, optimizer, **settings)


def stepping(loss_of):
    """Return a loop that takes a step on `loss_of(model, batch)`."""

    def loop(session, model, optimizer, batch, losses):
        with session.step(batch):
            loss = loss_of(model, batch)
            update(loss, optimizer)
        losses.append(loss.item())

    return loop


def loss_under_autocast(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(**batch).loss


one_step, under_autocast = stepping(lambda model, batch: model(**batch).loss), stepping(loss_under_autocast)


def train_on(session, model, optimizer, batches, losses=None):
    for batch in batches:
        one_step(session, model, optimizer, batch, [] if losses is None else losses)


def by_run(session, model, optimizer, batch, losses):
    def step(batch):
        loss = model(**batch).loss
        update(loss, optimizer)
        losses.append(loss.item())

    session.run(step, batch)


def halves(batch):
    return [{name: values[half::2] for name, values in batch.items()} for half in range(2)]


def two_micro_batches(session, model, optimizer, batch, losses):
    with session.step():
        for part in halves(batch):
            with session.micro_batch(part):
                loss = model(**part).loss
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()


def accumulating(session, model, optimizer, batch, losses, is_step_inside=True):
    """The optimizer steps within the last micro-batch, as with Accelerate's `accumulate`."""
    for half, part in enumerate(halves(batch)):
        with session.micro_batch(part):
            loss = model(**part).loss
            loss.backward()
            if half == 1 and is_step_inside:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())


def stepping_after(session, model, optimizer, batch, losses):
    """The optimizer steps after the last micro-batch, outside of any context."""
    accumulating(session, model, optimizer, batch, losses, is_step_inside=False)
    optimizer.step()
    optimizer.zero_grad()


def evaluating(session, model, optimizer, batch, losses):
    one_step(session, model, optimizer, batch, losses)
    model.eval()
    with torch.no_grad():
        losses.append(model(**batch_of(99)).loss.item())
    model.train()


def train(step, batches=BATCHES, session_class=AdaccSession, make=make_model, **settings):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses = []
    session = session_class(model, optimizer, **settings)
    for batch in batches:
        step(session, model, optimizer, batch, losses)
    session.close()
    return Run(model, losses, session)


def train_as_plain(step, batches=BATCHES, make=make_model, **settings):
    """Return the run with a session, whose results equal those of plain training."""
    run = train(step, batches, make=make, **settings)
    run.assert_equals(train(step, batches, NoSession, make))
    return run


@stepping
def from_embeddings(model, batch):
    """The graph of the embeddings, which the loop has computed, stays for the loop's backward."""
    embeddings = model.transformer.wte(batch["input_ids"]).sin()
    return model(inputs_embeds=embeddings, labels=batch["labels"]).loss


@stepping
def with_own_loss(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@stepping
def twice(model, batch):
    return model(**batch).loss - 0.1 * model(input_ids=batch["input_ids"].flip(0), labels=batch["labels"]).loss


def alternating(session, model, optimizer, batch, losses):
    """Every second step runs under autocast, the one after the profile included."""
    (under_autocast if len(losses) % 2 else one_step)(session, model, optimizer, batch, losses)


def by_closure(session, model, optimizer, batch, losses):
    def closure():
        loss = model(**batch).loss
        loss.backward()
        return loss

    with session.step(batch):
        losses.append(optimizer.step(closure).item())
        optimizer.zero_grad(set_to_none=False)


IN_MICRO_BATCHES = (two_micro_batches, accumulating, stepping_after)
LOOPS = {step.__name__: step for step in (by_run, *IN_MICRO_BATCHES, evaluating, alternating, by_closure)} | {
    "under_autocast": under_autocast,
    "from_embeddings": from_embeddings,
    "with_own_loss": with_own_loss,
    "twice": twice,
}


@pytest.mark.gate
@pytest.mark.parametrize("step", LOOPS.values(), ids=LOOPS)
def test_training_is_plain_training(step):
    run = train_as_plain(step, BATCHES[:6], **HALF)
    assert run.session.num_steps == 6
    assert run.session.policy.action_counts()["recompute"] > 0
    assert run.session.history[0]["event"] == "policy"
    assert run.session.state.loop.num_micro == (2 if step in IN_MICRO_BATCHES else 1)


@stepping
def around_a_transform(model, batch):
    """The loop differentiates the model by torch.func, which refuses saved-tensor hooks, before and after it trains."""

    def gradient_of(inputs):
        return torch.func.grad(lambda hidden: model(inputs_embeds=hidden, labels=batch["labels"]).loss)(inputs)

    embeddings = model.transformer.wte(batch["input_ids"]).detach()
    inputs = embeddings + 0.1 * gradient_of(embeddings).sign()
    loss = model(inputs_embeds=inputs, labels=batch["labels"]).loss
    return loss + gradient_of(inputs).square().sum()


def test_a_model_inside_a_transform_is_no_forward_of_the_run():
    run = train_as_plain(around_a_transform, BATCHES[:3], **LOSSLESS, memory_budget=0.9)
    assert run.session.num_steps == 3
    assert run.session.policy is not None


def test_gradients_that_the_loop_keeps_count():
    run = train_as_plain(by_closure, BATCHES[:3], memory_budget="1GiB", **LOSSLESS)
    known = [*run.model.parameters(), BATCHES[0]["input_ids"]]
    assert run.session.state.corrections.static_bytes == sum(tensor.nbytes for tensor in known)


def test_it_leaves_no_trace():
    model = make_model()
    before = [(module, dict(module.__dict__), len(module._forward_pre_hooks)) for module in model.modules()]
    optimizer = torch.optim.AdamW(model.parameters())
    with AdaccSession(model, optimizer, **HALF) as session:
        train_on(session, model, optimizer, BATCHES)
    for module, attributes, num_hooks in before:
        assert module.__dict__.keys() == attributes.keys()
        assert len(module._forward_pre_hooks) == num_hooks
        assert not module._forward_hooks
    with pytest.raises(RuntimeError, match="closed: make a new AdaccSession"), session.step(BATCHES[0]):
        pass


def test_an_error_within_leaves_no_trace_either():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(KeyError), AdaccSession(model, optimizer, **HALF) as session, session.step(BATCHES[0]):
        raise KeyError
    assert not model._forward_pre_hooks
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_step_that_was_broken_off_may_be_left_out():
    """After an exception in a step, the loop continues with the next batch, as in plain training."""

    def step(session, model, optimizer, batch, losses):
        try:
            with session.step(batch):
                loss = model(**batch).loss
                if len(losses) in (0, 4, 9):
                    raise ValueError
                loss.backward()
                optimizer.step()
        except ValueError:
            pass
        optimizer.zero_grad()
        losses.append(loss.item())

    run = train_as_plain(step, **HALF)
    assert run.session.num_steps == len(BATCHES) - 3


class UserError(Exception):
    """Exception type that only the user's code knows."""


def test_a_model_that_raises_an_error_on_the_first_batch():
    """The training forward raises the error, after it has drawn random numbers as in plain training."""

    def step(session, model, optimizer, batch, losses):
        def fail(*args):
            raise UserError("not this batch")

        hook = model.transformer.h[1].register_forward_hook(fail) if batch is BATCHES[0] else None
        try:
            with session.step(batch):
                loss = model(**batch).loss
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        except UserError:
            losses.append(torch.get_rng_state().sum().item())
        if hook is not None:
            hook.remove()

    run = train_as_plain(step, **HALF)
    assert [event["step"] for event in run.session.history if event["event"] == "policy"] == [1]


@pytest.fixture
def budget():
    """The midpoint of a step's least peak and plain training's peak, for batches of 16 x 32 tokens."""
    model, optimizer, wide = begin(memory_budget="1GiB", **LOSSLESS)
    train_on(wide, model, optimizer, [batch_of(seed, 16, 32) for seed in range(8)])
    profile = wide.profile
    wide.close()
    least, plain = least_policy(profile, AdaccConfig(**LOSSLESS)), uniform_policy(profile, "retain")
    return (least.predicted_peak_bytes + plain.predicted_peak_bytes) // 2


def test_batches_of_larger_sizes_keep_to_the_budget(budget):
    sizes = [(8, 16)] * 6 + [(16, 32)] * 10
    batches = [batch_of(seed, *size) for seed, size in enumerate(sizes)]
    run = train_as_plain(one_step, batches, memory_budget=budget, **LOSSLESS)
    measured_peaks = [event["measured_peak_bytes"] for event in run.session.history if "measured_peak_bytes" in event]
    assert measured_peaks
    assert max(measured_peaks) <= budget
    planned_peaks = [event["peak_bytes"] for event in run.session.history if event["event"] in ("policy", "change")]
    assert max(planned_peaks) <= budget
    assert run.session.policy.action_counts()["recompute"] > 0


def test_a_step_that_has_begun_to_change_weights_is_not_tried_again():
    def step(session, model, optimizer, batch, losses):
        def fn(batch):
            update(model(**batch).loss, optimizer)
            if session.num_steps == 6:
                raise torch.OutOfMemoryError("CUDA out of memory")

        session.run(fn, batch)

    with pytest.raises(torch.OutOfMemoryError, match="not tried again: the optimizer has begun to change the weights"):
        train(step, **HALF)


def test_within_a_context_it_says_what_could_be_tried_again(caplog):
    session = begin(**HALF)[2]
    with caplog.at_level(logging.ERROR), pytest.raises(torch.OutOfMemoryError), session.step(BATCHES[0]):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "session.run(step, batch)" in caplog.text
    session.close()


def test_a_saved_session_goes_on(tmp_path):
    """A resumed session equals the uninterrupted one. Its first step is recorded."""
    uninterrupted = train(one_step, **HALF)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses = []
    session = AdaccSession(model, optimizer, **HALF)
    train_on(session, model, optimizer, BATCHES[:7], losses)
    session.save(tmp_path)
    session.close()
    session = AdaccSession(model, optimizer, **HALF)
    assert session.load(tmp_path)
    assert session.num_steps == 7
    train_on(session, model, optimizer, BATCHES[7:], losses)
    with pytest.raises(RuntimeError, match="after the first step"):
        session.load(tmp_path)
    session.close()
    assert session.num_steps == len(BATCHES)
    Run(model, losses, session).assert_equals(uninterrupted)
    assert [event["step"] for event in session.history if event["event"] == "policy"][-1] == 8


@pytest.mark.parametrize(("budget", "is_function"), [(0.3, False), ("100KiB", True)], ids=["given", "by a function"])
def test_a_policy_above_the_budget_beside_it_is_refused(budget, is_function):
    policy = train(one_step, **HALF).session.policy
    policy_or_function = (lambda profile: policy) if is_function else policy
    with pytest.raises(ValueError, match=r"memory_budget=.* allows .*, and the policy that was passed with it"):
        train(one_step, policy=policy_or_function, **(LOSSLESS | {"memory_budget": budget}))
    train(one_step, policy=policy_or_function, **(LOSSLESS | {"memory_budget": 0.6}))
    train(one_step, policy=policy_or_function, **(LOSSLESS | {"memory_budget": policy.predicted_peak_bytes}))


def test_a_model_under_checkpointing_is_told_that_a_policy_replaces_it(caplog):
    model = make_model()
    getattr(model, f"{CHECKPOINTING}_enable")()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with AdaccSession(model, optimizer, **HALF) as session:
        train_on(session, model, optimizer, BATCHES[:1])
    assert caplog.text.count("checkpointing is on in the model: a policy replaces") == 1
    assert getattr(model, f"is_{CHECKPOINTING}"), "closing the session restores the model"


def test_a_session_shows_its_settings_and_its_policy():
    model, optimizer, session = begin(memory_budget=0.5)
    assert repr(session) == "<AdaccSession on GPT2LMHeadModel, AdaccConfig(memory_budget=0.5): no policy yet>"
    train_on(session, model, optimizer, BATCHES[:1])
    session.close()
    assert repr(session).startswith("<AdaccSession on GPT2LMHeadModel (closed), AdaccConfig(memory_budget=0.5): 3 bl")


def test_figures_are_those_of_the_callback(tmp_path):
    model, optimizer, session = begin(folder=tmp_path, **HALF)
    with session:
        assert session.metrics() == {}
        train_on(session, model, optimizer, BATCHES)
        metrics = session.metrics({"loss": 3.0, "grad_norm": 1.0})
    assert {"adacc/stored_gib", "adacc/peak_gib", "adacc/overhead_ms", "adacc/fallback_steps"} <= metrics.keys()
    assert {path.name for path in tmp_path.iterdir()} >= {"adacc_policy.json", "adacc_profile.json"}


def test_other_optimizers_steps_are_not_the_runs():
    def step(session, model, optimizer, batch, losses):
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        for half, part in enumerate(halves(batch)):
            with session.micro_batch(part):
                loss = model(**part).loss
                loss.backward()
                other.step()
                if half:
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())

    run = train_as_plain(step, **HALF)
    assert run.session.num_steps == len(BATCHES)


def test_steps_do_not_nest():
    session = begin(**HALF)[2]
    for outer, inner in ((session.step, session.step), (session.micro_batch,) * 2, (session.micro_batch, session.step)):
        with pytest.raises(RuntimeError, match="within another one"), outer(BATCHES[0]), inner(BATCHES[0]):
            pass
    session.close()


def skipping(session, model, optimizer, batch, losses):
    """Skip every third batch within the context, the first one included."""
    with session.step(batch):
        if len(losses) % 3:
            update(model(**batch).loss, optimizer)
    losses.append(0.0)


def in_eval_mode(session, model, optimizer, batch, losses):
    model.train(len(losses) % 4 > 0)
    one_step(session, model, optimizer, batch, losses)
    model.train()


@pytest.mark.parametrize(("step", "why"), [(skipping, "very model"), (in_eval_mode, "eval mode")])
def test_a_step_that_trains_nothing_is_not_counted(step, why, caplog):
    with caplog.at_level(logging.WARNING):
        run = train_as_plain(step, **HALF)
    assert run.session.num_steps == {skipping: 8, in_eval_mode: 9}[step]
    assert caplog.text.count("a step without a forward") == 1
    assert why in caplog.text


def warnings_of(caplog):
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in messages if message.startswith("Adacc")]


def backward_after_step_with_gradients_of_zero(session, model, optimizer, batch, losses):
    with session.step(batch):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    losses.append(loss.item())


def one_backward_for_micro_batches(session, model, optimizer, batch, losses):
    with session.step():
        parts = []
        for part in halves(batch):
            with session.micro_batch(part):
                parts.append(model(**part).loss)
        update(sum(parts), optimizer)
    losses += [loss.item() for loss in parts]


def backward_after_run(session, model, optimizer, batch, losses):
    loss = session.run(lambda batch: model(**batch).loss, batch)
    update(loss, optimizer)
    losses.append(loss.item())


OUTSIDE_LOOPS = (backward_after_step_with_gradients_of_zero, one_backward_for_micro_batches, backward_after_run)


@pytest.mark.parametrize("step", OUTSIDE_LOOPS, ids=lambda step: step.__name__)
def test_a_backward_outside_of_the_step_is_warned_about_once(step, caplog):
    run = train_as_plain(step, BATCHES[:4], **HALF)
    assert run.session.num_steps == 4
    (warning,) = warnings_of(caplog)
    assert "backward runs outside of its context" in warning
    assert "call loss.backward() and optimizer.step() within session.step(batch)" in warning


def stepping_outside(session, model, optimizer, batch, losses):
    with session.step(batch):
        loss = model(**batch).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())


def never_stepping_after_micro_batches(session, model, optimizer, batch, losses):
    with session.micro_batch(batch):
        loss = model(**batch).loss
        loss.backward()
    losses.append(loss.item())


def stepping_a_new_optimizer(session, model, optimizer, batch, losses):
    new = torch.optim.AdamW(model.parameters(), lr=1e-3)
    one_step(session, model, new, batch, losses)


UNSTEPPED_LOOPS = (stepping_outside, never_stepping_after_micro_batches, stepping_a_new_optimizer)


@pytest.mark.parametrize("step", UNSTEPPED_LOOPS, ids=lambda step: step.__name__)
def test_an_optimizer_that_is_not_seen_is_asked_for(step, caplog, monkeypatch):
    """Without a visible optimizer, the session warns once, counts the step and its memory, and follows the budget."""
    monkeypatch.setattr(session_module, "MOST_UNSEEN", 4)
    run = train_as_plain(step, BATCHES[:6], memory_budget="1GiB", **LOSSLESS)
    (warning,) = warnings_of(caplog)
    assert "without a step of the optimizer that AdaccSession was given: call optimizer.step() within" in warning
    assert warning.startswith("Adacc: 4 micro-batches")
    if step is not never_stepping_after_micro_batches:
        assert run.session.num_steps == 6
        assert any("measured_peak_bytes" in event for event in run.session.history)


def updating_both(loss, own, given):
    """Update with two optimizers, such as those of a generator and of a discriminator."""
    loss.backward()
    for parameter in (parameter for group in given.param_groups for parameter in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    given.step()
    own.step()
    own.zero_grad()


OTHER_MODELS_UPDATES = {
    "given steps": lambda loss, own, given: update(loss, given),
    "both step": updating_both,
    "a part steps": lambda loss, own, given: update(loss, torch.optim.SGD(own.param_groups[0]["params"][:2], lr=0.1)),
}


@pytest.mark.parametrize("updating", OTHER_MODELS_UPDATES.values(), ids=OTHER_MODELS_UPDATES)
def test_an_optimizer_of_another_model_is_warned_about_once(updating, caplog):
    results = []
    for session_class in (AdaccSession, NoSession):
        model = make_model()
        own, given = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, copy.deepcopy(model)))
        torch.manual_seed(1)
        losses, session = [], session_class(model, given, **HALF)
        for batch in BATCHES[:4]:
            with session.step(batch):
                loss = model(**batch).loss
                updating(loss, own, given)
            losses.append(loss.item())
        session.close()
        results.append(Run(model, losses, session))
    results[0].assert_equals(results[1])
    (warning,) = warnings_of(caplog)
    assert "was given updates no parameter of the model" in warning
    assert "with the optimizer of this model's parameters" in warning


def with_second(make_second, is_first=False, begins=0):
    """Return a loop in which a second optimizer updates the embeddings, and the list of its two optimizers."""
    pair = []

    def step(session, model, optimizer, batch, losses):
        if not losses:
            pair[:] = optimizer, make_second([model.transformer.wte.weight, model.transformer.wpe.weight])
        with session.step(batch):
            loss = model(**batch).loss
            loss.backward()
            stepping = pair if len(losses) >= begins else pair[:1]
            for each in reversed(stepping) if is_first else stepping:
                each.step()
            model.zero_grad()
        losses.append(loss.item())

    return step, pair


SECOND_OPTIMIZERS = {
    "AdamW, steps first": with_second(torch.optim.AdamW, is_first=True),
    "steps from step 4 on": with_second(torch.optim.AdamW, begins=3),
    "no state": with_second(lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
}


@pytest.mark.parametrize("case", SECOND_OPTIMIZERS)
def test_the_state_of_all_optimizers_counts(case, monkeypatch):
    step, pair = SECOND_OPTIMIZERS[case]
    counted, hooks = [], optimizers._global_optimizer_pre_hooks.copy()
    monkeypatch.setattr(AdaptivePhase, "add_static", lambda self, nbytes, *_, **options: counted.append(nbytes))
    run = train_as_plain(step, BATCHES[:6], memory_budget="1GiB", **LOSSLESS)
    assert optimizers._global_optimizer_pre_hooks == hooks
    first, second = (
        sum(value.nbytes for values in optimizer.state.values() for value in values.values() if value is not None)
        for optimizer in pair
    )
    assert counted == ([second] if "from step 4" in case else [])
    known = [*run.model.parameters(), BATCHES[0]["input_ids"]]
    in_profile = run.session.profile.static_bytes - sum(tensor.nbytes for tensor in known)
    assert in_profile == (first if counted else first + second)
    assert (second == 0) == (case == "no state")


def test_a_model_has_one_session(caplog):
    """A second session on the model replaces the first, as when a notebook cell runs again."""
    plain = train(one_step, session_class=NoSession)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses = []
    before = dict(vars(model))
    first = AdaccSession(model, optimizer, **HALF)
    train_on(first, model, optimizer, BATCHES[:4], losses)
    second = AdaccSession(model, optimizer, **HALF)
    train_on(second, model, optimizer, BATCHES[4:8], losses)
    assert "policy or session is removed" in caplog.text
    first.close()
    functions = [module for module in model.modules() if "forward" in vars(module)]
    assert functions, "the end of the first one ended the second"
    train_on(second, model, optimizer, BATCHES[8:], losses)
    Run(model, losses, second).assert_equals(plain)
    with pytest.raises(RuntimeError, match="closed"):
        one_step(first, model, optimizer, BATCHES[0], losses)
    assert remove_policy(model)
    assert vars(model) == before
    assert not any("forward" in vars(module) for module in model.modules())


def test_copies_have_no_session(tmp_path):
    """Copies of the model, such as a moving average or the best model so far, have no session."""
    model, optimizer, session = begin(**HALF)
    with session:
        for batch in BATCHES[:6]:
            one_step(session, model, optimizer, batch, [])
            copied = copy.deepcopy(model)
            torch.save(model, tmp_path / "model.pt")
        loaded_model = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (copied, loaded_model):
        torch.manual_seed(0)
        expected = model(**BATCHES[0]).loss
        torch.manual_seed(0)
        assert torch.equal(other(**BATCHES[0]).loss, expected)


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with begin(**HALF)[2] as session, pytest.raises(FileNotFoundError, match="no such folder"):
        session.load(tmp_path / "elsewhere")


def test_a_session_without_a_step_says_so(caplog):
    begin(**HALF)[2].close()
    assert "closed without a step" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"config": 0.5}, TypeError, r"AdaccSession\(\.\.\., memory_budget=0\.5\)"),
        ({"policy": 3}, TypeError, "policy=3 has type int"),
        ({"memory_budget": -1}, ValueError, "memory_budget"),
        ({"optimizer": None}, TypeError, "optimizer has type NoneType, which is not a torch.optim.Optimizer"),
        ({"model": "gpt2"}, TypeError, "model has type str"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, match):
    model = make_model()
    with pytest.raises(error, match=match):
        AdaccSession(**{"model": model, "optimizer": torch.optim.AdamW(model.parameters()), **arguments})


def test_data_parallel_is_refused():
    with pytest.raises(ValueError, match="several threads"):
        AdaccSession(torch.nn.DataParallel(make_model()), torch.optim.AdamW(make_model().parameters()))


def test_a_device_that_cannot_be_measured_is_refused_before_the_first_step():
    model = make_model().to("meta")
    with pytest.raises(ValueError, match="memory on device meta cannot be measured: train on cpu or cuda"):
        AdaccSession(model, torch.optim.AdamW(model.parameters()), **HALF)


def loss_after_the_encoder(model, batch):
    encoded = model.get_encoder()(input_ids=batch["input_ids"])
    return model(encoder_outputs=encoded, labels=batch["labels"]).loss


after_the_encoder = stepping(loss_after_the_encoder)


def make_t5():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.1}
    config = T5Config(vocab_size=61, decoder_start_token_id=0, use_cache=False, **sizes)
    return T5ForConditionalGeneration(config).train()


def test_a_loop_that_calls_the_encoder_itself():
    batches = [batch_of(0, samples=4, tokens=48)] * 3
    run = train_as_plain(after_the_encoder, batches, make_t5, **HALF)
    assert run.session.policy.action_counts()["recompute"] > 0


def test_a_session_that_is_never_closed_may_be_collected():
    before = optimizers._global_optimizer_pre_hooks.copy()
    model, optimizer, session = begin(**HALF)
    session.begin()
    assert optimizers._global_optimizer_pre_hooks != before
    reference = weakref.ref(model)
    del model, optimizer, session
    gc.collect()
    assert reference() is None
    assert optimizers._global_optimizer_pre_hooks == before


def test_out_of_memory_in_the_very_first_micro_batch_is_tried_again():
    model, optimizer, session = begin(**HALF)
    failed_steps = []

    def step(batch):
        loss = model(**batch).loss
        if not failed_steps:
            failed_steps.append(1)
            raise torch.OutOfMemoryError("no room")
        update(loss, optimizer)

    session.run(step, batch_of(0))
    assert [event["event"] for event in session.history] == ["memory"]
    session.run(step, batch_of(1))
    assert [event["event"] for event in session.history] == ["memory", "policy"]
    session.close()


def test_a_smaller_size_runs_under_a_policy_whose_codecs_it_is_too_small_for():
    """A smaller size may run under the policy of a larger one, whose codecs are skipped below `min_compress_bytes`."""
    nbytes = 8 * 32 * 32 * 4  # the hidden states of the first batch
    model, optimizer, session = begin(memory_budget="1.65MiB", min_compress_bytes=nbytes // 4, head="plain")
    train_on(session, model, optimizer, [batch_of(0, tokens=32), batch_of(1, tokens=6), batch_of(2, tokens=32)])
    codec_names = [choice.codec for plan in session.policy.plans for _, choice in plan.choices if choice.codec]
    train_on(
        session, model, optimizer, [batch_of(seed, tokens=tokens) for seed, tokens in enumerate((6, 9, 32, 5, 12))]
    )
    session.close()
    assert codec_names
    assert session.num_steps == 8


def calling_twice(model, batch):
    return model(**batch).loss + model(**batch_of(99)).loss


def calling_in_reverse(model, batch):
    model.transformer.h = torch.nn.ModuleList(reversed(model.transformer.h))
    return model(**batch).loss


@pytest.mark.parametrize("loss_of", [calling_twice, calling_in_reverse])
def test_blocks_called_in_another_order_are_warned_of_and_profiled(caplog, loss_of):
    """The warning precedes the calls, whose memory no policy contains, and the next step is profiled."""
    warned = []

    def step(session, model, optimizer, batch, losses):
        if len(losses) != 5:
            return one_step(session, model, optimizer, batch, losses)

        def loss_with_warnings(model, batch):
            loss = loss_of(model, batch)
            warned.append([record.levelname for record in caplog.records if OTHER_ORDER in record.getMessage()])
            return loss

        return stepping(loss_with_warnings)(session, model, optimizer, batch, losses)

    run = train_as_plain(step, batches=BATCHES[:8], memory_budget="1GiB", **LOSSLESS)
    assert warned[0] == ["WARNING"]
    policies = [event["step"] for event in run.session.history if event.get("reason") == OTHER_ORDER]
    assert policies == [7]


def test_losses_with_backwards_in_the_order_of_their_forwards_are_warned_of(caplog):
    def step(session, model, optimizer, batch, losses):
        with session.step(batch):
            for loss in [model(**part).loss for part in halves(batch)]:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    run = train_as_plain(step, batches=BATCHES[:3], memory_budget="1GiB", **LOSSLESS)
    assert run.session.num_steps == 3
    assert [record.getMessage() for record in caplog.records].count(OTHER_BACKWARD) == 1


def test_state_that_the_optimizer_creates_late_is_counted():
    def step(session, model, optimizer, batch, losses):
        with session.step(batch):
            loss = model(**batch).loss
            loss.backward()
            if len(losses) > STATE_STEPS + 1:
                optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    run = train_as_plain(step, memory_budget="1GiB", **LOSSLESS).session.state
    assert run.corrections.static_bytes == run.profiler.state_bytes(run.model, run.optimizer) > 0
