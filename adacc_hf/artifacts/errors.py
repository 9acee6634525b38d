"""Exceptions of this package. Each message names the setting, its value, the allowed range and the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Policy


def as_sentence(text: object) -> str:
    """Return `text`, such as another library's message, with a full stop at the end, so that a sentence can follow."""
    stripped = str(text).rstrip()
    return stripped if stripped.endswith((".", "!", "?")) else f"{stripped}."


BLOCK_CLASSES_HINT = (
    "if the model has blocks of other classes, name only these with AdaccConfig(block_classes=...), else train "
    "without adacc_hf (gradient_checkpointing=True saves memory too)"
)
"""Advice at the end of an error message if the blocks have a class that cannot run under a policy."""


class AdaccError(Exception):
    """Base class of this package's errors, except for plain ValueError and FileNotFoundError."""


class InfeasibleBudgetError(AdaccError, ValueError):
    """Error raised if no policy fits the memory budget.

    `smallest_budget_bytes` is the smallest budget for which the solver found a policy, `least` that policy (None if the
    error does not come from the solver), and `bound_bytes` a lower bound on the budget that any policy needs. They are
    peak bytes of a step for a budget in bytes, and bytes stored for backward for a fraction.
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


class NoBlocksError(AdaccError, ValueError):
    """Error raised if the model has no repeated transformer blocks that this package recognizes."""


class UncalledBlocksError(AdaccError, ValueError):
    """Error raised if the profiled batch skips blocks. A policy for all blocks needs a profile of all blocks."""


class UncoveredBlockError(AdaccError, RuntimeError):
    """Error raised if a block would train without a policy, and `AdaccConfig.on_uncovered` is "error"."""


class PolicyMismatchError(AdaccError, RuntimeError):
    """Error raised if a policy or its file belongs to another model, or if the file is not a policy."""


class TapeMismatchError(AdaccError, RuntimeError):
    """Error raised if a block call differs from the block's recorded tape."""


class SavedTensorMismatchError(TapeMismatchError):
    """Error raised if autograd saves a tensor that differs from the tensor recorded on the block's tape."""


class ProfilerConflictError(AdaccError, RuntimeError):
    """Error raised if CPU memory is to be measured while another torch profiler is running, which would lose its
    trace."""


class ConcurrentCallError(AdaccError, RuntimeError):
    """Error raised if several threads call the blocks of one model at the same time."""


class CheckpointMismatchError(AdaccError, RuntimeError):
    """Error raised if the second run of a block under torch's checkpoint gives other numbers than the first."""


class UnrestorableError(AdaccError, RuntimeError):
    """Error raised if a block, or a profile by hand, changed state that cannot be restored before a second run."""


class UnrecordedCallError(AdaccError, RuntimeError):
    """Error raised if a block's call cannot be run again, because its tape does not apply any more."""


class ChunkedHeadError(AdaccError, RuntimeError):
    """Error raised if an operation on a chunked head needs the full logits."""


class TilesError(AdaccError, RuntimeError):
    """Error raised if a module that runs in tiles (groups of rows) would give wrong gradients: it returns a different
    number of rows than it gets, draws random numbers, or runs other code in backward than in forward."""


class NestedHooksError(AdaccError, RuntimeError):
    """Error raised if another pair of saved-tensor hooks is active around or inside a block. torch would call only the
    innermost pair."""


class CompiledBlockError(AdaccError, RuntimeError):
    """Error raised if a block runs inside a module compiled with torch.compile, where operators cannot be recorded."""


class RankFailedError(AdaccError):
    """Error raised if an operation failed on another rank, or on this rank while the other ranks cannot be notified."""


class FakeDeviceError(AdaccError, RuntimeError):
    """Error raised if fake tensors (tensors without memory) cannot be created for a device on this machine."""
