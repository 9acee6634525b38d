"""AdaccLightningCallback: adapter of AdaccSession for Lightning's Trainer. Needs the package `lightning`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from transformers import PreTrainedModel

from adacc_hf.adapt.run_profiler import TrainingLoop
from adacc_hf.adapt.run_state import PolicySource
from adacc_hf.adapt.session import AdaccSession, SessionAdapter
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.torch_glue.memory import is_out_of_memory

log = logging.getLogger(__name__)

OUT_OF_MEMORY = (
    "Adacc: out of memory in step %d, which AdaccLightningCallback cannot repeat: set a smaller memory_budget than %r, "
    "or write a loop of your own with AdaccSession.run, which repeats the step under a tighter policy"
)
SHARDED = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)
"""Lightning's strategies that shard the parameters over the ranks."""
FILES = "files"
"""Key of the session's files in the callback's state. The value at this key is a dict from file names to bytes."""


class AdaccLightningCallback(SessionAdapter, Callback):
    """Callback that trains a language model in a LightningModule within a memory budget, as AdaccCallback does.

    The callback needs automatic optimization with one optimizer, on one device or with DDP. The callback logs
    AdaccCallback's metrics every `log_every_n_steps` steps. A checkpoint contains the policies and their state, and
    `trainer.fit(ckpt_path=...)` resumes with them. When training ends or fails, the model is restored. If memory runs
    out, the step is not repeated, because Lightning's optimizer step contains forward and backward. For example:

        trainer = lightning.Trainer(max_steps=100, callbacks=[AdaccLightningCallback(memory_budget="20GiB")])
        trainer.fit(module, loader)
    """

    def __init__(
        self,
        config: AdaccConfig | None = None,
        *,
        model: nn.Module | None = None,
        policy: PolicySource | None = None,
        **overrides: Any,
    ) -> None:
        """
        Args:
            config: settings. Fields of AdaccConfig can also be passed as keyword arguments, which override `config`.
            model: the submodule that `training_step` calls with keyword arguments and that returns the loss. None means
                the LightningModule's only transformers.PreTrainedModel, or the peft.PeftModel around it.
            policy: a Policy, the path of a policy file, or a function that makes a Policy from a Profile. The
                policy is used instead of the solver, and never changes during the run.


        Raises TypeError if `config` or `policy` has another type, and ValueError for a setting out of its range.
        """
        super().__init__(config, policy, overrides)
        self._model = model
        self._files: dict[str, bytes] = {}
        """Contents of the session's files, by file name. Before a run, the files of the loaded checkpoint. After a run,
        the files that the run has written last."""
        self._is_in_step = False

    # Lightning's hooks, in the order in which they are called.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._files = dict(state_dict[FILES])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.detach()
        refuse_unsupported(trainer, pl_module)
        model = language_model(pl_module, self._model)
        folder = trainer.log_dir if trainer.loggers else None
        loop = LightningLoop(trainer.accumulate_grad_batches, folder)
        self._session = AdaccSession(model, trainer.optimizers[0], self.config, policy=self._source, loop=loop)
        if trainer.global_step == 0:
            self._files = {}  # a new run of a callback that has served another one
        if not self._resumes(self._session):
            self._session.begin(None, trainer.global_step)
        self._files = {}
        self._session.hooks.begin(watches_optimizer=False)

    def _resumes(self, session: AdaccSession) -> bool:
        """Load the checkpoint's files into the session. Return True if its policy can begin the run."""
        if self._is_policy_given or not self._files:
            return False
        with TemporaryDirectory(prefix="adacc_hf-") as folder:
            for name, content in self._files.items():
                (Path(folder) / name).write_bytes(content)
            return session.load(folder)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        session = self._session
        if not self._is_in_step:
            self._is_in_step = True
            session.begin_step(trainer.global_step, trainer.optimizers[0])
        session.hooks.begin_micro_batch(batch)
        session.phase.begin_micro_batch(None)  # the tensors' sizes are read when the model is called

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._session.begin_optimizer_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        session = self._session
        session.end_micro_batch()
        if not session.state.has_stepped:
            return
        session.phase.end_optimizer_step()
        self._is_in_step = False
        session.end_step(trainer.global_step)
        interval = getattr(trainer, "log_every_n_steps", 0)  # Lightning does not declare the attribute
        if interval and trainer.global_step % interval == 0:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            figures = session.metrics(None if loss is None else {"loss": float(loss)})
            pl_module.log_dict({name: float(value) for name, value in figures.items()}, on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, Any]:
        if self.session is not None and not self._session.is_closed:
            self._files = saved_files(self._session)
        return {FILES: self._files} if self._files else {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.state_dict()  # for checkpoints that are saved after training
        session = self._session
        if self._is_in_step:
            session.phase.abandon_step()  # training ended before the optimizer's step
        session.phase.ends()
        self.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        is_running = self.session is not None and not self._session.is_closed
        if is_running and isinstance(exception, RuntimeError) and is_out_of_memory(exception):
            log.error(OUT_OF_MEMORY, trainer.global_step + 1, self.config.memory_budget)
            log.error("%s", self._session.state.memory_report())
        with suppress(OSError):  # the error that ends the run must not be replaced by another one
            self.state_dict()  # for checkpoints that are saved after the exception
        self.detach()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.detach()

    def detach(self) -> None:
        """Restore the model. Further calls have no effect."""
        self._is_in_step = False
        if self.session is not None:
            self._session.detach()


class LightningLoop(TrainingLoop):
    """Properties of the training loop of Lightning's Trainer with automatic optimization."""

    num_unrecorded_steps = 1  # Lightning zeroes the last step's gradients only after the forward
    how_to_train = "call model.train() before trainer.fit, and name the submodule with AdaccLightningCallback(model=)"


def language_model(pl_module: LightningModule, model: nn.Module | None) -> nn.Module:
    """Return the submodule of `pl_module` to which the budget applies: `model` or, if None, the only language model. A
    language model inside another language model is ignored. Raises ValueError if `model` is not a submodule, or if
    `pl_module` has no language model or more than one."""
    peft = sys.modules.get("peft")  # a PeftModel calls the forward of its model, and so not the hooks of its model
    language_models = PreTrainedModel if peft is None else (PreTrainedModel, peft.PeftModel)
    owner = type(pl_module).__name__
    if model is not None:
        if not any(module is model for module in pl_module.modules()):
            raise ValueError(
                f"model, a {type(model).__name__}, is not a submodule of {owner}: pass the submodule that "
                f"training_step calls, as in AdaccLightningCallback(model=module.model)"
            )
        return model
    named = [(name, module) for name, module in pl_module.named_modules() if isinstance(module, language_models)]
    outermost = [
        (name, module)
        for name, module in named
        if not any(name.startswith(f"{other}.") for other, _ in named) and module is not pl_module
    ]
    if len(outermost) != 1:
        names = ", ".join(name for name, _ in outermost) or "none"
        raise ValueError(
            f"{owner} has {len(outermost)} transformers.PreTrainedModel submodules ({names}), and the budget is for "
            f"one model: pass the submodule that training_step calls with keyword arguments, as in "
            f"AdaccLightningCallback(model=module.model)"
        )
    return outermost[0][1]


def refuse_unsupported(trainer: Any, pl_module: LightningModule) -> None:
    """Raise ValueError for manual optimization, several optimizers, sharded models or a second callback."""
    if not pl_module.automatic_optimization:
        raise ValueError(
            f"{type(pl_module).__name__}.automatic_optimization=False: AdaccLightningCallback supports automatic "
            f"optimization only; use AdaccSession in training_step, or automatic optimization"
        )
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"{len(trainer.optimizers)} optimizers: AdaccLightningCallback needs one, whose step ends a training step; "
            f"return one optimizer from configure_optimizers"
        )
    if isinstance(trainer.strategy, SHARDED):
        raise ValueError(
            f"{type(trainer.strategy).__name__}: AdaccLightningCallback supports one device and DDP; use "
            f"strategy='ddp', or Transformers' Trainer with AdaccCallback for FSDP and DeepSpeed"
        )
    others = [callback for callback in trainer.callbacks if isinstance(callback, AdaccLightningCallback)]
    if len(others) > 1:
        raise ValueError(
            f"{len(others)} AdaccLightningCallbacks: a block can follow only one policy; leave one of them in "
            f"callbacks=[...]"
        )


def saved_files(session: AdaccSession) -> dict[str, bytes]:
    """Return the contents of the files of `AdaccSession.save` by name. Only the first rank writes files."""
    with TemporaryDirectory(prefix="adacc_hf-") as folder:
        session.save(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
