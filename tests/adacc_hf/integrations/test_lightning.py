"""AdaccLightningCallback: training equal to Lightning's, policies, checkpoints, failures and refusals."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from adacc_hf import AdaccSession  # noqa: E402
from adacc_hf.integrations.lightning import AdaccLightningCallback  # noqa: E402

pytestmark = [
    # Lightning advises on workers, on validation and on checkpoints, and uses names that torch has deprecated.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

HALF = {"memory_budget": 0.5, "actions": ("retain", "recompute"), "head": "plain"}


class PlannedError(Exception):
    """Error that a test raises on purpose."""


def tiny_model(num_layers: int = 3) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": num_layers, "n_head": 4, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).train()


def batch_of(seed: int, num_tokens: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 61, (8, num_tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def batches(num: int, lengths: tuple[int, ...] = (16,)) -> list[dict[str, torch.Tensor]]:
    return [batch_of(seed, lengths[seed % len(lengths)]) for seed in range(num)]


class Module(lightning.LightningModule):
    """LightningModule around a small GPT-2 that records its losses."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.model = tiny_model()
        self.losses: list[float] = []
        self.val_losses: list[float] = []
        self.fail_at = fail_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fail_at:
            raise PlannedError
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_losses.append(self.model(**batch).loss.item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4)}


class CountedModule(Module):
    """Module that notes the calls of its steps, of its model and of the optimizer in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.model.register_forward_pre_hook(lambda *_: self.calls.append("forward"))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls.append(f"step {batch_idx}")
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("optimizer")
        super().optimizer_step(*args, **kwargs)

    def on_after_backward(self) -> None:
        self.calls.append("after backward")


class PolicyPerStep(lightning.Callback):
    """Callback that records, at the end of each micro-batch, if the callback has a policy."""

    def __init__(self, callback: AdaccLightningCallback) -> None:
        self.callback = callback
        self.has_policy: list[bool] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.has_policy.append(self.callback.policy is not None)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Apply `one_thread` to all tests of this file, because they train small models."""


@pytest.fixture
def fit(tmp_path):
    """Return `fit(callbacks=(), module=None, loader=None, ckpt_path=None, **settings)`, which trains and returns
    (module, trainer)."""

    def run(callbacks=(), module=None, loader=None, ckpt_path=None, **settings):
        module = module or Module()
        trainer = make_lightning_trainer(tmp_path, callbacks, **settings)
        torch.manual_seed(1)
        data = batches(12) if loader is None else loader
        trainer.fit(
            module, DataLoader(data, batch_size=None), DataLoader(batches(2), batch_size=None), ckpt_path=ckpt_path
        )
        return module, trainer

    return run


def make_lightning_trainer(folder: Path, callbacks: Any = (), **settings: Any) -> Any:
    fields = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 6,
        "logger": False,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return lightning.Trainer(callbacks=list(callbacks), **{**fields, **settings})


def assert_equal_training(module: Module, plain: Module) -> None:
    """Assert that losses and weights are bit-equal."""
    assert module.losses
    assert module.losses == plain.losses
    assert module.val_losses == plain.val_losses
    weights = plain.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())


def hooks_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of all submodules, with hooks by their number."""
    attributes = {}
    for name, submodule in module.named_modules():
        for key, value in vars(submodule).items():
            attributes[f"{name}.{key}"] = len(value) if key.endswith("_hooks") else type(value).__name__
    return attributes


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_is_equal_to_lightnings(fit, precision, accumulate):
    settings = {
        "precision": precision,
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": 1.0,
        "limit_val_batches": 2,
        "val_check_interval": 3,
    }
    plain, _ = fit(**settings)
    callback = AdaccLightningCallback(**HALF)
    watch = PolicyPerStep(callback)
    module, trainer = fit([callback, watch], **settings)
    assert trainer.global_step == 6
    assert module.val_losses
    assert_equal_training(module, plain)
    assert callback.policy.action_counts()["recompute"] > 0
    assert watch.has_policy == [False, False, True, True, True, True]
    assert [event["step"] for event in callback.history if event["event"] == "policy"] == [2]
    assert callback.session.num_steps == 6
    assert callback.session.state.loop.num_micro == accumulate
    dtypes = {value.dtype for kind in callback.profile.kinds for value in kind.values}
    assert ("bfloat16" in dtypes) == (precision == "bf16-mixed")


def session_events(loader: list[dict[str, torch.Tensor]]) -> list[tuple[int, str]]:
    """Return steps and kinds of the events of AdaccSession in a loop that trains on `loader`."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = AdaccSession(model, optimizer, **HALF)
    for batch in loader:
        with session.micro_batch(batch):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    session.close()
    return [(event["step"], event["event"]) for event in session.history]


def test_each_length_gets_a_policy(fit):
    loader = batches(12, lengths=(16, 16, 24))
    plain, _ = fit(loader=loader, max_steps=12)
    callback = AdaccLightningCallback(**HALF)
    policies = []

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *args) -> None:
            choice = getattr(callback.session.phase, "choice", None)  # there is none before the first policy
            policies.append(0 if choice is None else len(choice.records))

    module, _ = fit([callback, Watch()], loader=loader, max_steps=12)
    assert_equal_training(module, plain)
    assert policies[1] == 1
    assert policies[-1] == 2
    assert [(event["step"], event["event"]) for event in callback.history] == session_events(loader)
    # Lightning zeroes gradients after the forward, and the prediction counts them. Which policy is chosen depends on
    # measured times, and with some the peak is 0.7 % higher: prices are corrected from 1 % on (PEAK_TOLERANCE).
    memory_events = [event for event in callback.history if event["event"] == "memory"]
    assert all(event["measured_peak_bytes"] <= 1.01 * event["peak_bytes"] for event in memory_events), memory_events
    assert memory_events


def test_figures_are_logged_at_the_logging_steps(fit, tmp_path, monkeypatch):
    callback, logged, log_dict = AdaccLightningCallback(**HALF), [], Module.log_dict
    monkeypatch.setattr(Module, "log_dict", lambda *args, **where: logged.append(args) or log_dict(*args, **where))
    _, trainer = fit([callback], logger=CSVLogger(tmp_path), log_every_n_steps=3)
    assert {"adacc/stored_gib", "adacc/peak_gib", "adacc/fallback_steps"} <= trainer.logged_metrics.keys()
    header, *rows = (Path(trainer.log_dir) / "metrics.csv").read_text().splitlines()
    assert "adacc/overhead_ms" in header.split(",")
    assert len(rows) == len(logged) == 2
    assert json.loads((Path(trainer.log_dir) / "adacc_history.json").read_text()) == callback.history


@pytest.mark.parametrize("is_after_training", [False, True], ids=["by-ModelCheckpoint", "after-training"])
def test_a_resumed_run_continues_with_the_policies_of_its_checkpoint(fit, tmp_path, is_after_training):
    first = AdaccLightningCallback(**HALF)
    if is_after_training:
        _, trainer = fit([first], max_steps=3)
        path = tmp_path / "after.ckpt"
        trainer.save_checkpoint(path)
    else:
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        fit([first, saver], max_steps=4, enable_checkpointing=True)
        path = tmp_path / "step=3.ckpt"
    files = torch.load(path, weights_only=True)["callbacks"]["AdaccLightningCallback"]["files"]
    assert {"adacc_policy.json", "adacc_profile.json", "adacc_state.json"} <= files.keys()
    resumed = AdaccLightningCallback(**HALF)
    module, _ = fit([resumed], ckpt_path=path)
    assert (resumed.policy.plans, resumed.policy.blocks) == (first.policy.plans, first.policy.blocks)
    assert [event["step"] for event in resumed.history if event["event"] == "policy"] == [2, 5]
    assert resumed.session.num_steps == 6
    assert len(module.losses) == 3


@pytest.mark.parametrize("step", [0, 3])
def test_a_failed_run_leaves_no_trace(fit, step):
    expected, module = Module(fail_at=step), Module(fail_at=step)
    callback = AdaccLightningCallback(**HALF)
    with pytest.raises(PlannedError):
        fit(module=expected)
    with pytest.raises(PlannedError):
        fit([callback], module=module)
    assert hooks_of(module) == hooks_of(expected)


def test_a_finished_run_leaves_no_trace(fit):
    plain, _ = fit()
    module, trainer = fit([AdaccLightningCallback(**HALF)])
    assert hooks_of(module) == hooks_of(plain)
    optimizer = trainer.optimizers[0]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    copy.deepcopy(module)


class TwoModels(Module):
    """LightningModule with a teacher that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = tiny_model(2).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            self.teacher(**batch)
        return super().training_step(batch, batch_idx)


def test_one_of_two_models_has_to_be_named(fit):
    with pytest.raises(ValueError, match=r"2 transformers.PreTrainedModel submodules \(model, teacher\).*model=module"):
        fit([AdaccLightningCallback(**HALF)], module=TwoModels())
    with pytest.raises(ValueError, match="is not a submodule of TwoModels"):
        fit([AdaccLightningCallback(**HALF, model=tiny_model())], module=TwoModels())
    module = TwoModels()
    callback = AdaccLightningCallback(**HALF, model=module.model)
    fit([callback], module=module)
    assert len(callback.policy.blocks) == 3
    assert_equal_training(module, fit(module=TwoModels())[0])


class LoraModule(Module):
    """LightningModule around a PeftModel."""

    def __init__(self) -> None:
        super().__init__()
        peft = pytest.importorskip("peft")
        torch.manual_seed(2)
        self.model = peft.get_peft_model(self.model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"]))


def test_the_model_with_adapters_is_the_outer_one(fit):
    callback = AdaccLightningCallback(**HALF)
    module, _ = fit([callback], module=LoraModule())
    assert callback.session.state.model is module.model
    assert callback.policy.action_counts()["recompute"] > 0
    assert_equal_training(module, fit(module=LoraModule())[0])


def test_out_of_memory_ends_the_run_with_advice(fit, caplog):
    class OutOfMemory(Module):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    module = OutOfMemory()
    with pytest.raises(torch.OutOfMemoryError):
        fit([AdaccLightningCallback(**HALF)], module=module)
    assert "out of memory in step 3, which AdaccLightningCallback cannot repeat" in caplog.text
    assert not module.model._forward_pre_hooks


def test_manual_optimization_is_refused(fit):
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"Module\.automatic_optimization=False"):
        fit([AdaccLightningCallback(**HALF)], module=module)


def test_a_second_callback_is_refused(fit):
    class Other(AdaccLightningCallback):
        """Callback with a state key of its own."""

    with pytest.raises(ValueError, match="2 AdaccLightningCallbacks"):
        fit([AdaccLightningCallback(**HALF), Other(**HALF)])


@pytest.mark.parametrize("budget", [0.5, "2MiB"])
def test_the_users_code_is_called_as_in_plain_training(fit, budget):
    runs = []
    for callbacks in ([], [AdaccLightningCallback(**HALF | {"memory_budget": budget})]):
        loader = CountedBatches(8)
        module, _ = fit(callbacks, module=CountedModule(), loader=loader, accumulate_grad_batches=2)
        runs.append((module.calls, loader.calls))
    assert runs[0] == runs[1]
    assert runs[0][0].count("forward") == runs[0][0].count("after backward") > 0


class CountedBatches(torch.utils.data.Dataset):
    """Batches that note when they are read."""

    def __init__(self, num: int) -> None:
        self.batches, self.calls = batches(num, (16, 24)), []

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.calls.append(index)
        return self.batches[index]
