"""Whole training steps: micro-batches, clipping and the optimizer stay within the policy's predicted peak."""

import gc

import pytest
import torch
from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from adacc_hf import AdaccConfig, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.errors import OptimizerStateError
from adacc_hf.price.optimizer_memory import (
    coming_state_bytes,
    measure_clipping,
    measure_optimizer_step,
)
from adacc_hf.price.training_step import TrainingStep
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import CpuMemoryMeter, count_static_bytes, forward_loss

CONFIG = AdaccConfig(min_compress_bytes=0)
MAX_NORM = 0.1


def train_step(model, batches, optimizer):
    """Run one step in the Trainer's order."""
    for batch in batches:
        forward_loss(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    model.zero_grad(set_to_none=True)


CASES = {
    "small-foreach": {"foreach": True, "tied": True, "num_micro": 1, "size": 2},
    "small-one-by-one-accumulated": {"foreach": False, "tied": True, "num_micro": 4, "size": 2},
    "large-one-by-one": {"foreach": False, "tied": False, "num_micro": 1, "size": 16},
    "large-foreach-accumulated": {"foreach": True, "tied": False, "num_micro": 4, "size": 16},
    "large-foreach-accumulated-tied": {"foreach": True, "tied": True, "num_micro": 4, "size": 16},
}
"""Batch sizes: with small batches the optimizer has the peak, with large ones the blocks."""


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_whole_steps_is_as_predicted_and_within_the_budget(case, tiny_gpt2, token_batch, peak_of):
    foreach, tied, num_micro, size = CASES[case].values()
    model = tiny_gpt2(vocab_size=300, tie_word_embeddings=tied)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    batches = [token_batch(size, 32, 300) for _ in range(num_micro)]
    batches = [{name: tensor.clone() for name, tensor in batch.items()} for batch in batches]
    train_step(model, batches, optimizer)  # creates the optimizer's state
    for batch in batches:
        forward_loss(model, batch).backward()
    step_bytes = measure_optimizer_step(optimizer, MAX_NORM)
    model.zero_grad(set_to_none=True)
    options = {"gradient_accumulation_steps": num_micro, "optimizer_step_bytes": step_bytes}
    profile = profile_model(model, batches[0], CONFIG, optimizer, **options)
    policies = [uniform_policy(profile, "retain"), uniform_policy(profile, "recompute")]
    budget = sum(policy.predicted_peak_bytes for policy in policies) // 2
    for policy in [*policies, solve_policy(profile, budget, CONFIG)]:
        with apply_policy(model, policy):
            for _ in range(2):
                train_step(model, batches, optimizer)
            static = count_static_bytes(model, {str(i): batch for i, batch in enumerate(batches)}, optimizer)
            with CpuMemoryMeter() as meter:
                train_step(model, batches, optimizer)
        peak = static + meter.peak_bytes
        assert peak == peak_of(policy)
    assert peak <= budget


def test_an_optimizers_temporaries_are_counted_and_its_state_is_not(tiny_gpt2, token_batch):
    peaks = {}
    for foreach in (True, False):
        model = tiny_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        for number in range(2):
            forward_loss(model, token_batch()).backward()
            peaks[foreach, number] = measure_optimizer_step(optimizer)
    parameters = sum(parameter.nbytes for parameter in tiny_gpt2().parameters())
    largest = max(parameter.nbytes for parameter in tiny_gpt2().parameters())
    # Foreach AdamW makes a list of denominators as large as all parameters; else there is one parameter's at a time.
    # A scalar per parameter and allocation comes on top.
    assert parameters <= peaks[True, 1] <= 1.05 * parameters + 20_000
    assert largest <= peaks[False, 1] <= 2 * largest + 1000
    for foreach in (True, False):
        assert peaks[foreach, 0] <= peaks[foreach, 1] + 20_000


def test_clipping_takes_scalars_and_is_measured_without_effect(tiny_gpt2, token_batch):
    model = tiny_gpt2()
    assert measure_clipping(model.parameters()) == 0
    forward_loss(model, token_batch()).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    num_parameters = len(before)
    assert 0 < measure_clipping(model.parameters()) <= 64 * num_parameters
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_accumulation_adds_the_gradients_and_the_other_batches(tiny_gpt2, token_batch):
    model, batch = tiny_gpt2(), token_batch()
    one, four = (profile_model(model, batch, CONFIG, gradient_accumulation_steps=steps) for steps in (1, 4))
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    ids = batch["input_ids"].nbytes
    assert four.static_bytes - one.static_bytes == parameters + 3 * ids
    assert four.plain_stored_bytes == one.plain_stored_bytes
    for first, later in zip(one.blocks, four.blocks, strict=True):
        assert later.backward_base_bytes >= first.backward_base_bytes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_optimizer_is_a_moment_of_the_step(tiny_gpt2, token_batch):
    model, batch = tiny_gpt2(), token_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    assert profile_model(model, batch, CONFIG).optimizer_peak_bytes == 0
    profile = profile_model(model, batch, CONFIG, optimizer, optimizer_step_bytes=1 << 24)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert profile.optimizer_peak_bytes == profile.static_bytes + parameters + (1 << 24)
    assert uniform_policy(profile, "retain").predicted_peak_bytes == profile.optimizer_peak_bytes
    with pytest.raises(ValueError, match=r"reached in 'optimizer'"):
        solve_policy(profile, profile.optimizer_peak_bytes - 1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be an int of at least 1"),
        ({"optimizer_step_bytes": -1}, "optimizer_step_bytes=-1 must be an int of at least 0"),
        ({"optimizer_state_bytes": 0.5}, "optimizer_state_bytes=0.5 must be an int of at least 0"),
    ],
    ids=["steps", "bytes", "state"],
)
def test_bad_values_are_refused(tiny_gpt2, token_batch, setting, message):
    with pytest.raises(ValueError, match=message):
        profile_model(tiny_gpt2(), token_batch(), CONFIG, **setting)


@pytest.mark.parametrize("action", ["retain", "recompute"])
@pytest.mark.parametrize("num_micro", [1, 2])
def test_state_that_chance_has_kept_from_being_made_is_in_the_peak(toy_model, toy_batch, action, num_micro):
    """Predicted peaks include the state of blocks without a gradient in the optimizer's first step, as with
    layerdrop."""
    model = toy_model(lambda block, hidden: hidden + block.down(block.up(hidden).tanh()))
    unused = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([*model.parameters(), unused])
    forward_loss(model, toy_batch()).backward()
    for parameter in model.layers[0].parameters():
        parameter.grad = None
    optimizer.step()
    model.zero_grad(set_to_none=True)
    options = {"gradient_accumulation_steps": num_micro}
    batches = [{"x": toy_batch()["x"].clone()} for _ in range(num_micro)]
    before = profile_model(model, batches[0], CONFIG, optimizer, **options)
    train_step(model, batches, optimizer)
    after = profile_model(model, batches[0], CONFIG, optimizer, **options)
    peaks = [uniform_policy(profile, action).predicted_peak_bytes for profile in (before, after)]
    assert peaks[0] == peaks[1]


OF_TORCH = sorted(
    name
    for name, optimizer_class in vars(torch.optim).items()
    if isinstance(optimizer_class, type)
    and issubclass(optimizer_class, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS")
)
OF_TRANSFORMERS = [one.value for one in OptimizerNames if "lomo" not in one.value and "layerwise" not in one.value]
NEED_A_GPU = ("galore_adamw_8bit", "stable_adamw")
"""Optimizers of Transformers' list that can be constructed on a CPU but cannot step there."""


def tiny_llama():
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=300)).train()


def with_gradients(model):
    ids = torch.arange(64).reshape(2, 32)
    model(input_ids=ids, labels=ids).loss.backward()
    return model


def of_torch(name, model):
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return getattr(torch.optim, name)(matrices if name == "Muon" else model.parameters())


def of_transformers(name, model, folder):
    """Return the optimizer as the Trainer creates it. Skip the test if a package or device is missing."""
    arguments = {"use_cpu": True, "report_to": "none", "optim_target_modules": ["self_attn", "mlp"]}
    try:
        trainer = Trainer(model=model, args=TrainingArguments(str(folder), optim=name, **arguments))
        return trainer.create_optimizer()
    except (ImportError, ValueError, AssertionError, RuntimeError) as error:
        pytest.skip(f"{name}: {error}")


def kept_by(step):
    """Return the bytes that `step` allocates and does not free."""
    gc.collect()  # garbage of earlier tests would be freed meanwhile
    with CpuMemoryMeter() as meter:
        step()
        meter.mark(("end",))
    return next(point.live_bytes for point in meter.points if point.label == ("end",))


def assert_state_is_foreseen(model, optimizer):
    """Assert that the predicted state equals the real one to the byte, and that weights and generators are
    unchanged."""
    getattr(optimizer, "train", lambda: None)()  # schedule-free optimizers have modes
    weights, dice = [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()
    foreseen, before = coming_state_bytes(optimizer, model.parameters()), count_static_bytes(model, {}, optimizer)
    assert all(torch.equal(p, weight) for p, weight in zip(model.parameters(), weights, strict=True))
    assert torch.equal(torch.get_rng_state(), dice)
    assert foreseen == kept_by(optimizer.step)
    assert foreseen == count_static_bytes(model, {}, optimizer) - before
    assert coming_state_bytes(optimizer, model.parameters()) == 0


@pytest.mark.parametrize("name", OF_TORCH)
def test_the_state_of_every_optimizer_of_torch_is_foreseen(name):
    model = with_gradients(tiny_llama())
    if name == "SparseAdam":
        for parameter in model.parameters():
            parameter.grad = parameter.grad.to_sparse()
    assert_state_is_foreseen(model, of_torch(name, model))


@pytest.mark.filterwarnings("ignore")  # other packages' warnings
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_the_state_of_every_optimizer_of_transformers_is_foreseen(name, tmp_path):
    model = with_gradients(tiny_llama())
    optimizer = of_transformers(name, model, tmp_path)
    if name in NEED_A_GPU:
        with pytest.raises(OptimizerStateError, match="a step on stand-in parameters failed"):
            coming_state_bytes(optimizer, model.parameters())
        return
    assert_state_is_foreseen(model, optimizer)


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "nesterov": True},
        {"cls": torch.optim.Adam, "amsgrad": True},
        {"cls": torch.optim.RMSprop, "momentum": 0.9, "centered": True},
        {"cls": torch.optim.Adadelta, "foreach": True},
    ],
    ids=str,
)
def test_settings_that_add_to_the_state_are_in_it(settings):
    settings = {"cls": torch.optim.SGD, "lr": 1e-3} | settings
    model = with_gradients(tiny_llama())
    assert_state_is_foreseen(model, settings.pop("cls")(model.parameters(), **settings))


def test_what_stands_around_an_optimizer_does_not_notice():
    model, calls = with_gradients(tiny_llama()), []
    optimizer = torch.optim.AdamW(model.parameters())
    expected = coming_state_bytes(optimizer, model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step in a function
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append("all"))
    prepared = Accelerator(cpu=True).prepare_optimizer(optimizer)
    assert coming_state_bytes(prepared, model.parameters()) == expected > 0
    hook.remove()
    assert not calls
    assert not optimizer.state
    assert not getattr(optimizer, "_opt_called", False), scheduler


def test_a_budget_in_bytes_holds_where_the_optimizer_has_not_stepped_yet(tiny_gpt2, token_batch, peak_of):
    """A budget in bytes holds in docs/GUIDE's order: optimizer, profile, policy, and then the optimizer's first
    step."""
    model, batch = tiny_gpt2(vocab_size=300), token_batch(16, 32, 300)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    profile = profile_model(model, batch, CONFIG, optimizer)
    policies = [uniform_policy(profile, "retain"), uniform_policy(profile, "recompute")]
    budget = sum(policy.predicted_peak_bytes for policy in policies) // 2
    for policy in [*policies, solve_policy(profile, budget, CONFIG)]:
        with apply_policy(model, policy):
            for _ in range(2):
                train_step(model, [batch], optimizer)
            static = count_static_bytes(model, batch, optimizer)
            with CpuMemoryMeter() as meter:
                train_step(model, [batch], optimizer)
        assert static + meter.peak_bytes == peak_of(policy)
    assert policy.predicted_peak_bytes <= budget


def test_a_state_that_cannot_be_known_is_refused(tiny_gpt2, token_batch):
    model, batch = tiny_gpt2(), token_batch()
    optimizer = torch.optim.LBFGS(model.parameters())
    message = r"optimizer=LBFGS.* cannot be predicted: .*closure.* training step .*optimizer_state_bytes"
    with pytest.raises(OptimizerStateError, match=message):
        profile_model(model, batch, CONFIG, optimizer)
    profile_of_size = profile_model(model, batch, CONFIG, optimizer, optimizer_state_bytes=1 << 20)
    none = profile_model(model, batch, CONFIG, optimizer, optimizer_state_bytes=0)
    assert profile_of_size.static_bytes - none.static_bytes == 1 << 20


def test_no_room_for_a_stand_in_is_no_state_that_is_unknown():
    class Full(torch.optim.SGD):
        def step(self, closure=None):
            raise torch.OutOfMemoryError("full")

    model = tiny_llama()
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        coming_state_bytes(Full(model.parameters()), model.parameters())


def test_the_state_is_measured_once(monkeypatch, tiny_gpt2):
    """A training step measures the missing state once for the same parameters, and again after they have a state."""
    model, sizes, ones_like = tiny_gpt2(), [], torch.ones_like
    monkeypatch.setattr(torch, "ones_like", lambda tensor: sizes.append(tensor.shape) or ones_like(tensor))  # stand-ins
    step = TrainingStep(optimizer=torch.optim.AdamW(model.parameters()))
    nbytes, num_measured = step.coming_bytes(model.parameters()), len(sizes)
    assert num_measured
    step.check(model.parameters())
    assert step.coming_bytes(model.parameters()) == nbytes == coming_state_bytes(step.optimizer, model.parameters())
    assert len(sizes) == 2 * num_measured  # of the training step, and of the last call without one
    assert step.coming_bytes(model.transformer.ln_f.parameters()) < nbytes
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step.optimizer.step()
    assert step.coming_bytes(model.parameters()) == 0
