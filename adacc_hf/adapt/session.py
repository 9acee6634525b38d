"""AdaccSession: training within a memory budget in a loop of the user's own, and the events that adapters send.

The session is the one controller: AdaccCallback passes the Trainer's events on to it. Which phase a run is in decides
what an event does (phases.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adacc_hf.adapt.checkpoint_files import Saved, SavedShapePolicy, drop_files, load_from_checkpoint
from adacc_hf.adapt.loop_watch import LoopWatch, unwrapped, unwrapped_optimizer
from adacc_hf.adapt.phases import Recomputing, resume
from adacc_hf.adapt.policy_maker import PolicySource, refuse_above_budget
from adacc_hf.adapt.run import Phase, Run
from adacc_hf.adapt.training_loop import TrainingLoop
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.whole_model import ComputeLoss
from adacc_hf.torch_glue.memory import is_out_of_memory
from adacc_hf.torch_glue.ranks import from_first_rank

log = logging.getLogger(__name__)

MANY = 2
"""Micro-batches that a step of several is taken for, until one was counted: later ones find gradients."""
RETRY = (
    "Adacc: within session.step(batch) a step cannot be tried again; session.run(step, batch), where step(batch) "
    "is a function of forward, backward and the optimizer's step, tries once more under a tighter policy"
)


class AdaccSession:
    """Keeps the training of a model within a memory budget, in any loop.

    Under a budget in bytes a policy is followed from the first step on, told from small parts of its batch. Else the
    first `profile_steps` steps run under torch's checkpoint; then a batch is profiled, and a policy is solved. Batches
    of other sizes get policies of their own, and all policies follow the data. Everything that AdaccCallback does in a
    Trainer is done, except for models that are compiled as a whole. For example:

        session = AdaccSession(model, optimizer, memory_budget="20GiB")
        for batch in loader:
            with session.step(batch):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        session.close()

    Where a step has several micro-batches, each is run `with session.micro_batch(batch)`. A step is then over when the
    optimizer has stepped. All ranks of a distributed run need a session, and the same number of steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: AdaccConfig | None = None,
        *,
        policy: PolicySource | None = None,
        compute_loss: ComputeLoss | None = None,
        folder: str | Path | None = None,
        loop: TrainingLoop | None = None,
        **overrides: Any,
    ) -> None:
        """
        Args:
            model: as the loop calls it; DistributedDataParallel is looked through.
            optimizer: what the loop steps. Its state, its step and what it has yet to make are in the plan. None only
                where a `loop` sends it later.
            config: settings. Fields of AdaccConfig may be given as keyword arguments instead, or on top of it.
            policy: in place of the solver, a Policy, a file or a function of the profile. Nothing changes such a one.
            compute_loss: for a model whose output has no `loss`, or that a step calls several times:
                `compute_loss(model, batch)` calls it and returns the loss. The profile alone calls it, some 8 times,
                with what `step` or `micro_batch` was given, which has to be a mapping then.
            folder: where the files go that `adacc report` and `adacc explain` read; None for none.
            loop: for adapters of other trainers, which send the events themselves. None watches model and optimizer.

        Raises TypeError for what is no AdaccConfig, no optimizer, and a policy that is none and leads to none; and
        ValueError for a setting out of its range, and for nn.DataParallel. The first step raises ValueError for a
        policy that needs more than a `memory_budget` given beside it.
        """
        check_arguments(type(self).__name__, config, policy)
        self.config = (config or AdaccConfig()).with_overrides(**overrides)
        own = loop is None
        if own:
            model, optimizer = unwrapped(model), unwrapped_optimizer(optimizer)
        loop = loop or TrainingLoop(folder=None if folder is None else str(folder))
        self._run = Run(self.config, policy, model, optimizer, loop)
        self._watch = LoopWatch(self._run, compute_loss) if own else None
        self._num_micro = 0
        """Micro-batches of the step that runs; 0 between steps."""
        self._is_in_step = self._has_begun = self._is_closed = False
        self._is_explicit = False
        """Whether the step that runs is one of `step`."""
        self._is_one = False
        """Whether the step that runs has one micro-batch."""

    @property
    def policy(self) -> Policy | None:
        """The policy in force, once there is one."""
        return self._run.policy

    @property
    def profile(self) -> Profile | None:
        """What the policy in force was solved for; None where only the policy is known."""
        return self._run.profile

    @property
    def history(self) -> list[dict[str, Any]]:
        """What happened: dicts of `step`, `event` ("policy", "tracking", "change", "guard", "memory", "fallback") and
        its figures."""
        return self._run.history

    @property
    def num_steps(self) -> int:
        """Steps that are over, those of a run that `load` goes on with included."""
        return self._run.step

    @property
    def state(self) -> Run:
        """What the run has come to, for a phase of an adapter's."""
        return self._run

    @property
    def phase(self) -> Phase:
        """The phase that the run is in."""
        return self._run.phase

    def metrics(self, logs: dict[str, float] | None = None) -> dict[str, float]:
        """Figures of the policy and of the steps since the last call, by the keys that AdaccCallback logs.

        `logs` are what the loop logs: of `loss` and `grad_norm` in it the guard of accuracy tells whether codecs harm
        the training. All ranks must call this at the same steps.
        """
        return self.figures(logs or {}, is_own=True)

    # What a loop of the user's own calls.

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[None]:
        """Return the context of one optimizer step: forward, backward and the optimizer's step.

        It has one micro-batch, `batch`; or, without a batch, those that run in `micro_batch` inside.
        """
        if self._is_explicit:
            raise RuntimeError("session.step(...) within another one: leave the first step's context before")
        self._end_last_step()
        self._is_explicit, self._is_one = True, batch is not None
        try:
            with self._breaking_off():
                self.begin_step()
                if batch is None:
                    yield
                else:
                    with self.micro_batch(batch):
                        yield
        finally:
            self._is_explicit = self._is_one = False
        self.end_step()

    @contextmanager
    def micro_batch(self, batch: Any = None) -> Iterator[None]:
        """Return the context of one micro-batch: its forward and backward, and perhaps the optimizer's step."""
        with self._breaking_off():
            self._begin_micro_batch(batch)
            yield
        self.end_micro_batch()
        if self._run.has_stepped and not self._is_explicit:
            self.end_step()

    def run(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """Return `fn(batch)`, which is a whole step with one micro-batch, or within `step()` one micro-batch.

        If memory runs out, `fn` is called once more under a tighter policy, with the gradients and random numbers of
        the first call. Raises torch.OutOfMemoryError if that fails too, or if the optimizer has begun its step.
        """
        self._is_one = not self._is_explicit
        with self._breaking_off(may_try=False):
            self._begin_micro_batch(batch)
            result = self.phase.attempt(lambda: fn(batch))
        self.end_micro_batch()
        if not self._is_explicit:
            self.end_step()
        return result

    def save(self, folder: str | Path) -> None:
        """Write what a run that resumes needs into `folder`, beside the loop's own checkpoint. The first rank writes.

        Before there is a policy nothing is written.
        """
        folder = Path(folder)
        if self._run.loop.is_first_rank:
            folder.mkdir(parents=True, exist_ok=True)
            drop_files(folder)
            self.phase.save(folder)

    def load(self, folder: str | Path) -> bool:
        """Go on with what `save` has written into `folder`; return False if there is no policy for this budget.

        Call it before the first step. Raises AdaccError for a damaged file, FileNotFoundError for a missing one.
        """
        if self._has_begun:
            raise RuntimeError("session.load(folder) after the first step: call it before, or make a new session")
        # The first rank decides, also where the others do not see its files: all ranks must profile, or none.
        saved = from_first_rank(lambda: load_from_checkpoint(folder, self.config.memory_budget))
        if saved is not None:
            self.begin(saved, saved.step or 0)
        return saved is not None

    def close(self) -> None:
        """Write what is left to write, and take everything off the model. Harmless when called again."""
        if not self._is_closed:
            self._end_last_step()
            self.phase.ends()
        self.detach()

    def detach(self) -> None:
        """Take everything off the model at once, as after an error. Harmless when called again."""
        self._is_closed = True
        phase, self._run.phase = self.phase, Phase()
        phase.remove()
        if self._watch is not None:
            self._watch.remove()

    def __enter__(self) -> AdaccSession:
        return self

    def __exit__(self, kind: Any, *exception: object) -> None:
        self.close() if kind is None else self.detach()

    # Events, which an adapter of another trainer sends.

    def begin(self, saved: Saved | None = None, step: int = 0) -> None:
        """Begin after `step` steps: with `saved`, or by profiling. The first step does so if nobody has before."""
        if self._is_closed:
            raise RuntimeError("this AdaccSession is closed: make a new one")
        run, given = self._run, self._run.given
        self._has_begun, run.num_before = True, step
        if saved is None and isinstance(given, (str, Path, Policy)):
            policy = given if isinstance(given, Policy) else Policy.load(given)
            refuse_above_budget(policy, self.config.memory_budget)
            saved = Saved(shape_policies=[SavedShapePolicy(policy=policy, profile=None)])
        if saved is None:
            run.phase = Recomputing(run)
        else:
            resume(run, saved, step)
        if self._watch is not None:
            self._watch.begin()

    def begin_with(self, phase: Phase) -> None:
        """Begin with a phase of the adapter's."""
        self._has_begun, self._run.phase = True, phase

    def begin_step(self, step: int | None = None, optimizer: Any = None) -> None:
        """A step begins; `step` is the number of those that are over, if the loop counts them itself."""
        if not self._has_begun or self._is_closed:
            self.begin()
        if optimizer is not None:
            self._run.optimizer = optimizer
        self._is_in_step, self._run.has_stepped, self._num_micro = True, False, 0
        self.phase.step_begins(self.num_steps if step is None else step)

    def train(self, run: Callable[[], Any], inputs: Any) -> Any:
        """Return what `run` returns, which trains on the micro-batch `inputs`. It may be called twice (see `run`)."""
        self.phase.micro_batch_begins(inputs)
        result = self.phase.attempt(run)
        self.phase.micro_batch_ends()  # within its first one a run may come by a policy
        return result

    def end_micro_batch(self) -> None:
        """The micro-batch is over."""
        if self._watch is not None:
            self._watch.is_on = False
        self.phase.micro_batch_ends()

    def optimizer_begins(self) -> None:
        """The optimizer is about to step."""
        self._run.has_stepped = True
        self.phase.optimizer_begins()

    def optimizer_ends(self) -> None:
        """The optimizer has stepped."""
        self.phase.optimizer_ends()

    def end_step(self, step: int | None = None, optimizer: Any = None) -> None:
        """A step is over: `step` are over by now, if the loop counts them itself. A profile may be made here."""
        if optimizer is not None:
            self._run.optimizer = optimizer
        self._is_in_step = False
        if self._watch is not None and self._num_micro:
            self._run.loop.num_micro = self._num_micro
        self._run.num_steps += 1
        self.phase.step_ends(self.num_steps if step is None else step)

    def figures(self, logs: dict[str, float], is_own: bool) -> dict[str, float]:
        """What to add to `logs`; `is_own` says whether all ranks make such logs at this step."""
        return self.phase.figures(logs, is_own)

    def _begin_micro_batch(self, batch: Any) -> None:
        if not self._is_explicit:
            if self._run.has_stepped:
                self._end_last_step()
            if not self._is_in_step:
                self.begin_step()
        self._num_micro += 1
        if self._watch is not None:
            if self._run.num_steps == 0:
                self._run.loop.num_micro = 1 if self._is_one else MANY
            self._watch.begin_micro_batch(batch)
        self.phase.micro_batch_begins(None)  # its tensors are met when the model is called

    def _end_last_step(self) -> None:
        """End a step of micro-batches, whose optimizer may have stepped after the last of them."""
        if self._is_in_step:
            self.end_step()

    @contextmanager
    def _breaking_off(self, may_try: bool = True) -> Iterator[None]:
        """If an error ends the step, stop what is measured in it, and let the next one begin anew."""
        try:
            yield
        except BaseException as error:
            is_first = self._is_in_step
            self._is_in_step = self._run.has_stepped = False
            if self._watch is not None:
                self._watch.is_on = False
            self.phase.broken_off()
            if is_first and may_try and isinstance(error, RuntimeError) and is_out_of_memory(error):
                log.error(RETRY)
            raise


def check_arguments(owner: str, config: Any, policy: Any) -> None:
    """Raise TypeError for what is no AdaccConfig, and for a policy that is none and leads to none."""
    if config is not None and not isinstance(config, AdaccConfig):
        raise TypeError(
            f"config={config!r} is no AdaccConfig: give settings by name, as in {owner}(..., memory_budget=0.5), or "
            f"AdaccConfig(memory_budget=0.5) first"
        )
    if policy is not None and not isinstance(policy, (str, Path, Policy)) and not callable(policy):
        raise TypeError(
            f"policy={policy!r} has type {type(policy).__name__}: give a Policy, the path of a file that Policy.save "
            f"wrote, or a function that makes a Policy of a Profile"
        )
