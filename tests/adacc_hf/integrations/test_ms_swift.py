"""AdaccCallback in a stand-in for ms-swift, with the interface of ms-swift 4.6.

The stand-in follows swift/callbacks/mapping.py and swift/trainers/mixin.py at commit 3602360a562 of 22 August 2026:
a Trainer makes each callback named in `--callbacks` by `callbacks_map[name](args, trainer)` before it exists itself,
makes all of torch's checkpoints reentrant, and switches checkpointing on in the model instead of in the arguments.
"""

import importlib
import sys
from functools import wraps
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from adacc_hf import AdaccCallback
from adacc_hf.torch_glue.compat import CHECKPOINTING, switch_checkpointing

LOSSLESS = {"memory_budget": 0.5, "actions": ("retain", "recompute")}


@pytest.fixture
def callbacks_map(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make the stand-in importable as swift, for this test alone. Return its callbacks by name."""
    module = ModuleType("swift.callbacks")
    module.callbacks_map = {}
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "adacc_hf.integrations.ms_swift", raising=False)
    yield module.callbacks_map
    sys.modules.pop("adacc_hf.integrations.ms_swift", None)


def register(**settings: Any) -> None:
    importlib.import_module("adacc_hf.integrations.ms_swift").register(**settings)


class SwiftTrainer(Trainer):
    """Trainer that makes its callbacks, and handles checkpointing, as ms-swift's Trainers do."""

    def __init__(self, callbacks_map: dict[str, Any], names: list[str], args: TrainingArguments, **arguments: Any):
        callbacks = [callbacks_map[name](args, self) for name in names]
        super().__init__(args=args, callbacks=callbacks, **arguments)

    def train(self) -> list[float]:
        switch_checkpointing(self.model, on=True)
        self.model.enable_input_require_grads()
        setattr(self.args, CHECKPOINTING, False)
        super().train()
        return [log["loss"] for log in self.state.log_history if "loss" in log]


@pytest.fixture
def always_reentrant(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torch's checkpoint as ms-swift does. Return a list that gets an item at each call."""
    original = torch.utils.checkpoint.checkpoint
    calls: list[str] = []

    @wraps(original)
    def checkpoint(*args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
        calls.append("checkpoint")
        return original(*args, use_reentrant=True, **kwargs)

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", checkpoint)
    return calls


def make_trainer(folder: Any, callbacks_map: dict[str, Any], names: list[str]) -> SwiftTrainer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    ids = torch.randint(0, 61, (16, 16), generator=torch.Generator().manual_seed(1))
    settings = {"max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "no"}
    args = TrainingArguments(str(folder), report_to="none", use_cpu=True, disable_tqdm=True, **settings)
    dataset = [{"input_ids": row, "labels": row} for row in ids]
    return SwiftTrainer(callbacks_map, names, args, model=model, train_dataset=dataset)


@pytest.mark.usefixtures("one_thread", "always_reentrant")
def test_a_run_keeps_to_the_budget_bit_for_bit(callbacks_map, tmp_path, caplog) -> None:
    register(**LOSSLESS)
    trainer = make_trainer(tmp_path, callbacks_map, ["adacc"])
    losses = trainer.train()
    (callback,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, AdaccCallback)]
    assert callback.policy.predicted_stored_bytes <= 0.5 * callback.profile.plain_stored_bytes
    assert losses == make_trainer(tmp_path, callbacks_map, []).train()
    lines = [record.getMessage() for record in caplog.records if "replaces checkpointing" in record.getMessage()]
    assert len(lines) == 1
    assert "--gradient_checkpointing false in ms-swift" in lines[0]


@pytest.mark.usefixtures("one_thread")
def test_full_recomputation_is_not_made_reentrant(callbacks_map, always_reentrant, tmp_path) -> None:
    """A policy whose blocks all run under torch's checkpoint takes torch's own function."""
    from adacc_hf.solve.simple_policies import checkpoint_policy

    register(policy=checkpoint_policy)
    trainer = make_trainer(tmp_path, callbacks_map, ["adacc"])
    losses = trainer.train()
    (callback,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, AdaccCallback)]
    assert callback.policy.block_counts() == {"checkpoint": 2}
    assert always_reentrant == []
    plain_losses = make_trainer(tmp_path, callbacks_map, []).train()
    assert always_reentrant, "the stand-in's model has to run under the replaced function without a policy"
    assert losses == plain_losses


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"memory_bugdet": "20GiB"}, TypeError, "memory_bugdet='20GiB' is not a setting .*: choose memory_budget"),
        ({"memory_budget": 2.0}, ValueError, r"memory_budget=2.0 is outside \(0, 1\]"),
        ({"policy": {}}, TypeError, "has type dict"),
    ],
)
def test_settings_are_checked_when_they_are_registered(callbacks_map, settings, error, message) -> None:
    with pytest.raises(error, match=message):
        register(**settings)
    assert callbacks_map == {}
