"""Phases: errors that a phase leaves to the loop, and the phase of a policy that is passed in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from run_builders import InOrder, failing, run_lengths
from transformers import Trainer

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.adapt import phases
from adacc_hf.adapt.phases import MOST_STEPS, FullRecompute, skipped_on_any_rank
from adacc_hf.artifacts.errors import UncalledBlocksError
from adacc_hf.artifacts.units import format_bytes


def run_out_of_memory(make_trainer, callback):
    with pytest.raises(torch.OutOfMemoryError, match=r"^no room in forward$"):
        make_trainer([callback], trainer_class=failing((4, "forward")), max_steps=6).train()


def test_without_retries_the_error_is_the_model_s_own(make_trainer, lossless, caplog):
    callback = AdaccCallback(**lossless, retry_out_of_memory=False)
    run_out_of_memory(make_trainer, callback)
    assert caplog.text.count("when it ran out") == 1


def test_an_error_within_the_table_leaves_the_out_of_memory_error(make_trainer, lossless, caplog, monkeypatch):
    monkeypatch.setattr("adacc_hf.adapt.run_state.memory_table", lambda *_: 1 / 0)
    callback = AdaccCallback(**lossless, retry_out_of_memory=False)
    run_out_of_memory(make_trainer, callback)
    assert "no table of the device's memory: ZeroDivisionError" in caplog.text


def test_the_table_has_the_policy_of_the_failed_size(make_trainer, lossless, caplog):
    callback = AdaccCallback(**lossless, retry_out_of_memory=False)
    with pytest.raises(torch.OutOfMemoryError):
        run_lengths(
            make_trainer,
            [16] * 4 + [32] * 2,
            [callback],
            trainer_class=type("F", (failing((6, "forward")), InOrder), {}),
        )
    (table,) = [record.getMessage() for record in caplog.records if "when it ran out" in record.getMessage()]
    (longer,) = [event for event in callback.history if event.get("reason", "").startswith("for batches of")]
    assert f"{format_bytes(longer['peak_bytes'])}" in table


@pytest.mark.parametrize("skipped", [(0,), (0, 1, 2), (3,)], ids=str)
@pytest.mark.parametrize("place", ["training_step", "compute_loss"])
def test_batches_that_the_loop_skips_are_no_sign_of_a_patched_model(train, lossless, skipped, place):
    class Skipping(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            if place == "training_step" and self.state.global_step in skipped:
                return torch.tensor(0.0)
            return super().training_step(model, inputs, *args, **kwargs)

        def compute_loss(self, model, inputs, *args, **kwargs):
            if place == "compute_loss" and self.state.global_step in skipped:
                return 0.0 * model.get_input_embeddings().weight.sum()
            return super().compute_loss(model, inputs, *args, **kwargs)

    callback = AdaccCallback(**lossless)
    run = train([callback], trainer_class=Skipping, max_steps=6)
    run.assert_equals(train(trainer_class=Skipping, max_steps=6))
    assert callback.policy is not None


@pytest.mark.parametrize("skipped_elsewhere", [[], ["h.1"]])
def test_a_batch_of_which_another_rank_skips_a_block_is_not_profiled(monkeypatch, skipped_elsewhere):
    monkeypatch.setattr(phases, "gather_from_all_ranks", lambda mine: [mine, skipped_elsewhere])
    installation = SimpleNamespace(blocks=["h.0", "h.1"], skipped_blocks=list)
    assert phases.skipped_on_any_rank(installation, num_waited=0) == skipped_elsewhere


def test_a_profile_waits_for_a_batch_that_trains_every_block(make_model, monkeypatch, caplog):
    """Waiting ends at MOST_STEPS: the blocks that all ranks leave out are not waited for."""
    model, tokens, config = make_model(), torch.arange(8)[None], AdaccConfig()
    waiting = FullRecompute(model, config)
    blocks = model.transformer.h
    model.transformer.h = blocks[:1]
    waiting.begin_step()
    model(tokens, labels=tokens).loss.backward()
    assert skipped_on_any_rank(waiting, MOST_STEPS - 1) == ["transformer.h.1"]
    assert skipped_on_any_rank(waiting, MOST_STEPS) == []
    assert f"transformer.h.1 first, were not called by the last of {MOST_STEPS} steps" in caplog.text
    waiting.begin_step()
    with pytest.raises(UncalledBlocksError, match="2 of 2 blocks"):  # nothing is left to make a policy for
        skipped_on_any_rank(waiting, MOST_STEPS)
    model.transformer.h = blocks
    waiting.begin_step()
    model(tokens, labels=tokens).loss.backward()
    assert skipped_on_any_rank(waiting, 0) == []
    # Another rank's batch may leave blocks out. All ranks have the same error.
    monkeypatch.setattr(phases, "gather_from_all_ranks", lambda own: [own, ["transformer.h.1"], ["transformer.h.0"]])
    assert skipped_on_any_rank(waiting, 0) == ["transformer.h.0", "transformer.h.1"]
    with pytest.raises(UncalledBlocksError, match=r"transformer\.h\.0.*not called by the last of"):
        skipped_on_any_rank(waiting, MOST_STEPS)
    waiting.remove()
