"""Checks at the start of a run: settings that are refused, or reported once."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from transformers import TrainerCallback

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.callbacks.preconditions import refuse_host_memory, refuse_offload
from adacc_hf.torch_glue.compat import CHECKPOINTING


class TrainInTheMidst(TrainerCallback):
    """Callback that trains with another Trainer in a step of the first one."""

    def __init__(self, inner_trainer):
        self.inner_trainer = inner_trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.inner_trainer.train()


def test_two_callbacks_in_one_trainer_are_refused(make_trainer, lossless, traces):
    trainer = make_trainer([AdaccCallback(**lossless), AdaccCallback(**lossless)])

    def on_blocks():
        return {
            name: attributes
            for name, attributes in traces(trainer)["modules"].items()
            if name.startswith("transformer.h")
        }

    hooks_before = on_blocks()
    with pytest.raises(ValueError, match=r"2 callbacks of class AdaccCallback.*leave one of them"):
        trainer.train()
    assert on_blocks() == hooks_before


def test_one_callback_in_two_runs_at_once_is_refused(make_trainer, lossless):
    callback = AdaccCallback(**lossless)
    inner = make_trainer([callback], max_steps=3)
    with pytest.raises(RuntimeError, match="in use by another Trainer's run"):
        make_trainer([callback, TrainInTheMidst(inner)], max_steps=6).train()
    inner.train()
    assert callback.policy is not None, "after the first run the callback may start another one"


class ShareSequences(TrainerCallback):
    """Callback that presents the Trainer, once its model is prepared, as sharing each sequence among ranks."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def on_train_begin(self, args, state, control, **kwargs):
        self.monkeypatch.setattr(Accelerator, "parallelism_config", ParallelismConfig(cp_size=2))


def test_ranks_that_share_a_sequence_are_refused(train, lossless, monkeypatch):
    with pytest.raises(
        ValueError, match=r"cp_size=2: in ring attention .*; set cp_size=1 .* by Ulysses instead \(sp_size=2"
    ):
        train([ShareSequences(monkeypatch), AdaccCallback(**lossless)])


@pytest.mark.parametrize("is_on", [True, False])
def test_a_policy_in_place_of_checkpointing_is_said_once(train, lossless, caplog, is_on):
    """TRL's arguments switch checkpointing on by default. The log line has the setting's name in Transformers."""
    train([AdaccCallback(**lossless)], **{CHECKPOINTING: is_on})
    log_lines = [record.getMessage() for record in caplog.records if "checkpointing is on" in record.getMessage()]
    assert len(log_lines) == is_on
    assert all("a policy replaces checkpointing" in text and "memory_budget=0.6" in text for text in log_lines)
    assert all(f"switch checkpointing off to avoid this warning: {CHECKPOINTING}=False" in text for text in log_lines)


def test_data_parallel_is_refused():
    args = SimpleNamespace(n_gpu=2, resume_from_checkpoint=None)
    with pytest.raises(ValueError, match=r"n_gpu=2: nn\.DataParallel .* torchrun, or set CUDA_VISIBLE_DEVICES"):
        AdaccCallback().on_train_begin(args, SimpleNamespace(global_step=0), None, model=torch.nn.Identity())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        (f"{CHECKPOINTING}_kwargs", {"offload": True}),
        ("gradient_checkpointing_kwargs", {"offload": True, "every_n_layers": 2}),
        ("activation_offloading", True),
    ],
)
def test_offloading_by_others_is_refused_with_our_setting(setting, value):
    with pytest.raises(ValueError, match=rf'{setting}=.*: AdaccCallback decides .*AdaccConfig\(host_memory="64GiB"\)'):
        refuse_offload(SimpleNamespace(**{setting: value}))


@pytest.mark.parametrize("value", [None, {}, {"offload": False}, {"use_reentrant": False}, "{}"])
def test_other_settings_of_checkpointing_are_not_refused(value):
    refuse_offload(SimpleNamespace(**{f"{CHECKPOINTING}_kwargs": value, "activation_offloading": False}))


def test_a_run_with_offload_is_refused(train, lossless):
    if CHECKPOINTING == "gradient_checkpointing":
        pytest.skip("this version of Transformers has no offload")
    with pytest.raises(ValueError, match=r"activation_checkpointing_kwargs=\{'offload': True\}"):
        train([AdaccCallback(**lossless)], **{f"{CHECKPOINTING}_kwargs": {"offload": True}})


def test_host_memory_in_compiled_graphs_is_refused():
    refuse_host_memory(AdaccConfig())
    with pytest.raises(ValueError, match=r"host_memory='1GiB' with torch_compile=True: .*; set host_memory=None, or"):
        refuse_host_memory(AdaccConfig(host_memory="1GiB"))


def test_other_ways_of_compiling_are_refused(make_trainer, lossless) -> None:
    with pytest.raises(ValueError, match="torch_compile_backend='eager'"):
        make_trainer([AdaccCallback(**lossless)], torch_compile=True, torch_compile_backend="eager").train()
