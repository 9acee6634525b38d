"""BudgetWarnings: warnings before a micro-batch that may take more memory than the budget, logged once per batch
size."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from adacc_hf.adapt.fallback_stats import full_recomputation, ratio
from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.torch_glue.batch_shapes import BatchShapes, bucket_of, describe

if TYPE_CHECKING:
    from adacc_hf.adapt.replanner import Replanner
    from adacc_hf.adapt.size_policy import SizePolicy
    from adacc_hf.artifacts.policy import Policy
    from adacc_hf.artifacts.profile import Profile

log = logging.getLogger(__name__)


class BudgetWarnings:
    """Warnings before micro-batches whose predicted peak exceeds the budget, or is only a rough estimate.

    A warning is logged once per size class (batches of similar sizes). For batches whose memory no profile predicts, it
    is logged once per bucket, another grouping of similar sizes.
    """

    def __init__(self, note_memory: Callable[[str], None]) -> None:
        self._note_memory = note_memory
        self._sizes: set[BatchShapes | None] = set()
        """Batch sizes for which a warning was logged."""
        self._compared: dict[BatchShapes | None, tuple[Profile, Policy]] = {}
        """Profile and policy that were last compared with the budget, by batch size."""

    def add(self, sizes: BatchShapes | None) -> None:
        """Record that another module has logged a warning for batches of `sizes`."""
        self._sizes.add(sizes)

    def before(self, shapes: BatchShapes, size_policy: SizePolicy) -> None:
        """Warn if a micro-batch of `shapes` under its policy, `size_policy`, is predicted to exceed the budget."""
        replanner, sizes = size_policy.replanner, size_policy.shapes
        profile, policy = self._compared.get(sizes, (None, None))
        if sizes in self._sizes or (replanner.profile is profile and replanner.policy is policy):
            return
        self._compared[sizes] = replanner.profile, replanner.policy
        self._compare(shapes, sizes, replanner.predicted_peak_bytes(), replanner, size_policy.due)

    def before_untracked(self, shapes: BatchShapes, sizes: BatchShapes, policy: Policy, reference: SizePolicy) -> None:
        """Warn if a micro-batch of `shapes` is predicted to exceed the budget under `policy`.

        `policy` was made for batches of `sizes` and is untracked: it is not adapted to the data and has no replanner.
        The budget is therefore read from the replanner of `reference`, the size policy of a similar batch size.
        """
        if sizes not in self._sizes:
            self._compare(shapes, sizes, policy.predicted_peak_bytes, reference.replanner)

    def _compare(
        self,
        shapes: BatchShapes,
        sizes: BatchShapes | None,
        peak: int,
        replanner: Replanner,
        due: int | None = None,
    ) -> None:
        """Warn if `peak`, the predicted peak of a micro-batch of `shapes`, exceeds the budget. `due` is the step after
        which the solver's new policy for this size is applied, or None."""
        if not replanner.is_over_budget(peak):
            return
        self._sizes.add(sizes)
        budget = Budget.resolve(replanner.memory_budget, replanner.profile, replanner.config)
        self._warn(
            f"a batch of up to {describe(sizes or shapes)} is predicted to take {peak} bytes ({format_bytes(peak)}), "
            f"{peak / budget.nbytes - 1:.1%} above memory_budget={budget.setting!r}"
            + (f", until the solver's result is applied after step {due}" if due is not None else "")
            + f": to avoid this, set memory_budget={peak} or more, or use a smaller batch"
        )

    def before_checkpointing(self, shapes: BatchShapes, reference: SizePolicy) -> None:
        """Warn, if the budget is a limit on peak memory, that a micro-batch of `shapes` runs under torch's checkpoint.

        The peak in the warning is an estimate: the peak of full recomputation in the profile of `reference`, the size
        policy of a similar batch size, scaled to `shapes`.
        """
        replanner, sizes = reference.replanner, bucket_of(shapes)
        budget = Budget.resolve(replanner.memory_budget, replanner.profile, replanner.config)
        if sizes in self._sizes or not budget.limits_peak:
            return
        self._sizes.add(sizes)
        static_bytes = replanner.profile.static_bytes
        above_static = full_recomputation(replanner.profile).predicted_peak_bytes - static_bytes
        peak = int(static_bytes + ratio(shapes, reference.shapes) * above_static)
        self._warn(
            f"a batch of {describe(shapes)} runs under torch's checkpoint, because no profile predicts batches of this "
            f"size. It takes about {peak} bytes ({format_bytes(peak)}), {peak / budget.nbytes:.0%} of memory_budget="
            f"{budget.setting!r}, and perhaps more. To avoid this, pad batches to one size, or begin with the largest"
        )

    def _warn(self, text: str) -> None:
        log.warning("Adacc: %s", text)
        self._note_memory(text)
