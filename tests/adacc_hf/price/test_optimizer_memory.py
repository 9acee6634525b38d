"""Whole training steps: micro-batches, clipping and the optimizer stay within the policy's predicted peak."""

import pytest
import torch

from adacc_hf import AdaccConfig, AdaccSession, apply_policy, profile_model, solve_policy
from adacc_hf.price.measurement import OptimizerMeter, state_bytes
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import count_static_bytes, forward_loss
from adacc_hf.torch_glue.meters import CpuMemoryMeter

CONFIG = AdaccConfig(min_compress_bytes=0)
MAX_NORM = 0.1


def measure_optimizer_step(optimizer, max_norm=None):
    """Clip the gradients, take the optimizer's step, and return the peak of temporary bytes."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with OptimizerMeter(parameters[0].device) as meter:
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
    return meter.nbytes


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


def test_state_that_the_optimizer_has_yet_to_create_is_static_memory(tiny_gpt2, token_batch):
    model, batch = tiny_gpt2(), token_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    profiles = [profile_model(model, batch, CONFIG, optimizer, optimizer_state_bytes=size) for size in (0, 1 << 20)]
    assert profiles[1].static_bytes - profiles[0].static_bytes == 1 << 20
    assert not optimizer.state
    assert state_bytes(optimizer, torch.device("cpu")) == 0
    train_step(model, [batch], optimizer)
    parameters = list(model.parameters())
    assert state_bytes(optimizer, torch.device("cpu")) == sum(2 * p.nbytes + 4 for p in parameters)
    assert state_bytes(optimizer, torch.device("meta")) == 0


def test_state_that_the_profiled_step_created_is_in_use(tiny_gpt2, token_batch, monkeypatch):
    """`memory_budget="auto"` on a CPU counts what is free and what the run uses itself."""
    monkeypatch.setattr("adacc_hf.torch_glue.memory.free_host_bytes", lambda: 0)
    model, batch = tiny_gpt2(), token_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    session = AdaccSession(model, optimizer, memory_budget=1.0, head="plain")
    with session, session.step(batch):
        train_step(model, [batch], optimizer)
    assert session.profile.available_bytes == count_static_bytes(model, {}, optimizer)
