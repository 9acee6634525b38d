"""Policies, profiles and handles in notebooks and consoles: one line each, and small tables in Markdown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.artifacts.policy import IDLE_KIND, Plan
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.solve.simple_policies import random_policy
from adacc_hf.solve.solver import solve_policy


@pytest.fixture(scope="module")
def profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=12, attention="eager")


@pytest.fixture(scope="module")
def policy(profile):
    return solve_policy(profile, 0.5)


def rows_of(markdown: str) -> list[list[str]]:
    """Return the cells of a table in Markdown, without the rule below its headers."""
    lines = [line for line in markdown.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_profile_is_one_line(profile) -> None:
    assert repr(profile) == (
        f"<Profile of {profile.model_class} on {profile.device}: 12 blocks of 1 kind, "
        f"{12 * len(profile.kinds[0].activations)} activations; plain training stores 9.73 GiB for backward>"
    )
    sizes = (("input_ids", (8, 1024)),)
    assert "batch of input_ids [8, 1024]" in repr(replace(profile, measured=((sizes, ()),)))
    assert ["stored for backward by plain training", "9.73 GiB"] in rows_of(profile._repr_markdown_())


def test_the_table_of_a_policy_has_a_row_per_plan(profile) -> None:
    policy = random_policy(profile, seed=1, actions=("retain", "compress", "recompute"))
    rows = rows_of(policy._repr_markdown_())
    assert rows[0] == ["blocks", "run as", "retain", "compress", "recompute"]
    assert len(rows) == 1 + len(policy.plans)
    counts = policy.action_counts()
    for column, action in enumerate(("retain", "compress", "recompute"), start=2):
        blocks_of_plan = [sum(index == number for _, index in policy.blocks) for number in range(len(policy.plans))]
        cells = [int(row[column]) for row in rows[1:]]
        assert sum(n * cell for n, cell in zip(blocks_of_plan, cells, strict=True)) == counts[action]


def test_idle_blocks_are_shown_as_not_trained(policy) -> None:
    idle = replace(policy, plans=(*policy.plans, Plan(kind=IDLE_KIND, choices=())))
    idle = replace(idle, blocks=(*policy.blocks, ("tower.0", len(policy.plans))))
    assert rows_of(idle._repr_markdown_())[-1] == ["tower.0", "not trained", "", "", ""]


def test_a_handle_shows_its_policy_and_its_removal(toy_model, toy_batch) -> None:
    from adacc_hf import apply_policy, profile_model

    model = toy_model(lambda block, hidden: hidden + block.down(block.up(hidden).tanh()))
    profile = profile_model(model, toy_batch())
    policy = solve_policy(profile, 1.0)
    handle = apply_policy(model, policy)
    assert isinstance(handle, PolicyHandle)
    assert f": {policy.describe()}>" in repr(handle)
    assert rows_of(handle._repr_markdown_())[0][0] == "blocks"
    assert len(repr(profile)) < 300
    handle.remove()
    assert f"(removed): {policy.describe()}>" in repr(handle)


def test_settings_are_shown_where_they_differ_from_the_defaults() -> None:
    assert repr(AdaccConfig()) == "AdaccConfig()"
    config = AdaccConfig(memory_budget="20GiB", actions=("retain", "recompute"))
    assert repr(config) == "AdaccConfig(memory_budget='20GiB', actions=('retain', 'recompute'))"
    assert eval(repr(config)) == config
    assert repr(AdaccCallback(config)) == f"AdaccCallback({repr(config)[12:]}"
    assert "no policy yet" in AdaccCallback(config)._repr_markdown_()
