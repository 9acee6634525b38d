"""Policies as records: how they are built, shown, saved and refused."""

import json
from collections import Counter

import pytest

from adacc_hf.artifacts.errors import AdaccError, PolicyMismatchError
from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.solve.simple_policies import random_policy, uniform_policy


@pytest.fixture
def profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=3)


@pytest.fixture
def policy(profile):
    return random_policy(profile, seed=3, actions=("retain", "compress", "recompute"))


def test_a_policy_names_its_plans_and_counts_its_actions(policy):
    assert policy.plan_of("h.1") == policy.plans[dict(policy.blocks)["h.1"]]
    counts = policy.action_counts()
    assert counts == Counter(
        choice.action.value for name, _ in policy.blocks for _, choice in policy.plan_of(name).choices
    )
    assert not policy.is_plain
    assert f"3 blocks, {counts['retain']} retain" in policy.summary()


def test_masks_that_become_bits_are_not_counted_as_compressed(profile):
    lossless = uniform_policy(profile, "recompute")
    assert ", 0 compress, " in lossless.summary()
    assert ", 6 masks as bits; stored" in lossless.summary()
    everything = uniform_policy(profile, "compress")
    num_lossy = everything.action_counts()["compress"] - 6
    assert num_lossy > 0
    assert f", {num_lossy} compress, 0 recompute, 6 masks as bits; stored" in everything.summary()
    assert "bits" not in uniform_policy(profile, "retain").summary()


def test_what_is_saved_is_loaded(policy, tmp_path):
    path = tmp_path / "runs" / "policy.json"
    policy.save(path)
    assert Policy.load(path) == policy
    assert [file.name for file in path.parent.iterdir()] == ["policy.json"]


@pytest.mark.parametrize(("kind", "version"), [(Policy, 5), (Profile, 12)])
def test_what_is_no_policy_or_profile_is_refused(tmp_path, kind, version):
    path, name = tmp_path / "file.json", kind.__name__.lower()
    for text, message in {
        "{": f"{name} file .* is not JSON",
        "[]": f"is not an adacc_hf {name}",
        '{"format": "adacc_hf.other"}': f"is not an adacc_hf {name}",
        f'{{"format": "adacc_hf.{name}", "version": 99}}': f"{name} format version 99, this release reads {version}",
        f'{{"format": "adacc_hf.{name}", "version": {version}}}': f"is a damaged {name}",
    }.items():
        path.write_text(text)
        with pytest.raises(AdaccError, match=message):
            kind.load(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.update(blocks=[["h.0", 17]]),
        lambda record: record["plans"][0].pop("kind"),
        lambda record: record["plans"][0].update(choices=[[0, {"action": "forget"}]]),
        lambda record: record.update(predicted_peak_bytes=None),
        lambda record: record.update(predicted_peak_bytes=float("inf")),
        lambda record: record.update(facts=None),
    ],
    ids=["plan", "kind", "action", "peak", "infinite", "facts"],
)
def test_a_damaged_file_is_refused(policy, tmp_path, damage):
    record = policy.to_json()
    damage(record)
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(record))
    with pytest.raises(PolicyMismatchError, match="is a damaged policy file"):
        Policy.load(path)


def test_actions_are_parsed_and_unknown_ones_refused():
    assert Action.parse("compress") is Action.parse(Action.COMPRESS) is Action.COMPRESS
    with pytest.raises(ValueError, match=r"action='drop' is unknown: choose from retain, compress, recompute"):
        Action.parse("drop")
