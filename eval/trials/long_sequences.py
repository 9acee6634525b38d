"""Training on long sequences: models, methods with their policies, and one measured trial.

The memory of each method at any length is predicted from one profile. A trial counts the bytes of a real step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from adacc_hf import AdaccConfig, Policy, apply_policy, solve_policy
from adacc_hf.artifacts.policy import Action
from adacc_hf.artifacts.profile import Profile, Shapes
from adacc_hf.estimate.planning import with_checkpointing
from adacc_hf.eval.records.clock import CLOCKS
from adacc_hf.eval.records.records import Figures
from adacc_hf.eval.trials.families import FAMILIES, QWEN3, Size
from adacc_hf.eval.trials.trial import check_limit
from adacc_hf.eval.trials.workload import Batch
from adacc_hf.price.estimated_profile import resize_profile
from adacc_hf.price.profiler import profile_batch
from adacc_hf.price.timing import seconds_of
from adacc_hf.price.training_step import TrainingStep
from adacc_hf.reports.run_record import Spread, to_json
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy
from adacc_hf.solve.solver import quick_least_policy
from adacc_hf.solve.tiling import most_tiled
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import MemoryMeter, backward, forward_loss, static_bytes

MODELS = {"llama": FAMILIES["llama"], "qwen3": QWEN3}
"""Model families with rotary positions, by their names on the command line."""

Solve = Callable[[Profile, int | None], Policy]
"""Function of (profile, budget in bytes) that returns a method's policy, with the least peak if the budget is None."""


@dataclass(frozen=True, kw_only=True)
class LongMethod:
    """Method of training on long sequences."""

    title: str
    solve: Solve
    is_own: bool = True
    """True if the policy is applied. False for methods that train without this package: the policy predicts them."""
    is_checkpointed: bool = False
    """True if Transformers' checkpointing runs the blocks."""

    def peak_bytes(self, profile: Profile) -> int:
        """Return the least peak of a training step with the method."""
        return self.solve(profile, None).predicted_peak_bytes


def _plain(profile: Profile, budget: int | None) -> Policy:
    return uniform_policy(profile.untiled, Action.RETAIN)


def _checkpointing(profile: Profile, budget: int | None, head: str = "plain", tiles: bool = False) -> Policy:
    profile = profile.with_head(head)
    return checkpoint_policy(with_checkpointing(most_tiled(profile) if tiles else profile.untiled))


def _adacc(profile: Profile, budget: int | None, config: AdaccConfig) -> Policy:
    return quick_least_policy(profile, config) if budget is None else solve_policy(profile, budget, config)


EXACT = AdaccConfig(actions=("retain", "recompute"), head="plain")

METHODS = {
    "plain": LongMethod(title="plain", solve=_plain, is_own=False),
    "checkpointing": LongMethod(title="checkpointing", solve=_checkpointing, is_own=False, is_checkpointed=True),
    "chunked": LongMethod(title="checkpointing, chunked head", solve=partial(_checkpointing, head="chunked")),
    "tiled": LongMethod(
        title="checkpointing, chunked head, tiles", solve=partial(_checkpointing, head="chunked", tiles=True)
    ),
    "exact": LongMethod(title="Adacc, lossless", solve=partial(_adacc, config=EXACT)),
    "adacc": LongMethod(title="Adacc", solve=partial(_adacc, config=AdaccConfig())),
}
"""Methods by their names on the command line. The methods with a chunked head and tiles run by this package's own
implementation of both, without a solver."""


class LongTraining:
    """Training of one model on one sequence."""

    def __init__(self, model: str, size: Size, device: str, seed: int) -> None:
        """Build the model `size` of the family `model` in MODELS, and train one short step, which creates the
        optimizer's state."""
        self._size = size
        self._device = device
        self.model: PreTrainedModel = MODELS[model].model(size, "sdpa", device, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.step(self.batch(16))

    def batch(self, tokens: int) -> Batch:
        """Return ids and labels of [1, tokens] random tokens."""
        ids = torch.randint(5, self._size.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens)).to(
            self._device
        )
        return {"input_ids": ids, "labels": ids.clone()}

    def step(self, batch: Batch) -> None:
        """Run forward, backward and optimizer step."""
        backward(forward_loss(self.model, batch))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def profile(self, tokens: int, all_sizes: bool = False) -> Profile:
        """Profile one step on `tokens` tokens."""
        step = TrainingStep(optimizer=self.optimizer)
        return profile_batch(self.model, self.batch(tokens), AdaccConfig(), step, all_sizes=all_sizes)


def shapes_of(tokens: int) -> Shapes:
    """Return the shapes of a batch of one sequence of `tokens` tokens."""
    return tuple((name, (1, tokens)) for name in ("input_ids", "labels"))


def peak_at(profile: Profile, method: str, tokens: int) -> int:
    """Return the predicted least peak of a step of `method` on `tokens` tokens. `profile` predicts all sizes."""
    return METHODS[method].peak_bytes(resize_profile(profile, shapes_of(tokens)))


def run_long_trial(
    model: str,
    size: Figures,
    method: str,
    tokens: int,
    limit_bytes: int,
    rounds: int,
    clock: str,
    device: str,
    threads: int,
    seed: int,
) -> Figures:
    """Count the bytes of a training step of `method` on `tokens` tokens, and time `rounds` steps.

    `size` has the fields of a Size. Raise OverLimitError if the step takes more than `limit_bytes`, and
    InfeasibleBudgetError if no policy fits.
    """
    torch.set_num_threads(threads)
    training, long_method = LongTraining(model, Size(**size), device, seed), METHODS[method]
    batch = training.batch(tokens)
    figures: Figures = {}
    if long_method.is_own:
        policy = long_method.solve(training.profile(tokens), limit_bytes)
        apply_policy(training.model, policy)
        figures = {"policy": policy.summary(), "predicted_peak_bytes": policy.predicted_peak_bytes}
    if long_method.is_checkpointed:
        switch_checkpointing(training.model, on=True)
    for _ in range(2 if long_method.is_own else 1):  # the first two calls at a shape are recorded
        training.step(batch)
    live_bytes = static_bytes(training.model, batch, training.optimizer)
    with MemoryMeter.for_device(torch.device(device)) as meter:
        training.step(batch)
    figures |= {"static_bytes": live_bytes, "peak_bytes": live_bytes + meter.peak_bytes}
    check_limit(figures, limit_bytes)
    run = partial(training.step, batch)
    seconds = [seconds_of(run, torch.device(device), CLOCKS[clock]) for _ in range(rounds)]
    figures["ms_per_1000_tokens"] = Spread.of([1e6 * each / tokens for each in seconds])
    return to_json(figures)
