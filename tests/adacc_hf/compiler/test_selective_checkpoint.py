"""Policies exported to torch's selective checkpointing."""

import pytest

from adacc_hf import AdaccConfig, PolicyMismatchError, profile_model, solve_policy
from adacc_hf.compiler.selective_checkpoint import selective_contexts
from adacc_hf.price.heads import ModelWithLoss
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import measure_step


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def profiled_model(request, tiny_gpt2, token_batch):
    model, batch = tiny_gpt2(request.param, layers=3), token_batch()
    config = AdaccConfig(min_compress_bytes=0, actions=("retain", "recompute"))
    return model, batch, profile_model(model, batch, config), config


def test_torch_saves_what_the_policy_stores_and_trains_the_same(profiled_model, run_steps, assert_same_steps):
    model, batch, profile, config = profiled_model
    plain, plain_bytes = run_steps(model, batch), measure_step(model, batch).stored_bytes
    stored_bytes = []
    for share in (0.3, 0.6):
        contexts = selective_contexts(profile, solve_policy(profile, share, config))
        switch_checkpointing(model, on=True, torch_options={"use_reentrant": False, "context_fn": contexts})
        assert_same_steps(run_steps(model, batch), plain)
        stored_bytes.append(measure_step(model, batch).stored_bytes)
        switch_checkpointing(model, on=False)
    assert 0 < stored_bytes[0] < stored_bytes[1] < plain_bytes


def test_everything_or_nothing_may_be_saved(profiled_model):
    model, batch, profile, _ = profiled_model
    stored_bytes = {}
    for action in ("retain", "recompute"):
        contexts = selective_contexts(profile, uniform_policy(profile, action))
        switch_checkpointing(model, on=True, torch_options={"use_reentrant": False, "context_fn": contexts})
        stored_bytes[action] = measure_step(model, batch).stored_bytes
        switch_checkpointing(model, on=False)
    switch_checkpointing(model, on=True, torch_options={"use_reentrant": False})
    stored_bytes["torch"] = measure_step(model, batch).stored_bytes
    switch_checkpointing(model, on=False)
    assert stored_bytes["torch"] <= stored_bytes["recompute"] < stored_bytes["retain"]


def test_every_call_of_a_block_has_its_own_decisions(tiny_gpt2, token_batch, run_steps, assert_same_steps):
    """Every call of a block has its own decisions, under a loss that calls the model twice.

    torch asks for a context per call, in the order of the policy.
    """

    def twice(model, batch):
        return model(**batch).loss + model(**batch).loss

    model, batch = tiny_gpt2(layers=2), token_batch()
    step = ModelWithLoss(model, twice)
    profile = profile_model(model, batch, AdaccConfig(min_compress_bytes=0), compute_loss=twice)
    plain = run_steps(step, batch)
    policy = random_policy(profile, 0, ("retain", "recompute"))
    assert len(policy.plans) == 4
    contexts = selective_contexts(profile, policy)
    switch_checkpointing(model, on=True, torch_options={"use_reentrant": False, "context_fn": contexts})
    assert_same_steps(run_steps(step, batch), plain)
    switch_checkpointing(model, on=False)


def test_policies_of_other_models_are_refused(profiled_model, tiny_gpt2, token_batch):
    _, _, profile, config = profiled_model
    other = profile_model(tiny_gpt2("eager", layers=2, width=48), token_batch(), config)
    with pytest.raises(PolicyMismatchError, match="is not in the profile"):
        selective_contexts(profile, uniform_policy(other, "retain"))
