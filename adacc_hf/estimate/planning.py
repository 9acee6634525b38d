"""A plan for a training run that was never started: whether it fits, what takes its memory, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import nn

from adacc_hf.artifacts.call_names import call_name, num_calls
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.memory_simulator import Outcome, simulate_policy
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate.fake_model import FakeModel, Workload, fake_model
from adacc_hf.estimate.reserved_memory import reserved_bytes
from adacc_hf.estimate.static_memory import StaticMemory, static_memory
from adacc_hf.solve.baselines import simulate_checkpointed
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import solve_policy
from adacc_hf.torch_glue.memory import distinct_bytes

METHODS = ("plain", "full recomputation", "adacc")
"""What is compared: everything kept, torch's checkpoint around every block, and the solved policy."""
_UNIFORM = {"plain": "retain", "quantization": "compress"}
"""Methods under which every activation has the same action."""
LARGEST_SEARCHED = 2**20
"""No batch or sequence beyond this is looked for."""
LENGTH_STEP = 8
"""Sequences are looked for in steps of 8 tokens: in between, attention kernels pad masks in copies of their own, so
that a longer sequence may take less memory."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked."""

    model: str
    workload: Workload
    batch_size: int
    seq_len: int
    optimizer: str = "adamw"
    accumulates: bool = False
    """Whether a step has several micro-batches, so that gradients are there while the next ones are computed."""
    budget_bytes: int | None = None
    """Bytes per device; None is the device's memory less `AdaccConfig.memory_margin`."""
    longest_seq_len: int | None = None
    """The model's context, beyond which no sequence is looked for."""
    find_largest: bool = True
    """Whether to look for the largest batch and the longest sequence, which takes a dozen traces more."""
    profile: Profile | None = None
    """A saved profile to take in place of a trace."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch-size={self.batch_size} must be at least 1: it counts the sequences per device")
        if self.seq_len < 2:
            raise ValueError(f"--seq-len={self.seq_len} must be at least 2: a token is predicted from those before it")

    @property
    def budget(self) -> int:
        if self.budget_bytes is not None:
            return self.budget_bytes
        return int(self.workload.device.memory_bytes * (1 - self.workload.adacc.memory_margin))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One method's step."""

    fits: bool
    peak_bytes: int
    """Of adacc where it does not fit: the least there is."""
    step_ms: float | None
    """Time of one forward and backward; None where no policy fits."""
    reserved_bytes: int | None = None
    """What the allocator keeps for it; None where its steps are not run: of adacc's policy, and of shared models."""
    largest_batch: int | None = None
    longest_seq_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The answer to a request."""

    request: Request
    static: StaticMemory
    profile: Profile
    policy: Policy | None
    """None where no policy fits."""
    bound_bytes: int | None
    """What no policy's peak is below; None where one fits."""
    forecasts: dict[str, Forecast]
    phases: dict[str, int]
    """Most bytes live in each phase of the step under the policy, or under full recomputation where none fits."""


def training_profile(request: Request) -> tuple[StaticMemory, Profile]:
    """What training holds besides activations, and the profile of one step of `request` on one device.

    `uniform_policy` gives the peak of plain training, or of recomputation, from it. Raises as `plan` does.
    """
    with fake_model(request.workload) as model:
        planner = _Planner(request, model)
        return planner.static, planner.profile()


def allocator_bytes(request: Request, is_checkpointed: bool) -> int | None:
    """What the allocator keeps after steps of `request`, plain ones or under torch's checkpoint; None where that is not
    known: on several devices, and on a CPU. Raises as `plan` does."""
    with fake_model(request.workload) as model:
        return _reserved(request, model, is_checkpointed)


def largest_batches(request: Request, methods: Sequence[str]) -> dict[str, int]:
    """The largest batch of each of `methods` that fits the budget of `request`, at its sequence length.

    Besides METHODS there is "quantization", under which every activation is compressed that can be. 0 is for a method
    that no batch fits. Raises as `plan` does.
    """
    with fake_model(request.workload) as model:
        return _Planner(request, model).largest_batches(methods)


def plan(request: Request) -> Planned:
    """The plan for `request`.

    Raises ValueError for a budget below what training holds without any activation, FakeDeviceError and AdaccError for
    what cannot be traced.
    """
    with fake_model(request.workload) as model:
        return _Planner(request, model).plan()


class _Planner:
    """One request with its traced model."""

    def __init__(self, request: Request, model: FakeModel) -> None:
        self.request = request
        self.model = model
        workload = model.workload
        self.static = static_memory(
            model.model, model.blocks, request.optimizer, workload.sharding, workload.has_master_weights
        )
        self._traced: dict[tuple[int, int], Profile] = {}
        """By batch size and sequence length."""
        self._peak = cache(self._least_peak)

    def plan(self) -> Planned:
        request = self.request
        _check_budget(request, self.static)
        _check_profile(request.profile, self.model)
        profile = self.profile()
        policy, peak_bytes, bound_bytes = _solved(profile, request.budget, request.workload.adacc)
        forecasts = self._forecasts(profile, policy, peak_bytes)
        if request.find_largest and request.profile is None:
            self._traced[request.batch_size, request.seq_len] = profile
            forecasts = self._with_largest(forecasts)
        return Planned(
            request=request,
            static=self.static,
            profile=profile,
            policy=policy,
            bound_bytes=bound_bytes,
            forecasts=forecasts,
            phases=_phases(simulate_checkpointed(profile) if policy is None else simulate_policy(profile, policy)),
        )

    def profile(self) -> Profile:
        """The profile of the step that is asked for."""
        request = self.request
        return self._for_training(request.profile or self.model.profile(request.batch_size, request.seq_len))

    def _for_training(self, profile: Profile) -> Profile:
        """`profile` on one of the devices that train, with the optimizer's state and its step."""
        added = self.static.resting_bytes - self._state_bytes(profile)
        gradients = self._cut_gradients([block.name for block in profile.blocks])
        if self.request.accumulates:
            # All gradients are there all the time. What the traced backward makes is added to them and let go, but
            # for that of the block at work, which is counted until the block ends: at most that much too high.
            added += self.static.gradients_bytes
            shifts = {name: added - nbytes for name, nbytes in gradients.items()}
        else:
            # What is left of a traced gradient that was cut, perhaps in another dtype.
            share = self.static.gradients_bytes / max(1, _trained_bytes(self.model.model))
            shifts = {name: added - int((1 - share) * nbytes) for name, nbytes in gradients.items()}
        in_order = [shifts[block.name] for block in profile.blocks]
        return replace(
            profile.with_more_live(added, in_order, shifts["tail"]),
            static_bytes=profile.static_bytes + added,
            optimizer_peak_bytes=self.static.update_peak_bytes,
            available_bytes=self.request.workload.device.memory_bytes,
        )

    def _cut_gradients(self, blocks: list[str]) -> dict[str, int]:
        """Traced bytes of the gradients that were cut when each block's backward starts, and, as "tail", at its end.

        Those of the output embedding and of norms come before the blocks', those of other embeddings after; FSDP cuts
        what is outside the blocks only when backward is over.
        """
        model, sharding = self.model.model, self.request.workload.sharding
        last = {block: call_name(block, number) for block, number in num_calls(blocks).items()}
        # The gradients of a block that is called again are there after the first backward, that of its last call.
        of_block = dict.fromkeys(blocks, 0)
        of_block |= {call: _trained_bytes(model.get_submodule(block)) for block, call in last.items()}
        so_far = 0
        if sharding.method != "fsdp":
            embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
            head = getattr(model.get_output_embeddings(), "weight", None)
            late = sum(_trained_bytes(module) for module in embeddings if module.weight is not head)
            so_far = _trained_bytes(model) - late - sum(of_block.values())
        found = {}
        for name in reversed(blocks):
            found[name] = so_far
            so_far += of_block[name]
        return {**found, "tail": so_far}

    def _state_bytes(self, profile: Profile) -> int:
        """What `profile` has for parameters, buffers and, if it was measured, all else that is there before a step."""
        if profile is self.request.profile:
            return profile.static_bytes
        return distinct_bytes([*self.model.model.parameters(), *self.model.model.buffers()])

    def _forecasts(self, profile: Profile, policy: Policy | None, peak_bytes: int) -> dict[str, Forecast]:
        without_ms = plain_ms(profile)
        plain, full = uniform_policy(profile, "retain"), simulate_checkpointed(profile)
        adacc_ms = None if policy is None else without_ms + policy.predicted_overhead_ms
        reserved = [_reserved(self.request, self.model, is_checkpointed) for is_checkpointed in (False, True)]
        return {
            "plain": self._forecast(plain.predicted_peak_bytes, without_ms, reserved[0]),
            "full recomputation": self._forecast(full.peak_bytes, without_ms + full.overhead_ms, reserved[1]),
            "adacc": self._forecast(peak_bytes, adacc_ms, None),
        }

    def _forecast(self, peak_bytes: int, step_ms: float | None, reserved: int | None) -> Forecast:
        fits = peak_bytes <= self.request.budget
        return Forecast(fits=fits, peak_bytes=peak_bytes, step_ms=step_ms, reserved_bytes=reserved)

    def _with_largest(self, forecasts: dict[str, Forecast]) -> dict[str, Forecast]:
        """The forecasts with the largest batch and the longest sequence, looked for from the method's before on."""
        found = {}
        largest_batch, seq_len = self.request.batch_size, self.request.seq_len
        for method, forecast in forecasts.items():
            largest_batch = self._largest_batch(method, max(1, largest_batch))
            seq_len = self._longest_seq_len(method, max(1, seq_len))
            found[method] = replace(forecast, largest_batch=largest_batch, longest_seq_len=seq_len)
        return found

    def largest_batches(self, methods: Sequence[str]) -> dict[str, int]:
        """The largest batch of each method, looked for from the one before on."""
        request = self.request
        _check_budget(request, self.static)
        self._traced[request.batch_size, request.seq_len] = self.profile()
        found: dict[str, int] = {}
        for method in methods:
            found[method] = self._largest_batch(method, max(1, *found.values(), request.batch_size))
        return found

    def _largest_batch(self, method: str, start: int) -> int:
        seq_len = self.request.seq_len
        hints = {batch: excess for (batch, length), excess in self._known(method).items() if length in (0, seq_len)}
        return largest(lambda n: self._excess(method, n, seq_len), start, LARGEST_SEARCHED, hints)

    def _longest_seq_len(self, method: str, start: int) -> int:
        request = self.request
        longest = request.longest_seq_len or LARGEST_SEARCHED
        hints = {
            length // LENGTH_STEP: excess
            for (batch, length), excess in self._known(method).items()
            if batch in (0, request.batch_size) and length % LENGTH_STEP == 0
        }

        def excess(steps: int) -> int:
            return self._excess(method, request.batch_size, min(LENGTH_STEP * steps, longest))

        found = largest(excess, start // LENGTH_STEP, -(-longest // LENGTH_STEP), hints)
        is_asked_for = self._excess(method, request.batch_size, request.seq_len) <= 0
        return max(min(LENGTH_STEP * found, longest), request.seq_len if is_asked_for else 0)

    def _known(self, method: str) -> dict[tuple[int, int], int]:
        """The excess of shapes that were traced, where it takes no solve; without any tokens, roughly."""
        shapes = [] if method == "adacc" else list(self._traced)
        rough = {(0, 0): self.static.resting_bytes - self.request.budget}
        return rough | {shape: self._excess(method, *shape) for shape in shapes}

    def _excess(self, method: str, batch_size: int, seq_len: int) -> int:
        return self._peak(method, batch_size, seq_len) - self.request.budget

    def _least_peak(self, method: str, batch_size: int, seq_len: int) -> int:
        """The least peak of a method at another shape."""
        shape = (batch_size, seq_len)
        if shape not in self._traced:
            self._traced[shape] = self._for_training(self.model.estimate(*shape))
        profile = self._traced[shape]
        if method == "adacc":
            return _least_peak(profile, self.request.workload.adacc)
        if method in _UNIFORM:
            return uniform_policy(profile, _UNIFORM[method]).predicted_peak_bytes
        return simulate_checkpointed(profile).peak_bytes


def _reserved(request: Request, model: FakeModel, is_checkpointed: bool) -> int | None:
    if request.workload.sharding.method != "none" or request.workload.trace == "cpu" or request.profile is not None:
        return None
    return reserved_bytes(
        model, request.batch_size, request.seq_len, request.optimizer, request.accumulates, is_checkpointed
    )


def _check_budget(request: Request, static: StaticMemory) -> None:
    needed = max(static.resting_bytes, static.update_peak_bytes)
    if request.budget_bytes is not None and request.budget_bytes < needed:
        raise ValueError(
            f"--budget={format_bytes(request.budget_bytes)} is below the {format_bytes(needed)} that training holds "
            f"without any activation (parameters {format_bytes(static.parameters_bytes)}, gradients "
            f"{format_bytes(static.gradients_bytes)}, optimizer {format_bytes(static.optimizer_bytes)}): raise it, "
            f"divide it with --fsdp N or --zero 3 N, choose a smaller --optimizer, --dtype or --model, or --peft lora"
        )


def _check_profile(profile: Profile | None, model: FakeModel) -> None:
    if profile is None:
        return
    given, expected = {block.name for block in profile.blocks}, set(model.block_names)
    if given != expected:
        raise ValueError(
            f"--profile is of {profile.model_class} with {len(given)} blocks, --model has {len(expected)} under other "
            f"names: give a profile of this very model"
        )


def _solved(profile: Profile, budget: int, config: AdaccConfig) -> tuple[Policy | None, int, int | None]:
    """The policy within `budget` and its peak, or None, the least budget that would do, and what none can be below."""
    try:
        policy = solve_policy(profile, budget, config)
    except InfeasibleBudgetError as error:
        return None, error.smallest_budget_bytes, error.bound_bytes
    return policy, policy.predicted_peak_bytes, None


def _least_peak(profile: Profile, config: AdaccConfig) -> int:
    """The least peak of any policy."""
    policy, least, _ = _solved(profile, 1, config)
    assert policy is None, "nothing fits a byte"
    return least


def plain_ms(profile: Profile) -> float:
    """Time of a plain step: the profiled one, less what was recomputed in it."""
    return profile.step_ms - uniform_policy(profile, "recompute").predicted_overhead_ms


def _phases(outcome: Outcome) -> dict[str, int]:
    """Most bytes live in each phase of the step."""
    phases: dict[str, int] = {}
    for label, live in outcome.timeline:
        name = {"forward": "forward of the blocks", "backward": "backward of the blocks"}.get(label.split()[0], label)
        phases[name] = max(phases.get(name, 0), live)
    return phases


def _trained_bytes(module: nn.Module) -> int:
    return distinct_bytes(parameter for parameter in module.parameters() if parameter.requires_grad)


# The largest whole number at which something still fits, in as few looks as a smooth cost allows.

NEAREST = 3
"""Points that the next look is guessed from: in a sequence's length, memory is a polynomial of degree 2 at most."""
STALLS = 3
"""Guesses in a row that may leave more than half of what is open; after those the middle is looked at."""

FARTHEST = 32
"""How many times the largest known to fit the next look may be, lest a rough guess goes far off."""


def largest(excess: Callable[[int], int], start: int, limit: int, hints: Mapping[int, int]) -> int:
    """The largest n from 1 to `limit` with excess(n) <= 0; 0 if there is none.

    `excess` must not fall. Both the answer and, but for `limit`, the number after it are looked at. Where those may be
    is guessed from the nearest points: those looked at, `start` the first, and `hints`; the one at 0 may be rough.
    """
    points = dict(hints)
    low, high, stalls = 0, limit + 1, 0
    guess = min(max(start, 1), limit)
    while low + 1 < high:
        open_before = high - low
        points[guess] = excess(guess)
        if points[guess] <= 0:
            low = guess
        else:
            high = guess
        stalls = stalls + 1 if 2 * (high - low) > open_before else 0
        middle = (low + high) // 2
        end = min(high, FARTHEST * low) if low else high
        guess = middle if stalls > STALLS else _last_below(_through(points, low, high), low, end)
    return low


def _through(points: Mapping[int, int], low: int, high: int) -> Callable[[int], float]:
    """The polynomial through both sides of the answer and the points nearest to it (Newton's divided differences)."""
    exact = [n for n in points if n > 0]
    nodes = sorted(exact if len(exact) > 1 else points, key=lambda n: (n not in (low, high), abs(points[n]), n))
    nodes = nodes[:NEAREST]
    terms = [float(points[n]) for n in nodes]
    for order in range(1, len(nodes)):
        for i in range(len(nodes) - 1, order - 1, -1):
            terms[i] = (terms[i] - terms[i - 1]) / (nodes[i] - nodes[i - order])

    def value(n: int) -> float:
        total = 0.0
        for node, term in zip(reversed(nodes), reversed(terms), strict=True):
            total = total * (n - node) + term
        return total

    return value


def _last_below(value: Callable[[int], float], low: int, high: int) -> int:
    """The last n strictly between `low` and `high` with value(n) <= 0 if `value` does not fall; else one of them."""
    below, above = low, high
    while below + 1 < above:
        middle = (below + above) // 2
        if value(middle) <= 0:
            below = middle
        else:
            above = middle
    return min(max(below, low + 1), high - 1)
