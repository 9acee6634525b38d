"""The correctness gate before timing, and the figures after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adacc_hf import Action, AdaccConfig, profile_model
from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.trials.contenders import (
    CHECKPOINTING,
    PLAIN,
    Contender,
    check_gradients,
    uses_lossy_codec,
)
from adacc_hf.eval.trials.gradients import MAX_GRADIENT_ERROR, NOISE_RUNS, Gradients
from adacc_hf.eval.trials.workload import Workload
from adacc_hf.solve.simple_policies import random_policy, uniform_policy


@pytest.fixture
def build(tiny: Workload):
    """Return contenders on one model: plain, checkpointing, and one for each action."""
    model, batch = tiny.model(), next(tiny.batches())
    profile = profile_model(model, batch)

    def build(*actions: Action) -> list[Contender]:
        policies = [(str(action.value), uniform_policy(profile, action)) for action in actions]
        adacc = [Contender(name, model, batch, policy) for name, policy in policies]
        return [Contender(PLAIN, model, batch), Contender(CHECKPOINTING, model, batch), *adacc]

    return build


def scale_gradient(contender: Contender, factor: float) -> None:
    """Scale one gradient by a hook, so that it is wrong. The loss stays correct."""
    contender.model.transformer.h[0].mlp.c_fc.weight.register_hook(lambda gradient: gradient * factor)


def test_lossless_methods_pass_the_gate_with_no_error(build) -> None:
    errors = check_gradients(build(Action.RETAIN, Action.RECOMPUTE))
    assert errors == {PLAIN: 0.0, CHECKPOINTING: 0.0, "retain": 0.0, "recompute": 0.0}


def test_lossy_method_passes_with_its_error(build) -> None:
    contenders = build(Action.COMPRESS)
    assert not contenders[-1].is_lossless
    assert 0.0 < check_gradients(contenders)["compress"] < 0.5


@pytest.mark.parametrize("index", [1, 2], ids=["checkpointing", "recompute"])
def test_gate_stops_the_smallest_error_of_a_lossless_method(build, index: int) -> None:
    contenders = build(Action.RECOMPUTE)
    scale_gradient(contenders[index], 1 + 2**-20)
    with pytest.raises(WrongResultError, match=r"step 1, compared with plain: .*h\.0\.mlp.c_fc\.weight differs"):
        check_gradients(contenders)


def test_gate_looks_at_the_steady_state_too(build) -> None:
    contenders = build(Action.RECOMPUTE)
    calls = []

    def spoil_after_second_call(gradient):
        calls.append(None)
        return gradient if len(calls) < 3 else gradient * (1 + 2**-20)

    contenders[2].model.transformer.h[0].mlp.c_fc.weight.register_hook(spoil_after_second_call)
    with pytest.raises(WrongResultError, match="step 3"):
        check_gradients(contenders)


@pytest.mark.parametrize("factor", [1e4, float("nan")])
def test_gate_stops_a_lossy_method_that_is_broken(build, factor: float) -> None:
    contenders = build(Action.COMPRESS)
    scale_gradient(contenders[-1], factor)
    with pytest.raises(WrongResultError, match=r"compress, .* allowed 0\.5; of the loss 0, allowed 0$"):
        check_gradients(contenders)


def test_a_chunked_head_may_round_the_loss_otherwise(tiny: Workload) -> None:
    model, batch = tiny.model(), next(tiny.batches())
    policy = replace(uniform_policy(profile_model(model, batch), Action.RECOMPUTE), head="chunked")
    everyone = [Contender(PLAIN, model, batch), Contender("chunked", model, batch, policy)]
    assert everyone[1].other_sums
    assert everyone[1].is_lossless
    assert 0.0 < check_gradients(everyone)["chunked"] < 1e-5
    scale_gradient(everyone[1], 1.01)
    with pytest.raises(WrongResultError, match=r"chunked, .* differs: .* allowed 1e-05; of the loss"):
        check_gradients(everyone)


def test_contenders_keep_their_memory(build) -> None:
    everyone = build(Action.RETAIN, Action.RECOMPUTE)
    check_gradients(everyone)
    stored_bytes = {contender.name: contender.memory().stored_bytes for contender in everyone}
    assert stored_bytes["retain"] == stored_bytes[PLAIN] == everyone[2].policy.predicted_stored_bytes
    assert stored_bytes["recompute"] == everyone[3].policy.predicted_stored_bytes
    assert stored_bytes[CHECKPOINTING] < stored_bytes[PLAIN] / 2


def test_lossy_policies_are_told_from_lossless_ones(build) -> None:
    _, _, recompute, compress = build(Action.RECOMPUTE, Action.COMPRESS)
    masks = [c.codec for plan in recompute.policy.plans for _, c in plan.choices if c.action is Action.COMPRESS]
    assert not uses_lossy_codec(recompute.policy), masks
    assert uses_lossy_codec(compress.policy)


@pytest.mark.parametrize(("factor", "passes"), [(3.0, True), (5.0, False)])
def test_what_plain_runs_differ_by_is_no_error_of_a_lossless_method(factor: float, passes: bool) -> None:
    """A GPU adds in another order from run to run, so that plain runs differ. The difference is no error of a
    method."""

    class Stub:
        is_lossless, other_sums, device = True, False, torch.device("cpu")

        def __init__(self, name: str, noise: float) -> None:
            self.name, self.noise, self.calls = name, noise, 0

        def gradients(self, seed: int) -> Gradients:
            self.calls += 1
            is_noisy = self.name != PLAIN or self.calls % NOISE_RUNS == 2
            return Gradients(torch.ones(()), {"w": torch.tensor([1.0, self.noise if is_noisy else 0.0])})

    everyone = [Stub(PLAIN, 1e-4), Stub("other", factor * 1e-4)]
    if passes:
        assert check_gradients(everyone)["other"] == pytest.approx(factor * 1e-4, rel=1e-3)
    else:
        with pytest.raises(WrongResultError, match=r"other, .* w differs: .* allowed 0\.0004; "):
            check_gradients(everyone)


def test_where_plain_runs_are_alike_a_lossless_method_is_bit_equal() -> None:
    """A lossless method must be bit-equal there, also if the difference is too small for the error of the whole
    gradient."""

    class Stub:
        is_lossless, other_sums, device = True, False, torch.device("cpu")

        def __init__(self, name: str) -> None:
            self.name = name

        def gradients(self, seed: int) -> Gradients:
            off = 0.0 if self.name == PLAIN else 1e-200
            return Gradients(torch.ones(()), {"w": torch.tensor([1.0, off], dtype=torch.float64)})

    with pytest.raises(WrongResultError, match=r"other, .* w differs: .* allowed 0; "):
        check_gradients([Stub(PLAIN), Stub("other")])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_policies_pass_the_gate_on_every_device(attention: str, device: str) -> None:
    workload = Workload(width=32, layers=2, batch=2, tokens=32, attention=attention)
    model, batch = workload.model(device), next(workload.batches(device))
    profile = profile_model(model, batch, AdaccConfig(min_compress_bytes=0))
    actions = tuple(Action)
    policies = {str(seed): random_policy(profile, seed, actions, lossless=True) for seed in range(3)}
    policies |= {action.value: uniform_policy(profile, action) for action in actions}
    adacc = [Contender(name, model, batch, policy) for name, policy in policies.items()]
    everyone = [Contender(PLAIN, model, batch), *adacc]
    errors = check_gradients(everyone)
    assert 0.0 < errors["compress"] < MAX_GRADIENT_ERROR
    if device == "cpu":
        assert {name for name, error in errors.items() if error} == {"compress"}
