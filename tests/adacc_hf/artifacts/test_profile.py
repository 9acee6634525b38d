"""Profiles as records: the stored bytes of plain training, and files that are complete or refused."""

import json

import pytest

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.profile import Profile


@pytest.fixture
def profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=2, attention="eager")


def test_what_is_saved_is_loaded(profile, tmp_path):
    path = tmp_path / "runs" / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile


def test_plain_training_stores_what_autograd_saves(profile):
    kind = profile.kinds[0]
    saved = sum(kind.values[value].nbytes for value in {*kind.slots} if kind.values[value].shared is None)
    assert profile.shared[0].saved
    assert profile.plain_stored_bytes == 2 * saved + profile.shared[0].nbytes + profile.outside_stored_bytes


def test_shared_tensors_that_autograd_does_not_save_are_not_plain_training_s(profile_of, tape_builder):
    from adacc_hf.artifacts.profile import Shared

    tape = tape_builder()
    start, mask = tape.value("input", 8), tape.value("mask", 30, shared=0)
    tape.operator("f", [start, mask], [("a", 10)], ms=1.0, save=[-1])
    profile = profile_of([tape.kind()], [0, 0], [Shared(name="mask", nbytes=30, saved=False)])
    assert profile.plain_stored_bytes == 2 * 10 + 100


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record["kinds"][0].pop("slots"),
        lambda record: record["kinds"][0]["values"][0].pop("nbytes"),
        lambda record: record["kinds"][0]["operators"][0].update(colour="red"),
        lambda record: record.update(blocks=None),
        lambda record: record.update(kinds=[]),
    ],
    ids=["slots", "nbytes", "colour", "blocks", "kinds"],
)
def test_a_damaged_file_is_refused(profile, tmp_path, damage):
    path = tmp_path / "profile.json"
    profile.save(path)
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    with pytest.raises(AdaccError, match="is a damaged profile"):
        Profile.load(path)
