"""One trial of every method on a tiny model: correctness gate, peak, speed."""

from collections.abc import Iterator

import pytest
import torch
from transformers import GPT2Config

from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.trials import trial
from adacc_hf.eval.trials.gradients import ROUNDING, Gradients
from adacc_hf.eval.trials.isolation import CannotRunError, OverLimitError, run_here
from adacc_hf.eval.trials.limits import budget_bytes
from adacc_hf.eval.trials.methods import PAPER_METHODS, InstalledMethod, Promise
from adacc_hf.eval.trials.model_under_test import Subject
from adacc_hf.eval.trials.trial import Reference, check, reference_gradients, run_trial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the config of a GPT-2 whose larger activations are at least 64 KiB, so that they may be
    compressed."""
    path = tmp_path_factory.mktemp("model")
    config = GPT2Config(n_layer=3, n_embd=64, n_head=2, n_positions=64, vocab_size=256)
    config.bos_token_id = config.eos_token_id = None
    config.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def subject(folder: str) -> dict:
    return {"preset": folder, "batch": 8, "tokens": 64}


@pytest.fixture(scope="module")
def plain(subject: dict) -> dict:
    return run_trial(subject, "paper", "none", rounds=2)


def test_a_trial_says_gate_peak_and_speed(plain: dict) -> None:
    assert plain["gate"] == {
        "promise": "exact",
        "reference": "plain",
        "sequences": 8,
        "rounding": 0.0,
        "gradient_error": 0.0,
    }
    assert 0 < plain["static_bytes"] < plain["peak_bytes"]
    speed, step = plain["tokens_per_second"], plain["step_ms"]
    assert speed["low"] <= speed["median"] <= speed["high"]
    # A mean of inverses is no smaller than the inverse of the mean, whatever the two samples are. Numbers are rounded.
    assert 8 * 64 / (step["high"] / 1e3) <= 1.001 * speed["low"]
    assert 8 * 64 / (step["low"] / 1e3) <= 1.001 * speed["high"]


@pytest.mark.parametrize("method", [name for name in PAPER_METHODS if name != "none"])
def test_the_papers_methods_take_less_than_plain(subject: dict, plain: dict, method: str) -> None:
    figures = run_trial(subject, "paper", method, budget=0.4)
    assert figures["peak_bytes"] < plain["peak_bytes"]
    assert figures["gate"]["promise"] == ("exact" if method == "full" else "lossy")
    assert ("step_ms" in figures) is False


def test_a_budget_on_the_peak_counts_the_whole_step(subject: dict, plain: dict) -> None:
    budget = plain["peak_bytes"] * 9 // 10
    figures = run_trial(subject, "paper", "adacc", budget=budget, limit_bytes=budget)
    assert figures["peak_bytes"] <= budget
    assert figures["peak_bytes"] == figures["decided"]["predicted_peak_bytes"]


def test_over_the_limit_is_told_with_the_bytes(subject: dict, plain: dict) -> None:
    limit = plain["peak_bytes"] - 1
    with pytest.raises(OverLimitError, match="the step takes") as error_info:
        run_trial(subject, "paper", "none", limit_bytes=limit, gate=False)
    assert error_info.value.figures["peak_bytes"] == plain["peak_bytes"]
    assert run_trial(subject, "paper", "none", limit_bytes=limit + 1, gate=False)["peak_bytes"] == limit + 1


def test_an_impossible_budget_is_out_of_memory(subject: dict) -> None:
    figures = run_here(run_trial, {"subject": subject, "family": "paper", "method": "adacc", "budget": 1})
    assert figures["status"] == "out_of_memory"
    assert "below the least possible peak" in figures["reason"]


def test_selective_checkpointing_is_exact_and_saves(subject: dict, plain: dict) -> None:
    figures = run_trial(subject, "peers", "selective")
    assert figures["gate"]["gradient_error"] == 0.0
    assert figures["peak_bytes"] < plain["peak_bytes"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there these peers run")
@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("checkpointing_offload", "in host memory already"),
        ("trl_offloading", "trl offloads activations from an accelerator"),
        ("xformers_0.5", "times operators on a CUDA device"),
    ],
)
def test_a_peer_that_cannot_run_says_why(subject: dict, method: str, reason: str) -> None:
    with pytest.raises(CannotRunError, match=reason):
        run_trial(subject, "peers", method, gate=False)


class Skewed:
    """A model whose gradients are wrong by a factor. The loss is correct."""

    def __init__(self, model: torch.nn.Module, factor: float) -> None:
        self.model = model
        parameter = model.transformer.h[0].mlp.c_fc.weight
        self.handle = parameter.register_hook(lambda gradient: gradient * factor)

    def __call__(self, **batch: torch.Tensor):
        return self.model(**batch)


@pytest.mark.parametrize(
    ("promise", "factor", "allowed"),
    [
        (Promise.EXACT, 1 + 2**-20, False),
        (Promise.LOSSY, 1 + 2**-20, True),
        (Promise.LOSSY, 20.0, False),
        (Promise.OWN_RANDOMNESS, 1 + 2**-20, True),
        (Promise.OWN_RANDOMNESS, 20.0, False),
        (Promise.OWN_LOSSY, 1 + 2**-20, True),
        (Promise.OWN_LOSSY, 20.0, False),
    ],
    ids=["exact", "lossy-small", "lossy-large", "own-small", "own-large", "own-lossy-small", "own-lossy-large"],
)
def test_the_gate_holds_each_method_to_its_promise(subject: dict, promise: Promise, factor: float, allowed: bool):
    model_subject = Subject(**subject)
    model = model_subject.model()
    parameters_before = [parameter.detach().clone() for parameter in model.parameters()]
    reference = trial.reference_gradients(model_subject, model, model_subject.example())
    assert reference.noise == 0.0
    installed = InstalledMethod(call=Skewed(model, factor), promise=promise)
    if allowed:
        check_result = trial.check(model_subject, model, installed, reference)
        assert 0.0 < max(check_result.get("gradient_error", 0.0), check_result.get("slope_error", 0.0)) < 0.05
    else:
        with pytest.raises(WrongResultError, match=r"compared with plain: .* differs|not the slope"):
            trial.check(model_subject, model, installed, reference)
    for old, new in zip(parameters_before, model.parameters(), strict=True):
        torch.testing.assert_close(old, new.detach(), rtol=0, atol=1e-5)  # moved there and back, in float32


def test_another_loss_is_red(subject: dict) -> None:
    model_subject = Subject(**subject)
    model = model_subject.model()
    reference = trial.reference_gradients(model_subject, model, model_subject.example())
    torch.nn.init.zeros_(model.transformer.wte.weight)
    for promise, message in [
        (Promise.LOSSY, "of the loss .*, allowed 0$"),
        (Promise.OWN_RANDOMNESS, "differs from .*, the loss of plain, by more than 2%"),
    ]:
        with pytest.raises(WrongResultError, match=message):
            trial.check(model_subject, model, InstalledMethod(call=model, promise=promise), reference)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", PAPER_METHODS)
def test_every_method_runs_on_a_gpu(subject: dict, method: str, precision: str, attention: str) -> None:
    on_gpu = {"device": "cuda", "precision": precision, "attention": attention}
    figures = run_trial(subject | on_gpu, "paper", method, budget=0.5, rounds=3)
    assert figures["gate"]["promise"] in ("exact", "lossy")
    assert 0 < figures["static_bytes"] < figures["peak_bytes"] <= figures["reserved_bytes"]
    assert figures["tokens_per_second"]["median"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["checkpointing_offload", "selective"])
def test_eager_peers_are_exact_on_a_gpu(subject: dict, method: str) -> None:
    """With dropout, which fused attention draws there."""
    figures = run_trial(subject | {"device": "cuda"}, "peers", method)
    assert figures["gate"]["promise"] == "exact"


@pytest.mark.gpu
def test_what_the_gate_took_on_a_gpu_is_not_the_methods(subject: dict) -> None:
    """The gate trains plainly for its reference, and needs more memory for that than the method."""
    on_gpu = subject | {"device": "cuda", "batch": 16}
    torch.cuda.empty_cache()
    ungated, gated = (run_trial(on_gpu, "paper", "full", gate=gate) for gate in (False, True))
    assert gated["reserved_bytes"] == pytest.approx(ungated["reserved_bytes"], rel=0.05)  # fragments


SUBJECT = Subject(preset="demo", batch=1, tokens=16)


def gradients(off: float) -> Gradients:
    """Return the gradients of one parameter, `off` away from those of another run."""
    return Gradients(torch.tensor(2.0), {"weight": torch.tensor([1.0 + off, 0.0])})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Return the list of the next steps' gradient errors, which a test fills and must use up."""
    offs: list[float] = []
    monkeypatch.setattr(trial, "step_gradients", lambda *_: gradients(offs.pop(0)))
    yield offs
    assert offs == []


def test_noise_is_the_worst_of_three_runs(runs: list[float]) -> None:
    """The first two of the three runs are equal by chance."""
    runs += [0.0, 0.0, 1e-3]
    reference = reference_gradients(SUBJECT, SUBJECT.model(), SUBJECT.example())
    assert reference.noise == pytest.approx(1e-3, rel=1e-3)  # float32 represents 1 + 1e-3 to 1e-7


@pytest.mark.parametrize(("device", "is_red"), [("cpu", True), ("cuda", False)])
def test_a_gpu_may_add_in_another_order_though_no_run_showed_it(runs: list[float], device: str, is_red: bool) -> None:
    subject = Subject(preset="demo", batch=1, tokens=16, device=device)
    model = torch.nn.Linear(1, 1)
    installed = InstalledMethod(call=model, promise=Promise.EXACT)
    reference = Reference(name="plain", batch=SUBJECT.example(), gradients=gradients(0.0), noise=0.0)
    runs += [ROUNDING["fp32"] / 2] if is_red else [ROUNDING["fp32"] / 2] * 3
    if is_red:
        with pytest.raises(WrongResultError, match="weight differs"):
            check(subject, model, installed, reference)
    else:
        errors = check(subject, model, installed, reference)
        assert errors["gradient_error"] == pytest.approx(ROUNDING["fp32"] / 2, rel=0.02)  # of float32's own 1e-7


def test_only_a_gpu_needs_a_margin() -> None:
    assert budget_bytes(1000, "cpu") == 1000
    assert budget_bytes(1000, "cuda") == 950
