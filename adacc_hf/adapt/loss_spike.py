"""Suspicious losses, told from what the Trainer logs, and the codecs that turn out to degrade gradients.

A gradient is degraded if its relative error is above DEGRADED_ERROR. It is looked for in a block of every kind in the
step after a suspicious loss, and in the sampled blocks of every tracking step. What degrades it is not used any more,
and once another policy is in force, its first step shows whether that was all: a policy may recompute what must be
exact from what is compressed.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from adacc_hf.adapt.outlier_tracking import full_name
from adacc_hf.adapt.profile_updates import SwitchedOff
from adacc_hf.adapt.replanner import Tracking
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.profile import Profile
from adacc_hf.torch_glue.distributed import gather_from_all_ranks

log = logging.getLogger(__name__)

PROOF = "codecs that degraded gradients were switched off"
"""Why gradients are looked at although nothing is suspicious."""


class LossGuard:
    """Asks for a check of all kinds of block after a suspicious loss, and judges what it found."""

    def __init__(
        self, config: AdaccConfig, losses: Iterable[float] = (), switched_off: Iterable[SwitchedOff] = ()
    ) -> None:
        self.suspicion: str | None = None
        """What is to be looked into in the next step."""
        self.switched_off = frozenset(switched_off)
        """Codecs that have degraded gradients: not used from then on, at any size of batch."""
        self.is_unproven = False
        """Whether a policy without them is still to come."""
        self._is_on = config.guard
        self._watch = LossSpikeDetector(config.loss_spike, losses)

    @property
    def losses(self) -> list[float]:
        return self._watch.losses

    def logged(self, logs: Mapping[str, float], is_lossy: bool) -> None:
        """Look at what the Trainer logs. All ranks log at the same steps."""
        if not self._is_on or self.suspicion is not None:
            return
        mine = self._watch.see(logs.get("loss"), logs.get("grad_norm"))
        found = next((reason for reason in gather_from_all_ranks(mine) if reason is not None), None)
        if is_lossy:
            self.suspicion = found

    def policy_changed(self) -> bool:
        """Whether codecs were switched off for it: the next step shows then whether gradients are well without them."""
        if not self.is_unproven:
            return False
        self.suspicion, self.is_unproven = self.suspicion or PROOF, False
        return True

    def taken_suspicion(self) -> str | None:
        """What was to be looked into and now is; None if that is only whether gradients are well."""
        suspicion, self.suspicion = self.suspicion, None
        return None if suspicion == PROOF else suspicion

    def doubt(self, found: Tracking) -> str | None:
        """What a tracking step found that needs no suspicious loss to be acted on."""
        worst = max((gradient.error for gradient in found.gradients.values()), default=0.0)
        return None if worst <= DEGRADED_ERROR else "a tracking step found a degraded gradient"

    def judge(self, suspicion: str, profile: Profile, found: Tracking) -> tuple[bool, str]:
        """Whether compression degrades the gradient of any kind of block, by codecs that end then, and the verdict."""
        errors = {kind: gradient.error for kind, gradient in found.gradients.items()}
        degraded = {kind: error for kind, error in errors.items() if not error <= DEGRADED_ERROR}
        if degraded:
            return True, self._switched_off(suspicion, profile, found, degraded)
        if errors:
            verdict = f"compression is not the cause: gradients are exact to {max(errors.values()):.3g}"
            log.info("Adacc: %s; %s", suspicion, verdict)
        else:
            verdict = "no exact gradient to compare with: it is zero or not finite without compression too"
            log.warning("Adacc: %s; %s", suspicion, verdict)
        return False, verdict

    def _switched_off(self, suspicion: str, profile: Profile, found: Tracking, degraded: Mapping[int, float]) -> str:
        self.is_unproven = True
        culprits = sorted(key for key in found.degrading if key[0] in degraded)
        names = ", ".join(f"{full_name(profile, (kind, value))} ({codec})" for kind, value, codec in culprits)
        log.warning(
            "Adacc: %s, and compression degrades gradients (relative error %.3g) by %s: it is switched off for them",
            suspicion,
            max(degraded.values()),
            names,
        )
        return f"lossy compression is switched off for {names}"


# When a logged loss or gradient norm is suspicious. Only logged figures are read: that is after a synchronisation.

WINDOW = 16
"""Logged losses that a new one is compared with."""
MIN_LOSSES = 4
"""Logged losses before the first comparison: the median of fewer is one of them."""

NOISE = 4.0
"""Median distances from the median within which no loss is a spike: losses around zero, as in reinforcement learning,
are often many times their median. Of normal noise one in 300 lies above."""


class LossSpikeDetector:
    """Finds spikes and non-finite values among logged figures."""

    def __init__(self, spike: float, losses: Iterable[float] = ()) -> None:
        self.spike = spike
        self._losses: deque[float] = deque(losses, maxlen=WINDOW)

    @property
    def losses(self) -> list[float]:
        return list(self._losses)

    def see(self, loss: float | None, gradient_norm: float | None) -> str | None:
        """What is wrong with these figures, if anything."""
        for name, value in (("loss", loss), ("grad_norm", gradient_norm)):
            if value is not None and not math.isfinite(value):
                return f"{name} is {value}"
        if loss is None:
            return None
        found = self._spike_of(loss) if len(self._losses) >= MIN_LOSSES else None
        # A spike too: a loss that stays where it rose to, on data of another kind, is normal half a window later.
        self._losses.append(loss)
        return found

    def _spike_of(self, loss: float) -> str | None:
        median = statistics.median(self._losses)
        spread = statistics.median(abs(other - median) for other in self._losses)
        if loss - median <= max((self.spike - 1.0) * abs(median), NOISE * spread):
            return None
        by = f"{loss / median:.1f} times" if median > 0 else f"far above {median:.4g},"
        return f"loss {loss:.4g} is {by} the median of the last {len(self._losses)}"
