"""Checkpoints contain the run's state. A resumed run records its first step, and keeps the policies that fit."""

from __future__ import annotations

import builtins
import errno
import json
import logging
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from trainer_builders import LOSSLESS, tiny_trainer
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from adacc_hf import AdaccCallback, AdaccConfig, Policy, Profile
from adacc_hf.adapt.checkpoint_files import drop_files, load_from_checkpoint, save_in_checkpoint
from adacc_hf.artifacts.files import HISTORY_FILE, POLICY_FILE, PROFILE_FILE, STATE_FILE
from adacc_hf.callbacks.trainer_guard import callbacks_of
from adacc_hf.price.live_step import LiveStep
from adacc_hf.solve.simple_policies import uniform_policy

SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


@pytest.fixture
def profilings(monkeypatch):
    """Return a list that gets one item whenever a callback profiles."""
    calls = []

    def counting(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    original = LiveStep.profile
    monkeypatch.setattr(LiveStep, "profile", counting)
    return calls


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory) -> Path:
    """Return the folder of a lossless run of 6 steps. Tests get copies."""
    folder = tmp_path_factory.mktemp("trained")
    tiny_trainer(folder, [AdaccCallback(**LOSSLESS)], **SAVING).train()
    return folder


@pytest.fixture
def checkpoint(trained_folder, tmp_path) -> Path:
    """Return the checkpoint of step 3 of a lossless run of 6 steps."""
    shutil.copytree(trained_folder, tmp_path / "run")
    return tmp_path / "run" / "checkpoint-3"


def test_a_checkpoint_carries_its_policy_and_profile(train, lossless, tmp_path):
    callback = AdaccCallback(**lossless)
    train([callback], **SAVING)
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-3", tmp_path / "run" / "checkpoint-6"):
        assert Policy.load(folder / POLICY_FILE) == callback.policy
        assert Profile.load(folder / PROFILE_FILE) == callback.profile


def test_a_checkpoint_from_before_the_policy_resumes(train, lossless, tmp_path, late_policy):
    settings = {**SAVING, "save_steps": 1}
    uninterrupted = train([AdaccCallback(**lossless)], **settings)
    assert not (tmp_path / "run" / "checkpoint-1" / POLICY_FILE).exists()
    train([AdaccCallback(**lossless)], resume=str(tmp_path / "run" / "checkpoint-1"), **settings).assert_equals(
        uninterrupted
    )


def test_a_given_policy_goes_before_the_checkpoint_s(train, checkpoint, profilings):
    explicit_policy = uniform_policy(Profile.load(checkpoint / PROFILE_FILE), "retain")
    callback = AdaccCallback(policy=explicit_policy)
    train([callback], resume=str(checkpoint), **SAVING)
    assert callback.policy == explicit_policy


def test_a_resumed_run_goes_on_tracking(train, checkpoint, tmp_path):
    compress = {"memory_budget": 0.35, "actions": ("retain", "compress"), "min_compress_bytes": 0, "tracking": 1}
    folder = str(tmp_path / "lossy")
    train([AdaccCallback(**compress)], output_dir=folder, **SAVING)
    callback = AdaccCallback(**compress)
    train([callback], resume=f"{folder}/checkpoint-3", output_dir=folder, **SAVING)
    assert "tracking" in {event["event"] for event in callback.history}


def test_what_was_switched_off_comes_back(train, checkpoint, lossless):
    record = json.loads((checkpoint / STATE_FILE).read_text())
    switched_off = [["transformer.h.0", "attn.c_attn:addmm", "channel_int4"]]
    record["corrections"]["switched_off"] = switched_off
    (checkpoint / STATE_FILE).write_text(json.dumps(record))
    callback = AdaccCallback(**lossless)
    train([callback], resume=str(checkpoint), **SAVING)
    again = load_from_checkpoint(checkpoint.parent / "checkpoint-6", AdaccConfig(**LOSSLESS))
    assert again.corrections["switched_off"] == switched_off


DAMAGE = {
    "empty": "",
    "cut": '{"format": "adacc_hf.policy", "version": 2, "plans": [',
    "no-policy": '{"hello": 1}',
    "no-plans": '{"format": "adacc_hf.policy", "version": 2}',
    "binary": "\x00\x01",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_named_and_not_used(train, checkpoint, lossless, caplog, damage):
    (checkpoint / STATE_FILE).write_text(DAMAGE[damage])
    with caplog.at_level(logging.INFO):
        assert load_from_checkpoint(checkpoint, AdaccConfig(**LOSSLESS)) is None
    assert [STATE_FILE in message for message in caplog.messages if "solving again" in message] == [True]


class FullDisk(TrainerCallback):
    """A disk on which files with some names cannot be written until step 6."""

    def __init__(self, monkeypatch, names=("adacc",), module=os, function="replace", error=errno.ENOSPC):
        self.names, self.error, self.original = names, error, getattr(module, function)
        monkeypatch.setattr(module, function, self.write)

    def write(self, source, *target, **options):
        path = str((target or (source,))[0] if self.original is os.replace else source)
        if any(name in Path(path).name for name in self.names):
            raise OSError(self.error, os.strerror(self.error), path)
        return self.original(source, *target, **options)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            self.names = ()


def lines_of(caplog, text):
    return [record for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize(
    "failing",
    [{"names": (POLICY_FILE, HISTORY_FILE)}, {"module": builtins, "function": "open", "error": errno.EROFS}],
    ids=["full for two files", "read-only"],
)
def test_files_that_cannot_be_written_do_not_end_the_run(train, lossless, tmp_path, monkeypatch, caplog, failing):
    """A full disk loses the files and no step. Once there is room, the run's files are written."""
    settings = {**SAVING, "save_steps": 2}
    plain = train(output_dir=str(tmp_path / "plain"), **settings)
    callback = AdaccCallback(**lossless)
    train([callback, FullDisk(monkeypatch, **failing)], **settings).assert_equals(plain)
    (record,) = lines_of(caplog, "could not be written")
    assert f"run ([Errno {failing.get('error', errno.ENOSPC)}]" in record.getMessage()
    assert record.exc_info is None
    assert not list((tmp_path / "run").rglob(".adacc*"))
    assert Policy.load(tmp_path / "run" / POLICY_FILE) == callback.policy
    assert json.loads((tmp_path / "run" / HISTORY_FILE).read_text()) == callback.history
    checkpoint = tmp_path / "run" / "checkpoint-2"
    train([AdaccCallback(**lossless)], resume=str(checkpoint), **settings).assert_equals(plain)


class Terminated(TrainerCallback):
    """A SIGTERM at an event of the fourth step or later, upon which the Trainer writes a checkpoint and stops."""

    def __init__(self, event):
        self.trainer: Trainer | None = None
        setattr(self, event, self.terminate)

    def terminate(self, args, state, control, **kwargs):
        if state.global_step >= 3 and self.trainer is not None:
            (manager,) = [other.jit_manager for other in callbacks_of(self.trainer) if hasattr(other, "jit_manager")]
            self.trainer, manager.kill_wait = None, 0
            os.kill(os.getpid(), signal.SIGTERM)
            while not manager.is_checkpoint_requested:
                time.sleep(0.01)


@pytest.mark.parametrize(
    ("event", "save_strategy"), [("on_step_begin", "steps"), ("on_pre_optimizer_step", "no"), ("on_epoch_end", "no")]
)
def test_a_checkpoint_upon_sigterm_has_the_policy(
    make_trainer, train, lossless, tmp_path, profilings, event, save_strategy
):
    settings = {"max_steps": 20, "logging_steps": 1, "save_steps": 2}
    terminated, callback = Terminated(event), AdaccCallback(**lossless)
    terminated.trainer = make_trainer(
        [terminated, callback], enable_jit_checkpoint=True, save_strategy=save_strategy, **settings
    )
    terminated.trainer.train()
    assert len(profilings) == 1
    checkpoint = get_last_checkpoint(tmp_path / "run")
    resumed = AdaccCallback(**lossless)
    train([resumed], resume=checkpoint, **settings)
    assert resumed.policy.plans == callback.policy.plans


def test_a_checkpoint_has_nothing_of_an_earlier_run_in_its_folder(train, lossless, tmp_path, late_policy):
    train([AdaccCallback(**lossless)], **{**SAVING, "save_steps": 1})
    folder = tmp_path / "run"
    policy = (folder / "checkpoint-3" / POLICY_FILE).read_text()
    for step, name in ((1, POLICY_FILE), (1, STATE_FILE), (3, STATE_FILE)):
        (folder / f"checkpoint-{step}" / name).write_text(policy)
    train([AdaccCallback(**lossless)], **{**SAVING, "save_steps": 1})
    assert not list((folder / "checkpoint-1").glob("adacc_*"))
    assert sorted(path.name for path in (folder / "checkpoint-3").glob("adacc_*")) == sorted(
        [POLICY_FILE, PROFILE_FILE, STATE_FILE]
    )


@pytest.mark.parametrize("num_written", range(3))
def test_a_save_that_is_cut_short_is_not_resumed(checkpoint, monkeypatch, num_written):
    """Without the state a run would use codecs that were switched off."""
    config = AdaccConfig(**LOSSLESS)
    saved, profile = load_from_checkpoint(checkpoint, config), Profile.load(checkpoint / PROFILE_FILE)
    writes_left = [num_written]
    drop_files(checkpoint)

    def interrupted_replace(*args):
        if not writes_left[0]:
            raise KeyboardInterrupt
        writes_left[0] -= 1
        original(*args)

    original = os.replace
    monkeypatch.setattr(os, "replace", interrupted_replace)
    with pytest.raises(KeyboardInterrupt):
        save_in_checkpoint(checkpoint, saved, profile)
    monkeypatch.undo()
    assert len(list(checkpoint.glob("adacc_*"))) == num_written
    assert load_from_checkpoint(checkpoint, config) is None
