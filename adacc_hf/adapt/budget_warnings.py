"""BudgetWarnings: warnings on micro-batches that may take more memory than the budget."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from adacc_hf.adapt.fallback_stats import recomputing_peak_bytes
from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.torch_glue.batch_shapes import describe

if TYPE_CHECKING:
    from adacc_hf.adapt.size_policy import SizePolicy

log = logging.getLogger(__name__)


class BudgetWarnings:
    """Warnings before micro-batches whose predicted peak exceeds the budget, or is only a rough estimate."""

    def __init__(self, note_memory: Callable[[str], None]) -> None:
        self._note_memory = note_memory
        self._sizes: set[Shapes | None] = set()
        """Batch sizes for which a warning was logged."""
        self._diverged: set[bool] = set()
        """Kinds of warnings logged after batches that did not follow a policy: True if an excess was estimated."""

    def add(self, sizes: Shapes | None) -> None:
        """Record that another module has logged a warning for batches of `sizes`."""
        self._sizes.add(sizes)

    def before(self, shapes: Shapes, record: SizePolicy | None, reference: SizePolicy, budget: Budget) -> None:
        """Warn if a micro-batch of `shapes` is predicted to exceed the `budget` under the policy of its `record`, or
        runs under torch's checkpoint, because it has none. Its peak is then estimated from the record `reference`."""
        sizes = shapes if record is None else record.shapes
        if not budget.limits_peak or sizes in self._sizes:
            return
        if record is None:
            peak = recomputing_peak_bytes(shapes, reference)
            text = (
                f"a batch of {describe(shapes)} runs under torch's checkpoint, because no profile predicts batches of "
                f"this size. It takes about {peak} bytes ({format_bytes(peak)}), {peak / budget.nbytes:.0%} of "
                f"memory_budget={budget.setting!r}, and perhaps more. To avoid this, pad batches to one size, or begin "
                f"with the largest"
            )
        else:
            peak = record.policy.predicted_peak_bytes
            if peak <= budget.nbytes:
                return
            text = (
                f"a batch of up to {describe(sizes or shapes)} is predicted to take {peak} bytes "
                f"({format_bytes(peak)}), {peak / budget.nbytes - 1:.1%} above memory_budget={budget.setting!r}: to "
                f"avoid this, set memory_budget={peak} or more, or use a smaller batch"
            )
        self._sizes.add(sizes)
        log.warning("Adacc: %s", text)
        self._note_memory(text)

    def after(self, shapes: Shapes, record: SizePolicy, budget: Budget, ran_planned: bool) -> None:
        """Warn if a micro-batch of `shapes`, which did not follow the policy of its `record`, may have exceeded the
        budget: at most once with an estimated excess, and before that once without. If `ran_planned`, some plans ran
        operators that were not profiled, whose memory is not predicted. Other calls ran under torch's checkpoint."""
        excess = recomputing_peak_bytes(shapes, record) - budget.nbytes if budget.limits_peak else 0
        if not budget.limits_peak or not (excess > 0 or ran_planned) or (excess > 0) in self._diverged:
            return
        self._diverged |= {excess > 0, False}
        amount = f"takes up to about {excess} bytes" if excess > 0 else "may take"
        text = (
            f"a batch of {describe(shapes)} did not follow a policy, and {amount} more than memory_budget="
            f"{budget.setting!r} allows: to avoid this, set dataloader_drop_last=True, or pad all batches to one length"
        )
        log.warning("Adacc: %s", text)
        self._note_memory(text)
