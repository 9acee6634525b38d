"""Memory control of a Trainer run with torch_compile=True.

A partitioner decides which values each compiled graph stores for backward. A graph may store a fraction, called the
share, of the bytes that the graph would store under plain torch.compile. If the memory budget is in bytes, the share is
set from the measured peaks of the first steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adacc_hf.adapt.checkpoint_files import save_history
from adacc_hf.adapt.history import UNCOMPILED
from adacc_hf.adapt.peak_check import StepMeter
from adacc_hf.adapt.policy_checks import ALL_BLOCKS, excluded_codec, refuse_uncovered
from adacc_hf.adapt.run_state import Phase, RunState
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import AdaccError, InfeasibleBudgetError
from adacc_hf.artifacts.files import COMPILED_FILE, HISTORY_FILE, read_json
from adacc_hf.artifacts.units import format_bytes, parse_bytes
from adacc_hf.compiler import AdaccPartitioner, CompiledPolicy
from adacc_hf.compiler.backend import InstalledPartitioner
from adacc_hf.compiler.compiled_policy import PlanStore
from adacc_hf.compiler.functorch import recompile_limit
from adacc_hf.compiler.partitioner import GRAPH_SETTINGS
from adacc_hf.torch_glue.distributed import broadcast_from_first_rank, gather_from_all_ranks
from adacc_hf.torch_glue.memory import available_bytes
from adacc_hf.torch_glue.private import tree_leaves
from adacc_hf.torch_glue.progress import SlowReport, announce

log = logging.getLogger(__name__)

MAX_ROUNDS = 4  # compilations of all graphs for a better share, each as long as the first one
SLACK = 0.03  # fraction of the budget that may stay unused without another compilation
MARGIN = 0.01  # of plain torch.compile's bytes, which graphs store less, besides the excess, after an exceeded budget
NO_NESTED_REGIONS = "leave torch.utils.checkpoint and nested compiled regions out of the model"
FEWER_SIZES = "raise torch._dynamo.config.recompile_limit, or train with fewer different batch sizes"
RUN_SETTINGS = (*GRAPH_SETTINGS, "memory_margin", "on_uncovered", "profile_steps")
"""Fields of `AdaccConfig` that affect a run with torch.compile."""


class CompiledRun(Phase):
    """Phase of a Trainer's run with `torch_compile=True`. Keeps the compiled graphs (regions) within a budget.

    Each region may store a fraction of the bytes that it stores under plain torch.compile. This fraction, the *share*,
    is the same for all regions and on all ranks.

    If the budget is a fraction too, it limits the sum of all regions: the sum of their bytes, divided by the sum under
    plain torch.compile. A region that a micro-batch calls several times counts several times. If one region cannot stay
    within the share, the share is lowered, so that the other regions store less.

    If the budget is in bytes, the first steps run with graphs that store as little as possible. Then the share is
    raised by the memory that these steps have left unused, and the regions are compiled and measured again.

    All ranks compile again at the same steps. The rank with the highest peak determines the share. Each rank plans its
    own graphs within the share, with its own costs and batch sizes. Ranks may store different tensors, because
    gradients are reduced outside the graphs.
    """

    def __init__(self, run: RunState, initial_policy: CompiledPolicy | None = None) -> None:
        """Install the partitioner for the run. The run follows `initial_policy` unchanged. If `initial_policy` is None,
        plans are made for the run's budget."""
        super().__init__(run)
        self._config = config = run.config
        self._fraction = config.memory_budget if isinstance(config.memory_budget, float) else None
        _warn_of_idle_settings(config)
        self._is_settled = initial_policy is not None
        self._is_measured = False
        self._num_steps = self._num_noted = self._num_rounds = 0
        self._is_reached = False
        self._is_called = True
        """True if the last forward called a compiled graph, or if unknown."""
        self.fell_back = False
        """True if any forward of the last step called no compiled graph, so that torch ran the model eagerly."""
        self._is_warned = False
        self._num_elements = self._most_elements = 0
        """Input elements of the largest micro-batch in the current step, and in all measured steps."""
        self._least_peak_bytes: int | None = None
        """Estimated peak if all compiled graphs store the least possible. None before the first measured step."""
        self._next_change: _ShareChange | None = None  # to be made at the start of the next step
        self._meter = StepMeter()
        self._report: SlowReport | None = None  # in steps that compile the model
        self.peak_bytes: int | None = None
        """Peak of the last measured step, including the optimizer's step."""
        if initial_policy is None and self._fraction is None:
            initial_policy = CompiledPolicy(share=None)
        partitioner = AdaccPartitioner(config, initial_policy, PlanStore())
        self._undo_checkpointing = _without_checkpointing(run.model)
        self._installed = InstalledPartitioner(partitioner)
        announce(
            "Adacc: memory_budget=%r with torch.compile: the activations of each region are decided when torch "
            "compiles it, in the first step. To meet the budget, all regions may be compiled again after later steps, "
            "up to %d times. Outlier tracking, the accuracy guard and the head's actions have no effect",
            config.memory_budget,
            MAX_ROUNDS + 1,
        )

    @property
    def policy(self) -> CompiledPolicy:
        """Policy with the plans of the graphs compiled so far."""
        settled_for = self._config.memory_budget if self._is_settled and self._next_change is None else None
        return replace(self._installed.partitioner.policy, settled_for=settled_for)

    @property
    def is_compiling(self) -> bool:
        """True in a step in which torch.compile compiles graphs: the first step, and each first step with a new
        share."""
        return self._num_steps == 0

    def _note(self, step: int, event: str, **figures: Any) -> None:
        self._run.history.append({"step": step, "event": event, **figures})

    def begin_step(self, step: int) -> None:
        if self._next_change is not None:
            self._compile_again(self._next_change)
        self._end_report()
        if self.is_compiling:
            self._report = SlowReport("a step that compiles the model")
        self._num_elements, self.fell_back = 0, False
        # A step that compiles is not representative, and the first step allocates the optimizer's state.
        is_late = self._num_steps >= max(1, self._config.profile_steps - 1)
        self._is_measured = is_late and self._fraction is None and not self._is_settled
        if self._is_measured:
            self._meter.begin(self._run.model, self._run.optimizer)

    def note_loss(self, result: Any, inputs: Any) -> None:
        """Count a micro-batch's calls of compiled graphs and its input elements, between forward and backward."""
        if isinstance(result, torch.Tensor):
            self._installed.count_calls(result)
            self._check_called(result)
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
            self._num_elements = max(self._num_elements, sum(tensor.numel() for tensor in tensors))
        if self.fell_back:
            refuse_uncovered(self._config, ALL_BLOCKS, UNCOMPILED, FEWER_SIZES)

    def end_step(self, step: int) -> None:
        """Report the newly compiled graphs. After a measured step, adjust the share. Raises RuntimeError if no compiled
        graph reached Adacc in the first step."""
        run, num_events = self._run, len(self._run.history)
        self._end_report()
        self._check_reached()
        self._num_steps += 1
        self._meter.end_backward()
        for plan in self.policy.regions[self._num_noted :]:
            self._note(
                step, "policy", region=plan.region, stored_bytes=plan.stored_bytes, plain_bytes=plan.plain_bytes,
                overhead_ms=plan.overhead_ms, calls=plan.calls, reason=plan.reason,
            )  # fmt: skip
        self._num_noted = len(self.policy.regions)
        if self._fraction is not None and not self._is_settled:
            self._share_fairly(step, self._fraction)
        elif self._is_measured:
            self._settle(step, next(run.model.parameters()).device)
        run.compiled_policy = self.policy
        for refusal in self._installed.partitioner.refusals:  # graphs of torch's own partitioner, which have no budget
            refuse_uncovered(self._config, "a compiled region", refusal, NO_NESTED_REGIONS)
        if self.fell_back:
            run.fallbacks[UNCOMPILED] += 1
            run.count_step()
        if len(run.history) > num_events:
            run.write(self.save)

    def figures(self, logs: dict[str, float]) -> dict[str, float]:
        figures = {}
        if self._is_called:
            figures["adacc/stored_gib"] = self.policy.stored_bytes / 2**30
            figures["adacc/overhead_ms"] = self.policy.overhead_ms
        if self._is_called and self.policy.plain_bytes:
            figures["adacc/compression_rate"] = self.policy.stored_bytes / self.policy.plain_bytes
        if self.peak_bytes is not None:
            figures["adacc/measured_peak_gib"] = self.peak_bytes / 2**30
        return figures | self._run.fallback_figures()

    def save(self, folder: Path) -> None:
        """Write the compiled regions' policy and the history into `folder`, for reports and for resumed runs."""
        save_history(folder, self._run.history)  # first: a resumed run reads the history if there is a policy
        self.policy.save(Path(folder) / COMPILED_FILE)

    def remove(self) -> None:
        """Remove the partitioner from torch and drop all compiled code. A second call has no effect."""
        self._end_report(has_failed=True)  # the run ends within the step
        self._meter.close()
        self._installed.remove()
        self._undo_checkpointing()

    def _end_report(self, has_failed: bool = False) -> None:
        """End the report on the current step (`_report`), if there is a report."""
        if self._report is not None:
            self._report.end(has_failed)
            self._report = None

    def _check_reached(self) -> None:
        self._is_reached = self._is_reached or bool(self.policy.regions)
        if not self._is_reached:
            raise RuntimeError(
                "no compiled graph reached Adacc in the first step. Either the Trainer got a model that was compiled "
                "already, with a backend that has its own partitioner (such as 'adacc', which follows its own options) "
                "or none, or torch.compile is off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE, "
                "torch.compiler.set_stance): give the Trainer the uncompiled model and let torch compile it, or train "
                "without AdaccCallback"
            )

    def _check_called(self, loss: torch.Tensor) -> None:
        """Warn once if a forward called no compiled graph, because torch then runs the model eagerly."""
        self._is_called = loss.grad_fn is None or self._installed.partitioner.is_called(loss)
        self.fell_back |= self._is_reached and not self._is_called
        if self._is_reached and not (self._is_called or self._is_warned):
            log.warning(
                "Adacc: a forward ran without compiled graphs. This forward and similar ones have no budget. The "
                "cause is torch.compiler.set_stance, or torch._dynamo.config.recompile_limit=%d was reached (torch "
                "warned about it): raise the limit, or train with fewer different batch sizes",
                recompile_limit(),
            )
            self._is_warned = True

    def _share_fairly(self, step: int, budget: float) -> None:
        """Lower the share for the next step if all regions together store more than the fraction `budget` of plain
        torch.compile's bytes. Raises InfeasibleBudgetError if they store the least possible already."""
        policy = self.policy
        figures = (policy.stored_bytes, policy.plain_bytes, _fair_share(policy, budget))
        stored_bytes, plain_bytes, share = max(
            gather_from_all_ranks(figures), key=lambda rank: rank[0] / max(rank[1], 1)
        )
        self._is_settled = stored_bytes <= budget * plain_bytes
        if self._is_settled:
            return
        if policy.share is None:
            raise InfeasibleBudgetError(
                f"memory_budget={budget!r} allows {format_bytes(int(budget * plain_bytes))} of the "
                f"{format_bytes(plain_bytes)} that torch.compile stores, and the least possible with "
                f"{self._config.describe_actions()} is {format_bytes(stored_bytes)}: raise memory_budget to at least "
                f"{math.ceil(1000 * stored_bytes / plain_bytes) / 1000:.3f}, allow more actions, or compile the model "
                f"with fewer graph breaks",
                stored_bytes,
            )
        self._num_rounds += 1
        # Storing the least possible takes far more time than a fair share, so it is the last resort. Batches of another
        # size have another fair share.
        share = share if self._num_rounds <= MAX_ROUNDS else None
        self._next_change = _ShareChange(step, share, "some regions cannot stay within their share")

    def _settle(self, step: int, device: torch.device) -> None:
        """Set the share from the measured peak of a step, if the budget is in bytes. Raises InfeasibleBudgetError if a
        step exceeds the budget although all regions store the least possible."""
        policy = self.policy
        figures = gather_from_all_ranks(
            (self._meter.peak_bytes, policy.peak_bytes, policy.plain_bytes, self._num_elements)
        )
        measured = [(peak, *others) for peak, *others in figures if peak is not None]
        if len(measured) < len(figures):
            return
        peak_bytes, modelled_bytes, plain_bytes, num_elements = max(measured)
        is_smaller = num_elements < self._most_elements
        self._most_elements = max(self._most_elements, num_elements)
        self.peak_bytes = peak_bytes
        budget_bytes = self._budget_bytes(device)
        if self._least_peak_bytes is None:
            if peak_bytes > budget_bytes:
                raise InfeasibleBudgetError(
                    f"memory_budget={self._config.memory_budget!r} allows {format_bytes(budget_bytes)}, and a step has "
                    f"a peak of {format_bytes(peak_bytes)} at this batch size even if the compiled graphs store the "
                    f"least possible: raise memory_budget to at least that, or use a smaller batch",
                    peak_bytes,
                )
            self._least_peak_bytes = modelled_bytes
        else:
            self._note(step, "memory", measured_peak_bytes=peak_bytes, budget_bytes=budget_bytes)
        free_bytes = budget_bytes - peak_bytes
        # Memory left by a small batch is needed by larger batches. Their peak has determined the share.
        is_full = free_bytes <= SLACK * budget_bytes or modelled_bytes >= plain_bytes or is_smaller
        fits = free_bytes >= 0 and is_full
        self._num_rounds += 1
        if fits or (free_bytes >= 0 and self._num_rounds > MAX_ROUNDS):
            self._is_settled = True
            return
        allowed_bytes = modelled_bytes + free_bytes - (int(MARGIN * plain_bytes) if free_bytes < 0 else 0)
        is_last = self._num_rounds > MAX_ROUNDS or allowed_bytes <= self._least_peak_bytes
        self._is_settled = is_last
        # All regions together use less than their share, because most are not at their own peak at the step's peak.
        share, used_bytes = (1.0, plain_bytes) if self.policy.share is None else (self.policy.share, modelled_bytes)
        reason = f"a measured peak of {format_bytes(peak_bytes)}"
        next_share = None if is_last else min(1.0, share * allowed_bytes / max(used_bytes, 1))
        self._next_change = _ShareChange(step, next_share, reason)

    def _compile_again(self, change: _ShareChange) -> None:
        """Recompile all regions with the changed share."""
        step, share, reason = change
        allowed = "the least possible" if share is None else format_bytes(int(share * self.policy.plain_bytes))
        plain = format_bytes(self.policy.plain_bytes)
        announce(
            "Adacc: step %d: %s: all regions are compiled again to store %s (torch.compile alone stores %s)",
            step, reason, allowed, plain,
        )  # fmt: skip
        self._note(step, "change", share=share, reason=reason)
        self._installed.partitioner.start_over(share)
        self._installed.compile_again()
        self._num_steps = self._num_noted = 0
        self._next_change = None

    def _budget_bytes(self, device: torch.device) -> int:
        budget = self._config.memory_budget
        if budget == "auto":
            available = min(gather_from_all_ranks(available_bytes(device, self._meter.static_bytes)))
            return int(available * (1 - self._config.memory_margin))
        assert not isinstance(budget, float)  # a fraction bounds the stored bytes, not the peak
        return parse_bytes(budget, "memory_budget") if isinstance(budget, str) else budget


class _ShareChange(NamedTuple):
    """Change of the share at the start of the next step."""

    step: int
    share: float | None
    """New share, or None to store the least possible."""
    reason: str


def _warn_of_idle_settings(config: AdaccConfig) -> None:
    idle = [f.name for f in fields(config) if f.name not in RUN_SETTINGS and getattr(config, f.name) != f.default]
    if idle:
        log.warning(
            "Adacc: %s: no effect with torch.compile on; settings with an effect: %s",
            ", ".join(f"{name}={getattr(config, name)!r}" for name in idle),
            ", ".join(RUN_SETTINGS),
        )


def _fair_share(policy: CompiledPolicy, budget: float) -> float | None:
    """Return a share below the policy's share at which all regions together stay within the fraction `budget` of plain
    torch.compile's bytes. Regions that cannot stay within the current share continue to store the same bytes, so the
    new share is computed for the others. Return None if no share is low enough, or if the regions store the least
    possible already."""
    if policy.share is None:
        return None
    stuck = [plan for plan in policy.call_plans if plan.stored_bytes > policy.share * plan.plain_bytes]
    rest_bytes = policy.plain_bytes - sum(plan.plain_bytes for plan in stuck)
    remaining_bytes = budget * policy.plain_bytes - sum(plan.stored_bytes for plan in stuck)
    return remaining_bytes / rest_bytes if rest_bytes and remaining_bytes > 0 else None


def _without_checkpointing(model: Any) -> Callable[[], None]:
    """Switch off gradient checkpointing in `model`. Return a function that switches checkpointing on again. Only
    torch's own partitioner can partition a checkpointed graph, so Adacc would have nothing to decide."""
    modules = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]

    def switch(on: bool) -> None:
        for module in modules:
            module.gradient_checkpointing = on

    switch(False)
    return lambda: switch(True)


# Start of a Trainer's run with torch.compile. Inductor is slow to import, so this module is imported only then.


def begin_compiled_run(run: RunState, checkpoint: str | Path | None = None) -> CompiledRun:
    """Return the phase of a run, which follows the user's policy file, else the `checkpoint`'s policy, else new plans.

    The checkpoint's policy is followed only if it has no codecs that the config excludes, and the run that saved it had
    finished adjusting the share for the same budget. The run continues that run's history. Raises ValueError if the
    user's policy is not a path, or if the policy in the file has codecs that the config excludes.
    """
    config, policy_file = run.config, run.source
    if policy_file is not None and not isinstance(policy_file, (str, Path)):
        raise ValueError(
            f"policy={type(policy_file).__name__} belongs to runs without torch_compile=True: for compiled graphs, set "
            f"policy to the path of a {COMPILED_FILE} from the checkpoint of a run with torch_compile=True"
        )

    def excluded_in(policy: CompiledPolicy) -> str | None:
        return excluded_codec((choice for plan in policy.regions for _, choice in plan.stored), config)

    def load() -> tuple[CompiledPolicy | None, list[dict[str, Any]]]:
        if policy_file is not None:
            policy = CompiledPolicy.load(policy_file)
            if reason := excluded_in(policy):
                raise ValueError(
                    f"policy={str(policy_file)!r} {reason}: leave out this setting, or pass a policy that was planned "
                    f"with it"
                )
            return policy, []
        saved_file = None if checkpoint is None else Path(checkpoint) / COMPILED_FILE
        if saved_file is None or not saved_file.is_file():
            return None, []
        policy, history = (
            CompiledPolicy.load(saved_file),
            read_json(saved_file.with_name(HISTORY_FILE), AdaccError, "history"),
        )
        if policy.settled_for != config.memory_budget:
            reason = f"is settled for memory_budget={policy.settled_for!r}, not {config.memory_budget!r}"
        else:
            reason = excluded_in(policy)
        if reason is None:
            return policy, history
        announce("Adacc: %s %s: planning again", saved_file, reason)
        return None, history

    # The first rank decides, even if the others cannot read its files: all ranks must measure peaks, or none.
    policy, run.history = broadcast_from_first_rank(load)
    return CompiledRun(run, policy)
