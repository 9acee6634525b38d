"""LossGuard: switches off the codecs that degrade gradients. LossSpikeDetector: finds suspicious losses in the logs.

A gradient is degraded if its relative error exceeds DEGRADED_ERROR. Gradients are checked in the sampled blocks of
every tracking step. If a logged loss is suspicious, the next step also checks one block of every kind (blocks that run
the same operators). Codecs that degrade gradients are not used in later policies. The first step of the next policy
checks every kind again, because the new policy may degrade gradients too: it may recompute a value that must be exact
from compressed values.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from adacc_hf.adapt.outlier_tracking import full_name
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.profile import Profile
from adacc_hf.torch_glue.distributed import gather_from_all_ranks

if TYPE_CHECKING:
    from adacc_hf.adapt.tracking import Tracked

log = logging.getLogger(__name__)

PROOF = "codecs that degraded gradients were switched off"
"""Value of `LossGuard.suspicion` if gradients are to be checked because the policy is new, not because a loss was
suspicious."""


WINDOW = 16
"""Number of earlier logged losses with which a new loss is compared."""
MIN_LOSSES = 4
"""Minimum number of earlier losses with which a loss is compared. A median of fewer losses would be close to a single
loss."""

NOISE = 4.0
"""Largest distance of a normal loss from the median of the latest losses, in units of their median absolute deviation.
Losses around zero, as in reinforcement learning, are often many times their median. Of normally distributed losses, one
in 300 lies above this distance."""


class LossGuard:
    """Guard against lossy codecs that degrade gradients during the run.

    Requests comparisons of the gradients under compression with exact gradients, and decides from the results which
    codecs to switch off.
    """

    def __init__(self, config: AdaccConfig) -> None:
        self.suspicion: str | None = None
        """Reason to check the gradients of all kinds of blocks in the next step. None if no check is due."""
        self._is_on = config.tracking != "off"
        self._detector = LossSpikeDetector()

    def logged(self, logs: Mapping[str, float], is_lossy: bool) -> None:
        """Check the loss and the gradient norm in `logs`.

        If the loss or the norm is suspicious, request a check of gradients. `is_lossy` is True if any policy uses a
        lossy codec. Without lossy compression, no check is requested. All ranks must call this method at the same
        steps.
        """
        if not self._is_on or self.suspicion is not None:
            return
        own_reason = self._detector.check(logs.get("loss"), logs.get("grad_norm"))
        reason = next((reason for reason in gather_from_all_ranks(own_reason) if reason is not None), None)
        if is_lossy:
            self.suspicion = reason

    def check_next(self) -> None:
        """Check the gradients of all kinds of blocks in the next step, because codecs were switched off."""
        self.suspicion = self.suspicion or PROOF

    def take_suspicion(self) -> str | None:
        """Clear the pending request for a check of gradients (`suspicion`).

        Return the reason of the request if it was a suspicious loss or gradient norm. Return None if no check was
        requested, or if the check was requested for a new policy.
        """
        suspicion, self.suspicion = self.suspicion, None
        return None if suspicion == PROOF else suspicion

    def judge(self, suspicion: str | None, profile: Profile, tracked: Tracked) -> tuple[str, str] | None:
        """Judge the gradients measured in a tracking step. Return (reason for the check, verdict) and log both, or
        return None if no gradient is degraded and `suspicion`, the reason to expect a degraded one, is None."""
        errors = {kind: gradient.error for kind, gradient in tracked.gradients.items()}
        degraded = {kind: error for kind, error in errors.items() if not error <= DEGRADED_ERROR}
        reason = suspicion or ("a tracking step found a degraded gradient" if degraded else None)
        if reason is None:
            return None
        if degraded:
            culprits = sorted(key for key in tracked.degrading_codecs if key[0] in degraded)
            names = ", ".join(f"{full_name(profile, (kind, value))} ({codec})" for kind, value, codec in culprits)
            log.warning(
                "Adacc: %s, and compression degrades gradients (relative error %.3g): it is switched off for %s",
                reason,
                max(degraded.values()),
                names,
            )
            return reason, f"lossy compression is switched off for {names}"
        if errors:
            largest_error = max(errors.values())
            verdict = f"compression is not the cause: the relative error of gradients is at most {largest_error:.3g}"
            log.info("Adacc: %s; %s", reason, verdict)
        else:
            verdict = "no gradient was compared: the exact one is zero or not finite without compression too"
            log.warning("Adacc: %s; %s", reason, verdict)
        return reason, verdict


class LossSpikeDetector:
    """A detector of spikes, NaN and infinity among logged losses and gradient norms.

    Only logged values are read, because reading any other value would make the host wait for the device.

    A loss is compared with the median of the last WINDOW losses. It is a spike if its distance above the median exceeds
    two limits: NOISE times the median absolute deviation of these losses, and the median's absolute value.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._losses: deque[float] = deque(losses, maxlen=WINDOW)

    @property
    def losses(self) -> list[float]:
        """Latest logged losses, oldest first."""
        return list(self._losses)

    def check(self, loss: float | None, gradient_norm: float | None) -> str | None:
        """Add `loss` to the earlier losses. Return a message if `loss` or `gradient_norm` is suspicious, else None.

        An argument is None if the training loop did not log this number.
        """
        for name, value in (("loss", loss), ("grad_norm", gradient_norm)):
            if value is not None and not math.isfinite(value):
                return f"{name} is {value}"
        if loss is None:
            return None
        reason = self._spike_reason(loss) if len(self._losses) >= MIN_LOSSES else None
        # Spikes are added too: a loss that stays high, as on other data, counts as normal after half a window.
        self._losses.append(loss)
        return reason

    def _spike_reason(self, loss: float) -> str | None:
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(other - median) for other in self._losses)
        if loss - median <= max(abs(median), NOISE * deviation):
            return None
        comparison = f"{loss / median:.1f} times" if median > 0 else f"far above {median:.4g},"
        return f"loss {loss:.4g} is {comparison} the median of the last {len(self._losses)}"
