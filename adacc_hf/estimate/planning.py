"""Plan a training run without starting it: predict the peak memory, its breakdown by phase, and the step time."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from torch import nn

from adacc_hf.artifacts.call_names import call_name, calls_per_block
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.memory_simulator import Outcome, simulate_policy
from adacc_hf.artifacts.policy import BlockAction, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate.fake_model import FakeModel, Workload, fake_model
from adacc_hf.estimate.static_memory import StaticMemory, static_memory
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy
from adacc_hf.solve.solver import solve_policy
from adacc_hf.torch_glue.compat import attention_of
from adacc_hf.torch_glue.memory import distinct_bytes

log = logging.getLogger(__name__)

METHODS = ("plain", "full recomputation", "adacc")
"""Training methods that are compared: retaining every activation, torch's checkpoint around every block, and the policy
from the solver."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Settings of the training run whose memory and time are predicted."""

    model: str
    workload: Workload
    batch_size: int
    seq_len: int
    optimizer: str = "adamw"
    accumulates: bool = False
    """True if a step has several micro-batches. Gradients then stay allocated while the next micro-batch runs."""
    budget_bytes: int | None = None
    """Budget in bytes per device. None means the device's memory minus a margin, the fraction
    `AdaccConfig.memory_margin`."""
    longest_seq_len: int | None = None
    """Context length of the model, up to which the longest sequence is searched. None if the model has no limit."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch-size={self.batch_size} must be at least 1: the number of sequences per device")
        if self.seq_len < 2:
            raise ValueError(
                f"--seq-len={self.seq_len} must be at least 2: each token is predicted from the preceding tokens"
            )

    @property
    def budget(self) -> int:
        """Budget of the planned run in bytes, by default the device's memory without the margin."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        return int(self.workload.device.memory_bytes * (1 - self.workload.adacc.memory_margin))

    def cures(self, *cures: str) -> str:
        """Return `cures` and other changes of the settings that reduce memory, without those that are made."""
        workload = self.workload
        cures += ("--fsdp N or --zero 3 N",) if workload.quantization is None else ()
        cures += ("a smaller --optimizer", "--peft lora") if workload.adapters is None else ()
        cures += ("--load-in-4bit",) if workload.adapters is not None and workload.quantization is None else ()
        return f"{', '.join(cures[:-1])}{' or ' if cures[1:] else ''}{cures[-1]}"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted memory and time of one training step with one of the training METHODS."""

    fits: bool
    peak_bytes: int
    """Peak of live bytes. For method "adacc", the smallest peak of any policy if no policy fits the budget."""
    step_ms: float | None
    """Milliseconds of one forward and backward. None for method "adacc" if no policy fits the budget."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Predictions for a training run: static memory, policy, and a forecast per training method."""

    request: Request
    attention: str
    """Names of the attention implementations in the model, joined by "and"."""
    static: StaticMemory
    profile: Profile
    policy: Policy | None
    """Policy from the solver. None if no policy fits the budget."""
    bound_bytes: int | None
    """Lower bound on the peak of every policy. None if a policy fits the budget."""
    forecasts: dict[str, Forecast]
    image_tokens: int
    """Number of tokens of each sequence that stand for images."""
    phases: dict[str, int]
    """Peak of live bytes in each phase of the step, under the policy, or under full recomputation if no policy fits."""


def plan(request: Request) -> TrainingPlan:
    """Return the predictions for the training run of `request`.

    Raises ValueError if the budget is below the static memory (parameters, gradients and optimizer state), and
    FakeDeviceError or AdaccError if the model cannot be traced.
    """
    log.info("building %s without memory", request.model)
    with fake_model(request.workload) as model:
        return TrainingPlanner(request, model).plan()


def static_shortage(request: Request, static: StaticMemory) -> str | None:
    """Return in words that the budget is below the memory that training takes without any activation, or None."""
    required_bytes = max(static.resting_bytes, static.update_peak_bytes)
    if request.budget >= required_bytes:
        return None
    return (
        f"{format_bytes(request.budget)} is below the {format_bytes(required_bytes)} that training takes without any "
        f"activation (parameters {format_bytes(static.parameters_bytes)}, gradients "
        f"{format_bytes(static.gradients_bytes)}, optimizer {format_bytes(static.optimizer_bytes)}), so no policy can "
        f"help: use {request.cures('a larger --device', 'a smaller --dtype or --model')}"
    )


class TrainingPlanner:
    """Planner of one training run, with its fake model and the profiles of the batch shapes traced so far."""

    def __init__(self, request: Request, model: FakeModel) -> None:
        self.request = request
        self.model = model
        workload = model.workload
        self.static = static_memory(
            model.model, model.blocks, request.optimizer, workload.sharding, workload.has_master_weights
        )
        self._traced: dict[tuple[int, int], Profile] = {}
        """Profiles by (batch size, sequence length)."""

    def plan(self) -> TrainingPlan:
        request = self.request
        self.check_budget()
        log.info(
            "tracing a step of %d x %d tokens in %d blocks", request.batch_size, request.seq_len, len(self.model.blocks)
        )
        profile = self.profile()
        log.info("solving for a policy within %s", format_bytes(request.budget))
        policy, bound_bytes = None, None
        try:
            policy = solve_policy(profile, request.budget, request.workload.adacc)
            peak_bytes = policy.predicted_peak_bytes
        except InfeasibleBudgetError as error:
            peak_bytes, bound_bytes = error.smallest_budget_bytes, error.bound_bytes
        full = fully_recomputed(profile)
        return TrainingPlan(
            request=request,
            attention=" and ".join(attention_of(self.model.model)),
            static=self.static,
            profile=profile,
            policy=policy,
            bound_bytes=bound_bytes,
            forecasts=self._forecasts(profile, full, policy, peak_bytes),
            image_tokens=self.model.image_tokens,
            phases=_phase_peaks(simulate_policy(profile, policy or full)),
        )

    def check_budget(self) -> None:
        """Raise ValueError for a budget below the memory that training takes without any activation."""
        shortage = static_shortage(self.request, self.static)
        if self.request.budget_bytes is not None and shortage is not None:
            raise ValueError(f"--budget={shortage}, or raise the budget")

    def profile_at(self, batch_size: int, seq_len: int) -> Profile:
        """Return the profile of one step at a batch size and a sequence length, which is traced if necessary."""
        shape = (batch_size, seq_len)
        if shape not in self._traced:
            self._traced[shape] = self._for_training(self.model.profile(*shape))
        return self._traced[shape]

    def profile(self) -> Profile:
        """Return the profile of one step at the requested batch size and sequence length."""
        return self.profile_at(self.request.batch_size, self.request.seq_len)

    def _for_training(self, profile: Profile) -> Profile:
        """Return `profile` with the memory of one device's parameters, gradients and optimizer state in the run."""
        model = self.model.model
        extra_bytes = self.static.resting_bytes - distinct_bytes([*model.parameters(), *model.buffers()])
        gradients = self._finished_gradient_bytes([block.name for block in profile.blocks])
        if self.request.accumulates:
            # The accumulated gradients are live during the whole step. A traced gradient is added to them and freed at
            # once. The running block's gradients are counted until the block ends, so the peak may be too high by them.
            extra_bytes += self.static.gradients_bytes
            shifts = {name: extra_bytes - nbytes for name, nbytes in gradients.items()}
        else:
            # Only a shard of each finished gradient stays live, possibly in a dtype that differs from the traced one.
            share = self.static.gradients_bytes / max(1, _trained_bytes(model))
            shifts = {name: extra_bytes - int((1 - share) * nbytes) for name, nbytes in gradients.items()}
        in_order = [shifts[block.name] for block in profile.blocks]
        return replace(
            profile.with_extra_live_bytes(extra_bytes, extra_bytes, in_order, shifts["tail"]),
            static_bytes=profile.static_bytes + extra_bytes,
            optimizer_peak_bytes=self.static.update_peak_bytes,
            available_bytes=self.request.workload.device.memory_bytes,
        )

    def _finished_gradient_bytes(self, blocks: list[str]) -> dict[str, int]:
        """Return, by block, the traced bytes of all gradients that are complete when the block's backward starts. The
        item "tail" contains the bytes at the end of the backward of all blocks. Gradients of the output embedding and
        of norms outside the blocks are complete before the blocks' gradients. Gradients of other embeddings are
        complete after the blocks' gradients. Under FSDP, parameters outside the blocks are left out, because FSDP
        shards their gradients only after backward."""
        model, sharding = self.model.model, self.request.workload.sharding
        last_calls = {block: call_name(block, number) for block, number in calls_per_block(blocks).items()}
        # If a block is called several times, backward starts with its last call, which allocates its gradients.
        bytes_by_call = dict.fromkeys(blocks, 0)
        bytes_by_call |= {call: _trained_bytes(model.get_submodule(block)) for block, call in last_calls.items()}
        finished_bytes = 0
        if sharding.method != "fsdp":
            embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
            head = getattr(model.get_output_embeddings(), "weight", None)
            late_bytes = sum(_trained_bytes(module) for module in embeddings if module.weight is not head)
            finished_bytes = _trained_bytes(model) - late_bytes - sum(bytes_by_call.values())
        bytes_at_start = {}
        for name in reversed(blocks):
            bytes_at_start[name] = finished_bytes
            finished_bytes += bytes_by_call[name]
        return {**bytes_at_start, "tail": finished_bytes}

    def _forecasts(self, profile: Profile, full: Policy, policy: Policy | None, peak_bytes: int) -> dict[str, Forecast]:
        plain_step_ms = plain_ms(profile)
        plain = uniform_policy(profile, "retain")
        adacc_ms = None if policy is None else plain_step_ms + policy.predicted_overhead_ms
        peaks = (plain.predicted_peak_bytes, full.predicted_peak_bytes, peak_bytes)
        times = (plain_step_ms, plain_step_ms + full.predicted_overhead_ms, adacc_ms)
        return {
            method: Forecast(fits=peak <= self.request.budget, peak_bytes=peak, step_ms=step_ms)
            for method, peak, step_ms in zip(METHODS, peaks, times, strict=True)
        }


def fully_recomputed(profile: Profile) -> Policy:
    """Return the policy under which torch's checkpoint runs every block.

    Blocks with collective communication or tiles are checkpointed too, and all ranks run these blocks again in
    backward. A policy of the solver never checkpoints such blocks.
    """
    kinds = (replace(kind, block_actions=(BlockAction.CHECKPOINT,)) for kind in profile.kinds)
    return checkpoint_policy(replace(profile, kinds=tuple(kinds)))


def plain_ms(profile: Profile) -> float:
    """Return the milliseconds of a plain step, in which nothing is recomputed.

    The step in the profile also recomputes, so the time of recomputation is subtracted from its time.
    """
    return profile.step_ms - uniform_policy(profile, "recompute").predicted_overhead_ms


def _phase_peaks(outcome: Outcome) -> dict[str, int]:
    phases: dict[str, int] = {}
    for label, live in outcome.timeline:
        name = {"forward": "forward of the blocks", "backward": "backward of the blocks"}.get(label.split()[0], label)
        phases[name] = max(phases.get(name, 0), live)
    return phases


def _trained_bytes(module: nn.Module) -> int:
    return distinct_bytes(parameter for parameter in module.parameters() if parameter.requires_grad)
