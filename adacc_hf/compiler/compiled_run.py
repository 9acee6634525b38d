"""A Trainer's run with torch_compile=True: the partitioner cuts its graphs, and measured peaks set its share."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adacc_hf.adapt.checkpoint_files import save_history
from adacc_hf.adapt.step_timer import StepMeter
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import AdaccError, InfeasibleBudgetError
from adacc_hf.artifacts.files import COMPILED_FILE, HISTORY_FILE, read_json
from adacc_hf.artifacts.units import format_bytes, parse_bytes
from adacc_hf.compiler import AdaccPartitioner, CompiledPolicy
from adacc_hf.compiler.backend import InstalledPartitioner
from adacc_hf.compiler.compiled_policy import PlanStore
from adacc_hf.compiler.functorch import recompile_limit
from adacc_hf.compiler.partitioner import GRAPH_SETTINGS
from adacc_hf.torch_glue.distributed import from_first_rank, of_all_ranks
from adacc_hf.torch_glue.memory import available_bytes
from adacc_hf.torch_glue.private import tree_leaves

log = logging.getLogger(__name__)

MAX_ROUNDS = 4
"""Times that all regions are compiled again for a better share; each costs what the first compilation did."""
SLACK = 0.03
"""Part of the budget that may be left unused before the regions are compiled again for more."""
MARGIN = 0.01
"""Part of the regions' bytes that a share is lowered by beyond what was measured to be too much."""
RUN_SETTINGS = (*GRAPH_SETTINGS, "memory_margin", "profile_steps")
"""The fields of `AdaccConfig` that a compiled run goes by."""


class CompiledRun:
    """Cuts a run's compiled graphs within a budget.

    A fraction is one of what all regions store together, each as often as a micro-batch calls it: where a region cannot
    keep to it, the others store less. For a peak, the first steps run with graphs that take as little as can be; what
    their measured peak leaves of the budget is given to the regions, which are compiled and measured again.

    Several ranks have one share, found from the rank with the highest peak, and compile again at the same steps. Within
    it each decides about its own graphs, by its own prices and the sizes of its own batches: gradients are reduced
    outside of the graphs, so that ranks may store different tensors.
    """

    def __init__(
        self, config: AdaccConfig, model: Any, note: Callable[..., None], given: CompiledPolicy | None = None
    ) -> None:
        """`note(step, event, **figures)` is told what happens. A policy that is `given` is followed as it is."""
        self._config = config
        self._note = note
        self._fraction = config.memory_budget if isinstance(config.memory_budget, float) else None
        _warn_of_idle_settings(config)
        self._is_settled = given is not None
        self._is_measured = False
        self._num_steps = self._num_noted = self._num_rounds = 0
        self._is_reached = False
        self._is_called = True
        """Whether the last forward called a compiled graph, as far as it is known."""
        self.fell_back = False
        """Whether a forward of the last step called none."""
        self._is_warned = False
        """Whether it was said that a forward called none."""
        self._num_elements = self._most_elements = 0
        """Of the largest micro-batch of this step, and of all measured ones."""
        self._least: int | None = None
        """Modelled peak of the regions that take least."""
        self._next: _ShareChange | None = None
        """What the next step begins with, if there is one."""
        self._meter = StepMeter()
        self.peak_bytes: int | None = None
        """Measured over a whole step, the optimizer's part included; the last one that was counted."""
        if given is None and self._fraction is None:
            given = CompiledPolicy(share=None)
        partitioner = AdaccPartitioner(config, given, PlanStore())
        self._undo_checkpointing = _without_checkpointing(model)
        self._installed = InstalledPartitioner(partitioner)
        log.info(
            "Adacc: torch.compile is on: activations are decided about when a region is compiled, and again only when "
            "it is compiled again; outliers, the accuracy guard and the head are for runs without it"
        )

    @property
    def policy(self) -> CompiledPolicy:
        """The regions that were compiled so far."""
        settled_for = self._config.memory_budget if self._is_settled and self._next is None else None
        return replace(self._installed.partitioner.policy, settled_for=settled_for)

    def step_begins(self, model: Any, optimizer: Any) -> None:
        if self._next is not None:
            self._compile_again(self._next)
        self._meter.begin()
        self._num_elements, self.fell_back = 0, False
        # The step that compiles is no measure, and the first one allocates the optimizer's state.
        is_late = self._num_steps >= max(1, self._config.profile_steps - 1)
        self._is_measured = is_late and self._fraction is None and not self._is_settled
        if self._is_measured:
            self._meter.count_memory(model, optimizer)

    def loss_is_made(self, loss: Any, inputs: Any) -> None:
        """`loss` is what the forward gave of the micro-batch `inputs`, before its backward."""
        if isinstance(loss, torch.Tensor):
            self._installed.count_calls(loss)
            self._note_whether_called(loss)
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
            self._num_elements = max(self._num_elements, sum(tensor.numel() for tensor in tensors))

    def step_ends(self, step: int, model: Any) -> None:
        """Note what was compiled; settle the share by what was measured.

        Raises RuntimeError if the first step compiled nothing that could be decided about.
        """
        self._check_reached()
        self._num_steps += 1
        self._meter.backward_is_over()
        self._installed.look_at_code()
        for plan in self.policy.regions[self._num_noted :]:
            self._note(
                step, "policy", region=plan.region, stored_bytes=plan.stored_bytes, plain_bytes=plan.plain_bytes,
                overhead_ms=plan.overhead_ms, calls=plan.calls, reason=plan.reason,
            )  # fmt: skip
        self._num_noted = len(self.policy.regions)
        if self._fraction is not None and not self._is_settled:
            self._share_fairly(step, self._fraction)
        elif self._is_measured:
            self._settle(step, next(model.parameters()).device)

    def metrics(self) -> dict[str, float]:
        figures = {}
        if self._is_called:
            figures["adacc/stored_gib"] = self.policy.stored_bytes / 2**30
            figures["adacc/overhead_ms"] = self.policy.overhead_ms
        if self._is_called and self.policy.plain_bytes:
            figures["adacc/compression_rate"] = self.policy.stored_bytes / self.policy.plain_bytes
        if self.peak_bytes is not None:
            figures["adacc/measured_peak_gib"] = self.peak_bytes / 2**30
        return figures

    def save(self, folder: str | Path, history: list[dict[str, Any]]) -> None:
        """Write the policy and what happened so far into `folder`, for reports and for runs that resume."""
        save_history(folder, history)  # first, for a run that resumes reads it where there is a policy
        self.policy.save(Path(folder) / COMPILED_FILE)

    def remove(self) -> None:
        """Take the partitioner out of torch, and what it cut out of the model. Harmless when called again."""
        self._meter.close()
        self._installed.remove()
        self._undo_checkpointing()

    def _check_reached(self) -> None:
        self._is_reached = self._is_reached or bool(self.policy.regions)
        if not self._is_reached:
            raise RuntimeError(
                "no compiled graph reached Adacc in the first step: the model was given to the Trainer compiled, with "
                "a backend that has a partitioner of its own (such as 'adacc', which keeps to its own options) or "
                "none, or torch.compile is switched off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE, "
                "torch.compiler.set_stance); give the Trainer the model as it is and let torch compile it, or train "
                "without AdaccCallback"
            )

    def _note_whether_called(self, loss: torch.Tensor) -> None:
        """Warn once if a forward called none of the graphs that there are: torch then runs the model as it is."""
        self._is_called = loss.grad_fn is None or self._installed.partitioner.is_called(loss)
        self.fell_back |= self._is_reached and not self._is_called
        if self._is_reached and not (self._is_called or self._is_warned):
            log.warning(
                "Adacc: a forward ran without compiled graphs, and so do others like it, which keep to no budget: "
                "torch.compiler.set_stance asked for that, or torch._dynamo.config.recompile_limit=%d was reached "
                "(torch warned of it): raise that, or train with batches of fewer sizes",
                recompile_limit(),
            )
            self._is_warned = True

    def _share_fairly(self, step: int, budget: float) -> None:
        """If the regions of the first step store too much together, let those that can store less do so."""
        policy = self.policy
        figures = (policy.stored_bytes, policy.plain_bytes, _fair_share(policy, budget))
        stored_bytes, plain_bytes, share = max(of_all_ranks(figures), key=lambda rank: rank[0] / max(rank[1], 1))
        self._is_settled = stored_bytes <= budget * plain_bytes
        if self._is_settled:
            return
        if policy.share is None:
            raise InfeasibleBudgetError(
                f"memory_budget={budget!r} allows {format_bytes(int(budget * plain_bytes))} of the "
                f"{format_bytes(plain_bytes)} that torch.compile stores, and the least possible with "
                f"actions={self._config.actions!r} is {format_bytes(stored_bytes)}: give at least "
                f"{math.ceil(1000 * stored_bytes / plain_bytes) / 1000:.3f}, allow more actions, or compile the model "
                f"with fewer graph breaks",
                stored_bytes,
            )
        self._num_rounds += 1
        # The least possible takes far more time than a fair share; batches of another size have another one.
        share = share if self._num_rounds <= MAX_ROUNDS else None
        self._next = _ShareChange(step, share, "some regions cannot keep to their share")

    def _settle(self, step: int, device: torch.device) -> None:
        """Set the share by the measured peak of a whole step."""
        policy = self.policy
        figures = of_all_ranks((self._meter.peak_bytes, policy.peak_bytes, policy.plain_bytes, self._num_elements))
        measured = [(peak, *others) for peak, *others in figures if peak is not None]
        if len(measured) < len(figures):
            return
        peak_bytes, modelled, plain, num_elements = max(measured)
        is_smaller = num_elements < self._most_elements
        self._most_elements = max(self._most_elements, num_elements)
        self.peak_bytes = peak_bytes
        budget_bytes = self._budget_bytes(device)
        if self._least is None:
            if peak_bytes > budget_bytes:
                raise InfeasibleBudgetError(
                    f"memory_budget={self._config.memory_budget!r} allows {format_bytes(budget_bytes)}, and the step "
                    f"whose compiled graphs take least has a peak of {format_bytes(peak_bytes)} at this batch: give "
                    f"at least that, or a smaller batch",
                    peak_bytes,
                )
            self._least = modelled
        else:
            self._note(step, "memory", measured_peak_bytes=peak_bytes, budget_bytes=budget_bytes)
        left = budget_bytes - peak_bytes
        # What a small batch leaves is not there for larger ones, by whose peak the share was set.
        fits = left >= 0 and (left <= SLACK * budget_bytes or modelled >= plain or is_smaller)
        self._num_rounds += 1
        if fits or (left >= 0 and self._num_rounds > MAX_ROUNDS):
            self._is_settled = True
            return
        allowed = modelled + left - (int(MARGIN * plain) if left < 0 else 0)
        is_last = self._num_rounds > MAX_ROUNDS or allowed <= self._least
        self._is_settled = is_last
        # Regions together take less than their share: most are not at their own peak when the step is at its.
        share, taken = (1.0, plain) if self.policy.share is None else (self.policy.share, modelled)
        reason = f"a measured peak of {format_bytes(peak_bytes)}"
        self._next = _ShareChange(step, None if is_last else min(1.0, share * allowed / max(taken, 1)), reason)

    def _compile_again(self, change: _ShareChange) -> None:
        """Compile all regions again, each with the changed share of its bytes."""
        step, share, reason = change
        allowed = "as little as can be" if share is None else format_bytes(int(share * self.policy.plain_bytes))
        plain = format_bytes(self.policy.plain_bytes)
        log.info("Adacc: step %d: %s; the regions, %s in all, are compiled again for %s", step, reason, plain, allowed)
        self._note(step, "change", share=share, reason=reason)
        self._installed.partitioner.start_over(share)
        self._installed.compile_again()
        self._num_steps = self._num_noted = 0
        self._next = None

    def _budget_bytes(self, device: torch.device) -> int:
        budget = self._config.memory_budget
        if budget == "auto":
            available = min(of_all_ranks(available_bytes(device, self._meter.static_bytes)))
            return int(available * (1 - self._config.memory_margin))
        assert not isinstance(budget, float)  # which is one of what is stored, whatever the peak
        return parse_bytes(budget, "memory_budget") if isinstance(budget, str) else budget


class _ShareChange(NamedTuple):
    """What a step showed to be needed; regions are compiled for it when the next one begins, if there is one."""

    step: int
    share: float | None
    """None: the least possible."""
    reason: str


def _warn_of_idle_settings(config: AdaccConfig) -> None:
    """Name the settings that were given and have no effect in compiled graphs."""
    idle = [f.name for f in fields(config) if f.name not in RUN_SETTINGS and getattr(config, f.name) != f.default]
    if idle:
        log.warning(
            "Adacc: %s: no effect with torch.compile on, whose graphs are cut by %s",
            ", ".join(f"{name}={getattr(config, name)!r}" for name in idle),
            ", ".join(RUN_SETTINGS),
        )


def _fair_share(policy: CompiledPolicy, budget: float) -> float | None:
    """The share for regions that can keep to theirs with which all together store `budget`; None if there is none."""
    if policy.share is None:
        return None
    stuck = [plan for plan in policy.in_force if plan.stored_bytes > policy.share * plan.plain_bytes]
    rest_bytes = policy.plain_bytes - sum(plan.plain_bytes for plan in stuck)
    left_bytes = budget * policy.plain_bytes - sum(plan.stored_bytes for plan in stuck)
    return left_bytes / rest_bytes if rest_bytes and left_bytes > 0 else None


def _without_checkpointing(model: Any) -> Callable[[], None]:
    """Switch off torch's checkpointing, which would leave nothing to decide; returns what switches it on again."""
    modules = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]

    def switch(on: bool) -> None:
        for module in modules:
            module.gradient_checkpointing = on

    switch(False)
    return lambda: switch(True)


# How a Trainer's run is compiled with Adacc; Inductor, slow to import, is imported only then.


def begin_compiled_run(
    config: AdaccConfig, model: Any, note: Callable[..., None], given: Any, checkpoint: str | Path | None
) -> tuple[CompiledRun, list[dict[str, Any]]]:
    """A run under the policy file `given`, or the one in `checkpoint`, or one that is still to be found; its history.

    A checkpoint's is followed if it was found for the same budget, and all that is needed for it was measured.

    Raises ValueError for a policy of runs without torch_compile.
    """
    from adacc_hf.compiler import CompiledPolicy

    if given is not None and not isinstance(given, (str, Path)):
        raise ValueError(
            f"policy={type(given).__name__} belongs to runs without torch_compile=True: compiled graphs take the path "
            f"of an {COMPILED_FILE} that such a run left in its checkpoint"
        )

    def load() -> tuple[CompiledPolicy | None, list[dict[str, Any]]]:
        kept = None if checkpoint is None else Path(checkpoint) / COMPILED_FILE
        if given is not None or kept is None or not kept.is_file():
            return None if given is None else CompiledPolicy.load(given), []
        found, history = CompiledPolicy.load(kept), read_json(kept.with_name(HISTORY_FILE), AdaccError, "history")
        if found.settled_for != config.memory_budget:
            log.info(
                "Adacc: %s is settled for %r, not %r: deciding anew", kept, found.settled_for, config.memory_budget
            )
            return None, history
        return found, history

    # The first rank decides, also where the others do not see its files: all ranks must measure peaks, or none.
    policy, history = from_first_rank(load)
    return CompiledRun(config, model, note, policy), history
