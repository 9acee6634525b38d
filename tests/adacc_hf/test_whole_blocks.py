"""Actions of whole blocks: retained, or under torch's checkpoint with inputs kept or compressed."""

from dataclasses import replace

import pytest
import torch
from model_builders import gradients_of

from adacc_hf import AdaccConfig, Profile, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.plans import checkpoint_plan
from adacc_hf.artifacts.policy import IDLE_KIND, BlockAction, Choice
from adacc_hf.solve.milp import build_block_model
from adacc_hf.solve.simple_policies import checkpoint_policy, policy_of_plans, random_policy, uniform_policy
from adacc_hf.solve.solver import least_policy
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=64)
LOSSLESS = AdaccConfig(actions=("retain", "recompute"))


def under(dtype):
    """Return autocast for one pass: its cache of casts ends with it."""
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)


class Under(torch.nn.Module):
    """A model under autocast whose backward runs outside of it, as a Trainer's does."""

    def __init__(self, dtype, model):
        super().__init__()
        self.dtype, self.model = dtype, model

    def forward(self, **batch):
        with under(self.dtype):
            return self.model(**batch)


def input_options(kind):
    return [(value.index, option) for value in kind.inputs for option in value.codecs]


@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_llama"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_checkpointed_block_keeps_and_needs_is_predicted(request, token_batch, name, dtype):
    """Bytes that a checkpointed block keeps and needs are predicted to the byte, with each codec for its input."""
    model, batch = request.getfixturevalue(name)(layers=3), token_batch(4, 32)
    with under(dtype):
        profile = profile_model(model, batch, CONFIG)
    (kind,) = profile.kinds
    plain = gradients_of(Under(dtype, model), batch)
    options = input_options(kind)
    assert options
    for coded in [{}, *({value: Choice.compress(option)} for value, option in options)]:
        plan = checkpoint_plan(kind, coded)
        policy = policy_of_plans(profile, [plan] * len(profile.blocks))
        with apply_policy(model, policy, CONFIG):
            ours = gradients_of(Under(dtype, model), batch)
            step_memory = measure_step(Under(dtype, model), batch)
        # A traced graph that runs again reads fewer inputs than the block takes: no positions, of 8 bytes for a token.
        unread_bytes = policy.predicted_stored_bytes - step_memory.stored_bytes
        assert unread_bytes in (0, 8 * 32)
        assert step_memory.peak_bytes <= policy.predicted_peak_bytes
        assert dtype is not None or step_memory.peak_bytes == policy.predicted_peak_bytes - unread_bytes
        assert torch.equal(ours[0], plain[0])
        assert all(map(torch.equal, ours, plain)) == (not coded)


def test_the_place_of_an_input_that_is_given_by_name_is_known(toy_model, toy_batch):
    model = toy_model(
        lambda block, hidden, scale: hidden + block.down(block.up(hidden).tanh() * scale),
        num_blocks=3,
        kwargs_of=lambda x: {"scale": x * 2},
    )
    batch = toy_batch(64)
    profile = profile_model(model, batch, AdaccConfig(min_compress_bytes=0))
    (kind,) = profile.kinds
    assert {value.place for value in kind.inputs} <= {(0,), ("scale",)}
    plan = checkpoint_plan(kind, {value: Choice.compress(option) for value, option in input_options(kind)})
    assert {place for _, place in plan.places} == {value.place for value in kind.inputs}
    policy = policy_of_plans(profile, [plan] * len(profile.blocks))
    with apply_policy(model, policy, CONFIG):
        gradients_of(model, batch)
        step_memory = measure_step(model, batch)
    assert step_memory.stored_bytes == policy.predicted_stored_bytes


# Choice of whole-block actions.


def is_never_replayed(kind):
    """Return `kind` as a kind with no operator that can be replayed by itself."""
    values = tuple(replace(value, recomputable=False, codecs=()) for value in kind.values)
    return replace(kind, values=values, operators=tuple(replace(o, replayable=False) for o in kind.operators))


def test_a_block_that_no_replay_serves_is_checkpointed_where_the_room_ends(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=8)
    profile = replace(profile, kinds=tuple(map(is_never_replayed, profile.kinds)))
    plain, all_under_checkpoint = uniform_policy(profile, "retain"), checkpoint_policy(profile)
    budget = (plain.predicted_peak_bytes + all_under_checkpoint.predicted_peak_bytes) // 2
    policy = solve_policy(profile, budget, LOSSLESS)
    counts = policy.block_counts()
    assert counts.keys() == {"plain", "checkpoint"}
    assert counts["plain"] >= 3
    assert policy.predicted_peak_bytes <= budget
    assert policy.predicted_overhead_ms < all_under_checkpoint.predicted_overhead_ms
    assert least_policy(profile, LOSSLESS).predicted_peak_bytes <= all_under_checkpoint.predicted_peak_bytes


def test_a_block_that_must_run_on_all_ranks_alike_is_checkpointed_under_any_budget(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=3)
    kinds = tuple(replace(kind, block_actions=(BlockAction.CHECKPOINT,), untrusted="why") for kind in profile.kinds)
    profile = replace(profile, kinds=kinds)
    for config in (LOSSLESS, AdaccConfig(actions=("retain", "compress"))):
        policy = solve_policy(profile, "80GiB", config)
        assert policy.block_counts() == {"checkpoint": 3}
    # Another rank may have any other policy: all policies run these blocks again.
    for action in ("retain", "compress", "recompute"):
        assert uniform_policy(profile, action).block_counts() == {"checkpoint": 3}
        assert random_policy(profile, 0, (action,)).block_counts() == {"checkpoint": 3}


def test_a_block_that_overwrites_its_input_is_never_checkpointed(toy_model, toy_batch):
    def overwrites(block, hidden):
        x = block.down(block.up(hidden.exp()).tanh())
        return hidden.mul_(0.5) + x

    model = toy_model(overwrites, num_blocks=3)
    batch = toy_batch(64)
    profile = profile_model(model, batch, LOSSLESS)
    (*_, kind) = profile.kinds
    assert kind.block_actions == (BlockAction.PLAIN,)
    assert checkpoint_plan(kind) is None
    plain = gradients_of(model, batch)
    for policy in (checkpoint_policy(profile), least_policy(profile, LOSSLESS)):
        with apply_policy(model, policy, LOSSLESS):
            for _ in range(3):
                assert all(map(torch.equal, gradients_of(model, batch), plain))


def test_inputs_of_a_block_whose_operators_depend_on_data_are_kept_exact(toy_model, toy_batch):
    def reads_data(block, hidden):
        x = block.up(hidden).tanh()
        return hidden + block.down(x / (1 + abs(x.max().item())))

    profile = profile_model(toy_model(reads_data, num_blocks=3), toy_batch(64), AdaccConfig(min_compress_bytes=0))
    (kind,) = profile.kinds
    assert kind.untrusted
    assert not kind.allows_lossy_inputs
    assert all(not column.plan.places for column in build_block_model(kind, AdaccConfig()).checkpoints)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_all_actions_train_as_plain_ones(tiny_gpt2, token_batch, seed, tmp_path):
    """Blocks of all actions train like plain ones, also after a change of policy during training, and from files."""
    model, batch = tiny_gpt2(layers=6), token_batch(4, 32)
    profile = profile_model(model, batch, LOSSLESS)
    profile.save(tmp_path / "profile.json")
    profile = Profile.load(tmp_path / "profile.json")
    uniform_policies = [
        uniform_policy(profile, "retain"),
        checkpoint_policy(profile),
        uniform_policy(profile, "recompute"),
    ]
    generator = torch.Generator().manual_seed(seed)

    def random_mixture():
        order = torch.randint(3, (len(profile.blocks),), generator=generator).tolist()
        plans = [uniform_policies[i].plan_of(block.name) for i, block in zip(order, profile.blocks, strict=True)]
        return policy_of_plans(profile, plans)

    plain = [gradients_of(model, batch, step) for step in range(6)]
    with apply_policy(model, random_mixture(), LOSSLESS) as handle:
        for step, expected in enumerate(plain):
            if step in (2, 4):
                handle.replace(random_mixture())
            assert all(map(torch.equal, gradients_of(model, batch, step), expected))
        assert not handle.tape_cache.fallbacks
    assert IDLE_KIND not in {plan.kind for plan in random_mixture().plans}
