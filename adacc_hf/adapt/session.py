"""AdaccSession: keeps a user's own training loop within a memory budget. SessionAdapter: base class of callbacks.

AdaccCallback uses a session too, and passes the Trainer's events to the session. The run's current phase handles each
event (phases.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adacc_hf.adapt.byte_batches import ByteBatches
from adacc_hf.adapt.checkpoint_files import Saved, drop_files, load_from_checkpoint
from adacc_hf.adapt.corrections import Corrections
from adacc_hf.adapt.history import predictions
from adacc_hf.adapt.loop_hooks import LoopHooks, unwrapped, unwrapped_optimizer, warn_of_checkpointing
from adacc_hf.adapt.phases import WarmUpPhase, follow
from adacc_hf.adapt.policy_checks import refuse_policy
from adacc_hf.adapt.run_profiler import TrainingLoop
from adacc_hf.adapt.run_state import Phase, PolicySource, RunState, checked_config
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import UncoveredBlockError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.host_copies import common_host_limit
from adacc_hf.run.policy_handle import APPLIED, Applied, remove_policy
from adacc_hf.torch_glue.distributed import broadcast_from_first_rank, is_first_rank
from adacc_hf.torch_glue.memory import is_out_of_memory
from adacc_hf.torch_glue.meters import refuse_unmeasurable

log = logging.getLogger(__name__)

MOST_UNSEEN = 256
"""Number of micro-batches without an optimizer step after which a warning is logged."""
NOT_SEEN = (
    "Adacc: %d micro-batches without a step of the optimizer that AdaccSession was given: call optimizer.step() within "
    "session.step(batch), or right after the last session.micro_batch(batch), and make a new session for a new "
    "optimizer"
)
MANY = 2
"""Assumed number of micro-batches in the first step if the step may have several. With any number above 1, the
predicted memory includes accumulated gradients."""
RETRY = (
    "Adacc: out of memory within session.step(batch), which cannot repeat a step. Write forward, backward and the "
    "optimizer's step as a function step(batch), and call session.run(step, batch): if memory runs out, the function "
    "is called once more under a tighter policy"
)


class Place(Enum):
    """Place of a user's own loop, or of an adapter, in the steps of a session."""

    NEW = "before the first step"
    BETWEEN_STEPS = "between steps"
    IN_STEP = "in a step that ends with the optimizer's step, or with the adapter's event"
    IN_BLOCK = "in the `with` block of `AdaccSession.step`"


class RunView:
    """Policy, profile and history of a run, as users read them."""

    @property
    def _run(self) -> RunState | None:
        """State of the run, or None before it begins."""
        raise NotImplementedError

    @property
    def policy(self) -> Policy | None:
        """The current policy, or None before the first policy is set."""
        return None if self._run is None else self._run.policy

    @property
    def profile(self) -> Profile | None:
        """The profile that the current policy was solved for. None if the policy was passed in as a Policy or file."""
        return None if self._run is None else self._run.profile

    @property
    def history(self) -> list[dict[str, Any]]:
        """Events of the run: dicts of `step`, `event` ("policy", "tracking", "change", "guard", "memory", "fallback")
        and the event's own values. A "fallback" event counts the steps that did not follow the policy for one reason. A
        resumed run continues the history of its checkpoint."""
        return [] if self._run is None else self._run.history


class AdaccSession(RunView):
    """Memory budget for a model in any training loop.

    The first step runs as under gradient checkpointing, and is profiled while it trains: nothing of the loop runs an
    extra time. From the second step on, the blocks follow the solved policy. Each batch size gets its own policy, and
    policies are adapted to the data. AdaccCallback does the same in a Trainer.
    A model compiled as a whole (torch.compile) is supported only by the callback. For example:

        session = AdaccSession(model, optimizer, memory_budget="20GiB")
        for batch in loader:
            with session.step(batch):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        session.close()

    `session.step` has to contain forward, backward and the optimizer's step. With gradient accumulation, run each
    micro-batch `with session.micro_batch(batch)`: the step ends when the optimizer has stepped. Every rank of a
    distributed run needs a session and the same number of steps. A model has one session: a second session, or
    `apply_policy`, removes the first one from the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: AdaccConfig | None = None,
        *,
        policy: PolicySource | None = None,
        folder: str | Path | None = None,
        loop: TrainingLoop | None = None,
        **overrides: Any,
    ) -> None:
        """
        Args:
            model: the module that the loop calls. The module may be wrapped in DistributedDataParallel.
            optimizer: the optimizer that the loop steps. The budget includes the optimizer's state, even before the
                first step, and the temporary memory of the optimizer's step. None only if the adapter (`loop`) passes
                the optimizer later.
            config: settings. Fields of AdaccConfig can also be passed as keyword arguments, which override `config`.
            policy: a Policy, the path of a policy file, or a function that makes a Policy from a Profile. The
                policy is used instead of the solver, and never changes during the run.
            folder: the folder for the files that `adacc report` and `adacc explain` read. None writes no files.
            loop: for adapters of other trainers, which send the events themselves. If None, the session registers hooks
                on model and optimizer instead.

        Raises TypeError if `config`, `optimizer` or `policy` has another type, and ValueError for a setting out of its
        range, nn.DataParallel, or a device other than CPU and CUDA. The first step raises ValueError if `policy` needs
        more than `memory_budget` or `host_memory`, or uses actions that the settings exclude.
        """
        self.config = checked_config(type(self).__name__, config, policy, overrides)
        self._is_own = loop is None
        """True if the session belongs to a user's own loop and must detect forwards and optimizer steps by hooks."""
        if self._is_own:
            model, optimizer = unwrapped(model), unwrapped_optimizer(optimizer)
        refuse_unmeasurable(model)
        loop = loop or TrainingLoop(folder=None if folder is None else str(folder))
        self.state = RunState(self.config, policy, model, optimizer, loop)
        """State of the run. Public, because adapters may define their own phases."""
        self.hooks = LoopHooks(self.state)
        """Hooks on model and optimizer, which send the events of a user's own loop. Adapters may use the hooks too."""
        self._num_micro = 0
        """Number of micro-batches that have begun in the current step."""
        self.is_closed = False
        """True after `close` or `detach`, which restore the model."""
        self._place = Place.NEW
        self._num_unseen = 0
        """Number of micro-batches since the last step of the optimizer."""

    def __repr__(self) -> str:
        state = " (closed)" if self.is_closed else ""
        policy = "no policy yet" if self.policy is None else self.policy.describe()
        return f"<AdaccSession on {type(self.state.model).__name__}{state}, {self.config!r}: {policy}>"

    @property
    def _run(self) -> RunState:
        return self.state

    @property
    def num_steps(self) -> int:
        """Number of finished steps, including the steps before the checkpoint that `load` has read."""
        return self.state.step

    @property
    def phase(self) -> Phase:
        """The current phase of the run, such as warm-up or training under a policy (phases.py)."""
        return self.state.phase

    def metrics(self, logs: dict[str, float] | None = None) -> dict[str, float]:
        """Return a dict with AdaccCallback's metrics of the policy and of the steps since the last call. The dict is
        empty before the run has a policy.

        `logs` are the loop's own metrics. If `loss` or `grad_norm` has a spike, and the policy uses lossy codecs, the
        next step (with several ranks, one within 16 steps) compares gradients with exact ones, to find the cause.
        """
        return self.phase.figures(logs or {})

    # Methods for a user's own loop.

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[None]:
        """Run one optimizer step in the `with` block: forward, backward and the optimizer's step.

        With a `batch`, the step consists of this one micro-batch. Without a `batch`, the step consists of one
        micro-batch for each `with micro_batch(...)` in the block. A step without a forward in train mode and with
        gradients on is not counted.
        """
        if self._place is Place.IN_BLOCK or self.hooks.is_on:
            raise RuntimeError("session.step(...) within another one: leave its context first")
        self._end_last_step()
        with self._breaking_off():
            self.begin_step()
            self._place = Place.IN_BLOCK
            if batch is None:
                yield
            else:
                with self._breaking_off():
                    self._begin_micro_batch(batch, is_one=True)
                    yield
                self.end_micro_batch()
        self.end_step()

    @contextmanager
    def micro_batch(self, batch: Any = None) -> Iterator[None]:
        """Run one micro-batch in the `with` block: forward and backward.

        The optimizer's step belongs in the `with` block of a step's last micro-batch, or right after this block.
        `batch` is a mapping of tensors, whose sizes choose the policy. Without it, the sizes are those of the model's
        arguments.
        """
        if self.hooks.is_on:
            raise RuntimeError("session.micro_batch(...) within another one: leave its context first")
        with self._breaking_off():
            self._begin_micro_batch(batch, is_one=False)
            yield
        self.end_micro_batch()
        if self.state.has_stepped and self._place is not Place.IN_BLOCK:
            self.end_step()

    def run(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """Run `fn(batch)` and return its result. `fn` trains for one step or, within `step()`, on one micro-batch.

        If memory runs out, `fn` is called once more under a policy that needs less memory, with the same gradients and
        random state as in the first call. Raises torch.OutOfMemoryError if the second call runs out of memory too, or
        if the optimizer's step had begun.
        """
        is_step = self._place is not Place.IN_BLOCK

        def attempt() -> Any:
            self.hooks.begin_micro_batch(batch)
            return fn(batch)

        with self._breaking_off(may_try=False):
            self._begin_micro_batch(batch, is_one=is_step)
            result = self.phase.attempt(attempt)
        self.end_micro_batch()
        if is_step:
            self.end_step()
        return result

    def batches(self, loader: Any, batch_size: int) -> Iterator[list[tuple[dict[str, Any], float]]]:
        """Yield the micro-batches of each optimizer step, as large as the budget allows, with weights.

        A batch of the DataLoader `loader` has the samples of one step, on this rank. They are divided by length, and
        the loader's `collate_fn` makes the batches. The first steps use batches of `batch_size`, which must fit. The
        mean losses times their weights add up to the mean over all labels of the step. For example:

            for step in session.batches(DataLoader(dataset, batch_size=64, collate_fn=collate), batch_size=4):
                with session.step():
                    for batch, weight in step:
                        with session.micro_batch(batch):
                            (model(**batch).loss * weight).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        """
        self.state.byte_batches = self.state.byte_batches or ByteBatches(self.state, batch_size)
        yield from self.state.byte_batches.steps(loader)

    def save(self, folder: str | Path) -> None:
        """Write the files that `load` needs to resume into `folder`. Only the first rank writes.

        The folder may be the loop's own checkpoint folder. If the run has no policy yet, no file is written. If a file
        cannot be written, a warning is logged.
        """
        folder = Path(folder)
        if is_first_rank():
            with self.state.warning_of_write_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                drop_files(folder)
                self.phase.save(folder)

    def load(self, folder: str | Path) -> bool:
        """Resume from the files that `save` has written into `folder`. Return False if there are none, or damaged ones.

        The first step is profiled again. The saved policies are used if they fit this profile, for the same
        `memory_budget` and `host_memory`. Call this method before the first step. Raises FileNotFoundError if the
        folder does not exist.
        """
        if self._place is not Place.NEW:
            raise RuntimeError("session.load(folder) after the first step: call it earlier, or make a new session")

        def saved_state() -> Saved | None:
            if not Path(folder).is_dir():
                raise FileNotFoundError(f"session.load({str(folder)!r}): there is no such folder")
            return load_from_checkpoint(folder, self.config)

        saved = broadcast_from_first_rank(saved_state)  # the other ranks may not see its files
        if saved is not None:
            self.begin(saved, saved.step)
        return saved is not None

    def close(self) -> None:
        """Write the last files, and restore the model. Further calls have no effect."""
        if not self.is_closed:
            self._end_last_step()
            with self._detaching():
                self.phase.ends()
            if self._is_own and self.state.num_steps == 0:
                log.warning("Adacc: the session is closed without a step: train within session.step(batch)")
        self.detach()

    def detach(self) -> None:
        """Restore the model without writing files, as after an error. Further calls have no effect."""
        self.is_closed = True
        Applied.forget(self.state.model, self)
        phase, self.state.phase = self.phase, Phase(self.state)
        phase.remove()
        self.hooks.remove()

    def __enter__(self) -> AdaccSession:
        return self

    def __exit__(self, kind: Any, *exception: object) -> None:
        self.close() if kind is None else self.detach()

    # Events that an adapter of another trainer sends.

    def begin(self, saved: Saved | None = None, step: int = 0) -> None:
        """Begin the run, from the checkpoint's state `saved` if there is one. Otherwise the model will be profiled.

        `step` is the number of finished steps. The first step calls this method if no adapter has called it.
        """
        if self.is_closed:
            raise RuntimeError("this AdaccSession is closed: make a new AdaccSession for further steps")
        run, source = self.state, self.state.source
        if remove_policy(run.model):
            log.warning("Adacc: the model's earlier policy or session is removed, because a model can have only one")
        warn_of_checkpointing(run.model, self.config.memory_budget)
        self._place = Place.BETWEEN_STEPS
        run.num_before = run.current_step = step
        if isinstance(source, (str, Path, Policy)):
            policy = source if isinstance(source, Policy) else Policy.load(source)
            has_payloads = policy.predicted_host_bytes > 0
            refuse_policy(policy, self.config, common_host_limit(self.config, run.model) if has_payloads else 0)
            run.phase = follow(run, policy, None)
            run.note("policy", **predictions(policy))
            run.save()
        else:
            if saved is None:
                run.write(drop_files)  # of an earlier run, which would describe this one
            else:
                run.history, run.saved_batches = list(saved.history), saved.batches
                if saved.corrections is not None:
                    run.corrections = Corrections.from_json(run.config, saved.corrections)
            run.phase = WarmUpPhase(run, () if saved is None else saved.policies)
        run.model.__dict__[APPLIED] = Applied(self, self.detach)
        if self._is_own:
            self.hooks.begin()

    def begin_with(self, phase: Phase) -> None:
        """Begin the run in `phase`, a phase that an adapter defines."""
        self._place, self.state.phase = Place.BETWEEN_STEPS, phase

    def begin_step(self, step: int | None = None, optimizer: Any = None) -> None:
        """Begin a step. `step` is the number of finished steps, or None if the training loop does not count steps.
        `optimizer` replaces the session's optimizer, unless None."""
        if self._place is Place.NEW or (self.is_closed and self._is_own):  # an adapter may go on sending events
            self.begin()
        if optimizer is not None:
            self.state.optimizer = optimizer
        self._place, self.state.has_stepped, self._num_micro = Place.IN_STEP, False, 0
        self.hooks.num_forwards = 0
        step = self.num_steps if step is None else step
        self.state.current_step = step + 1
        self.phase.begin_step(step)

    def train(self, run: Callable[[], Any], inputs: Any) -> Any:
        """Call `run`, which trains on the micro-batch `inputs`, and return its result.

        If memory runs out, `run` may be called a second time, as in `AdaccSession.run`.
        """
        self.phase.begin_micro_batch(inputs)
        result = self.phase.attempt(run)
        self.phase.end_micro_batch()  # read again: the phase may change within the first micro-batch
        return result

    def end_micro_batch(self) -> None:
        """Notify the current phase of the run that the micro-batch's forward and backward have ended."""
        self.hooks.end_micro_batch()
        with self._detaching():
            self.phase.end_micro_batch()

    def begin_optimizer_step(self) -> None:
        """Record that the optimizer is about to step."""
        self.state.has_stepped = True
        self.phase.begin_optimizer_step()

    def end_step(self, step: int | None = None) -> None:
        """End a step, after which a policy may be set or replaced. `step` is as in `begin_step`."""
        self._place = Place.BETWEEN_STEPS
        with self._detaching():
            if not self.hooks.num_forwards and not self.hooks.has_trained():
                return
            if self._num_micro:
                self.state.loop.num_micro = self._num_micro
            self.phase.end_backward()  # of a step without the optimizer's, or whose closure calls the model
            if self.state.has_stepped:
                self._num_unseen = 0
            self.state.num_steps += 1
            self.phase.end_step(self.num_steps if step is None else step)

    def _begin_micro_batch(self, batch: Any, is_one: bool) -> None:
        """Begin a micro-batch, which is known to be the only one of its step if `is_one`."""
        if self._place is Place.IN_STEP and self.state.has_stepped:
            self.end_step()
        if self._place in (Place.NEW, Place.BETWEEN_STEPS):
            self.begin_step()
        self._num_micro += 1
        self._num_unseen += 1
        if self._num_unseen > MOST_UNSEEN and not self.hooks.has_warned:
            self.state.warn_once(NOT_SEEN, MOST_UNSEEN)
        if self._is_own and self.state.num_steps == 0:
            self.state.loop.num_micro = 1 if is_one else MANY
        self.hooks.begin_micro_batch(batch)
        self.phase.begin_micro_batch(None)  # the tensors' sizes are read when the model is called

    def _end_last_step(self) -> None:
        """End the previous step if it is still open, because its optimizer stepped after its micro-batches."""
        if self._place is Place.IN_STEP:
            self.end_step()

    @contextmanager
    def _detaching(self) -> Iterator[None]:
        try:
            yield
        except UncoveredBlockError:
            self.detach()
            raise

    @contextmanager
    def _breaking_off(self, may_try: bool = True) -> Iterator[None]:
        """Abandon the step if an error is raised inside the `with` block. If memory runs out and `may_try`, recommend
        `AdaccSession.run`, which repeats a step."""
        try:
            with self._detaching():
                yield
        except BaseException as error:
            is_first = self._place in (Place.IN_STEP, Place.IN_BLOCK)
            self._place = Place.BETWEEN_STEPS if is_first else self._place
            self.state.has_stepped = self.hooks.is_on = False
            self.phase.abandon_step()
            if is_first and may_try and isinstance(error, RuntimeError) and is_out_of_memory(error):
                log.error("%s\n%s", RETRY, self.state.memory_report())
            raise


class SessionAdapter(RunView):
    """Base class of the callbacks that connect a trainer to an AdaccSession: its settings, and its current run."""

    def __init__(self, config: AdaccConfig | None, policy: PolicySource | None, overrides: dict[str, Any]) -> None:
        self.config = checked_config(type(self).__name__, config, policy, overrides)
        self._source = policy
        self._session: Any = None
        """The session of the current run, or of the last run. None only before the first event of a run."""

    @property
    def session(self) -> AdaccSession | None:
        """The AdaccSession of the current run, or of the last run. None before the first run."""
        return self._session

    @property
    def _run(self) -> RunState | None:
        return None if self.session is None else self.session.state

    @property
    def _is_policy_given(self) -> bool:
        """True if the user passed a Policy or a file, which is used even if a checkpoint contains another policy."""
        return isinstance(self._source, (str, Path, Policy))

    def __repr__(self) -> str:
        text = f"{type(self).__name__}({self.config.describe_changes()})"
        return text if self.policy is None else f"<{text}: {self.policy.describe()}>"
