"""Policies, profiles and handles in notebooks and consoles: one line each, and small HTML in the page's colours."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from html_pages import Page

from adacc_hf import AdaccCallback, AdaccConfig, apply_policy
from adacc_hf.artifacts.notebook_html import MAX_ROWS, policy_map_html, table_html
from adacc_hf.artifacts.policy import IDLE_KIND, Plan
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.solve.solver import solve_policy


@pytest.fixture(scope="module")
def profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=12, attention="eager")


@pytest.fixture(scope="module")
def policy(profile):
    return solve_policy(profile, 0.5)


class Reader(Page):
    """A page without attributes other than styles."""

    def handle_starttag(self, tag, attributes):
        super().handle_starttag(tag, attributes)
        assert {name for name, _ in attributes} <= {"style"}


def assert_suits_any_page(html: str) -> None:
    """Assert that nothing is loaded, and that only coloured cells set a text colour, on a background of their own."""
    assert not re.search(r"https?:|<script|<link|<style|src=|url\(", html)
    for style in re.findall(r'style="([^"]*)"', html):
        properties = [declaration.partition(":")[0] for declaration in style.split(";")]
        assert ("color" in properties) == ("background" in properties), style


def test_a_profile_is_one_line(profile) -> None:
    assert repr(profile) == (
        f"<Profile of {profile.model_class} on {profile.device}: 12 blocks of 1 kind, "
        f"{12 * len(profile.kinds[0].activations)} activations; plain training stores 9.73 GiB for backward>"
    )
    sizes = (("input_ids", (8, 1024)),)
    assert "batch of input_ids [8, 1024]" in repr(replace(profile, measured=((sizes, ()),)))


def test_the_table_of_a_policy_has_a_row_per_plan(profile) -> None:
    policy = random_policy(profile, seed=1, actions=("retain", "compress", "recompute"))
    rows = Reader(policy._repr_html_()).rows
    assert rows[0] == ["blocks", "run as", "retain", "compress", "recompute"]
    assert len(rows) == 1 + len(policy.plans)
    counts = policy.action_counts()
    for column, action in enumerate(("retain", "compress", "recompute"), start=2):
        blocks_of_plan = [sum(index == number for _, index in policy.blocks) for number in range(len(policy.plans))]
        cells = [int(row[column]) for row in rows[1:]]
        assert sum(n * cell for n, cell in zip(blocks_of_plan, cells, strict=True)) == counts[action]
    assert_suits_any_page(policy._repr_html_())


def test_idle_blocks_are_shown_as_not_trained(policy) -> None:
    idle = replace(policy, plans=(*policy.plans, Plan(kind=IDLE_KIND, choices=())))
    idle = replace(idle, blocks=(*policy.blocks, ("tower.0", len(policy.plans))))
    assert Reader(idle._repr_html_()).rows[-1] == ["tower.0", "not trained", "", "", ""]


def test_the_map_has_the_action_of_each_activation(profile, policy) -> None:
    html = policy_map_html(policy, profile)
    rows = Reader(html).rows
    (kind,) = profile.kinds
    assert [row[0] for row in rows[1:]] == [kind.names[value.index] for value in kind.activations]
    for column, plan in enumerate(policy.plans, start=2):
        assert [row[column] for row in rows[1:]] == [str(choice) for _, choice in plan.choices]
    assert_suits_any_page(html)


def test_a_long_map_is_cut_and_says_so(tape_builder, profile_of) -> None:
    tape = tape_builder()
    for number in range(MAX_ROWS + 5):
        tape.operator("op", [], [(f"out{number}", 4096)], 1.0, save=[-1])
    profile = profile_of([tape.kind()], [0])
    rows = Reader(policy_map_html(uniform_policy(profile, "retain"), profile)).rows
    assert len(rows) == 1 + MAX_ROWS + 1
    assert rows[-1] == ["and 5 more", "", ""]


def test_text_is_escaped() -> None:
    assert Reader(table_html(("<b>",), [["x"]])).rows == [["<b>"], ["x"]]


def test_a_handle_shows_its_policy_and_its_removal(tiny_gpt2, token_batch) -> None:
    from adacc_hf import profile_model

    model, batch = tiny_gpt2(), token_batch()
    profile = profile_model(model, batch)
    policy = solve_policy(profile, 0.5)
    handle = apply_policy(model, policy)
    assert repr(handle) == f"<PolicyHandle on GPT2LMHeadModel: {policy.describe()}>"
    assert Reader(handle._repr_html_()).rows[0][0] == "blocks"
    assert len(repr(profile)) < 300
    handle.remove()
    assert repr(handle) == f"<PolicyHandle on GPT2LMHeadModel (removed): {policy.describe()}>"


def test_settings_are_shown_where_they_differ_from_the_defaults() -> None:
    assert repr(AdaccConfig()) == "AdaccConfig()"
    config = AdaccConfig(memory_budget="20GiB", actions=("retain", "recompute"))
    assert repr(config) == "AdaccConfig(memory_budget='20GiB', actions=('retain', 'recompute'))"
    assert eval(repr(config)) == config
    assert repr(AdaccCallback(config)) == f"AdaccCallback({repr(config)[12:]}"
    assert_suits_any_page(AdaccCallback(config)._repr_html_())
    assert "no policy yet" in AdaccCallback(config)._repr_html_()
