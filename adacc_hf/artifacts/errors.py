"""The errors a user can meet. Each message names the setting, its value, the allowed range and the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Policy


def as_sentence(text: object) -> str:
    """`text`, a message of others', with a full stop at its end unless it has one: for what is said after it."""
    stripped = str(text).rstrip()
    return stripped if stripped.endswith((".", "!", "?")) else f"{stripped}."


OTHER_CLASSES = (
    "where the model has blocks of other classes, name these alone with AdaccConfig(block_classes=...), else train "
    "without adacc_hf (gradient_checkpointing=True saves memory too)"
)
"""What to do about blocks of a class that cannot run under a policy."""


class AdaccError(Exception):
    """Base of every error of this package that is not a plain ValueError or FileNotFoundError."""


class InfeasibleBudgetError(AdaccError, ValueError):
    """No policy fits the memory budget.

    `smallest_budget_bytes` is the least budget that some policy fits, in the terms the budget was given in: peak
    bytes of a step for an absolute budget, stored bytes for a fraction. `bound_bytes` is what no policy can do with
    less than: the same, where that is proven to be the least. `least` is the policy that needs the least of all found,
    where the solver has raised it.
    """

    def __init__(
        self, message: str, smallest_budget_bytes: int, bound_bytes: int | None = None, least: Policy | None = None
    ) -> None:
        super().__init__(message)
        self.least = least
        self.smallest_budget_bytes = smallest_budget_bytes
        self.bound_bytes = smallest_budget_bytes if bound_bytes is None else bound_bytes

    def __reduce__(self) -> tuple[type, tuple[str, int, int, Policy | None]]:
        return type(self), (str(self), self.smallest_budget_bytes, self.bound_bytes, self.least)


class OptimizerStateError(AdaccError, ValueError):
    """What state an optimizer will have, which has none yet, cannot be known."""


class NoBlocksError(AdaccError, ValueError):
    """The model has no repeated transformer blocks that this package can find."""


class UncalledBlocksError(AdaccError, ValueError):
    """A batch did not call every block, so that no policy for all of them can be made of it."""


class PolicyMismatchError(AdaccError, RuntimeError):
    """A policy, or its file, belongs to another model or is not a policy."""


class TapeMismatchError(AdaccError, RuntimeError):
    """A block saved other tensors for backward than its tape says."""


class SavedOtherwiseError(TapeMismatchError):
    """What autograd saved in a call is not what the block's tape says of it."""


class ProfilerAtWorkError(AdaccError, RuntimeError):
    """Memory of the CPU cannot be counted while another profiler of torch's is at work: it would lose its trace."""


class SeveralThreadsError(AdaccError, RuntimeError):
    """Several threads call the blocks of one model at a time."""


class UnrestorableError(AdaccError, RuntimeError):
    """Forward changed state that cannot be put back after a run that is no part of training."""


class ChunkedHeadError(AdaccError, RuntimeError):
    """Something asks of a chunked head what only whole logits can give."""


class NestedHooksError(AdaccError, RuntimeError):
    """Another pair of saved-tensor hooks stands around or inside a block; only the innermost pair would run."""


class CompiledBlockError(AdaccError, RuntimeError):
    """A block runs inside a module that torch.compile compiles; its operators cannot be recorded there."""


class RankFailedError(AdaccError):
    """Something failed on another rank, or on this one where the others cannot hear of it."""


class FakeDeviceError(AdaccError, RuntimeError):
    """Tensors without memory cannot be made here for a device."""


class NoEstimateError(Exception):
    """A batch's profile cannot be told from a few of its samples; the message says why."""
