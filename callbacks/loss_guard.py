"""Suspicious losses, and the codecs that turn out to spoil gradients.

A gradient is spoiled if its relative error is above SPOILED_ERROR. It is looked for in a block of every kind in the
step after a suspicious loss, and in the sampled blocks of every tracking step. What spoils it is not used any more, and
once another policy is in force, its first step shows whether that was all: a policy may remake what must be exact from
what is compressed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from adacc_hf.config import AdaccConfig
from adacc_hf.decisions import SPOILED_ERROR
from adacc_hf.profile import Profile
from adacc_hf.ranks import of_all_ranks
from adacc_hf.rectifier import Tracking
from adacc_hf.tracking.loss_watch import LossWatch
from adacc_hf.tracking.switched_off import SwitchedOff
from adacc_hf.tracking.tracking import full_name

log = logging.getLogger(__name__)

PROOF = "codecs that spoiled gradients were switched off"
"""Why gradients are looked at although nothing is suspicious."""


class LossGuard:
    """Asks for a check of all kinds of block after a suspicious loss, and judges what it found."""

    def __init__(
        self, config: AdaccConfig, losses: Iterable[float] = (), switched_off: Iterable[SwitchedOff] = ()
    ) -> None:
        self.suspicion: str | None = None
        """What is to be looked into in the next step."""
        self.switched_off = frozenset(switched_off)
        """Codecs that have spoiled gradients: not used from then on, at any size of batch."""
        self.is_unproven = False
        """Whether a policy without them is still to come."""
        self._is_on = config.guard
        self._watch = LossWatch(config.loss_spike, losses)

    @property
    def losses(self) -> list[float]:
        return self._watch.losses

    def logged(self, logs: Mapping[str, float], is_lossy: bool) -> None:
        """Look at what the Trainer logs. All ranks log at the same steps."""
        if not self._is_on or self.suspicion is not None:
            return
        mine = self._watch.see(logs.get("loss"), logs.get("grad_norm"))
        found = next((reason for reason in of_all_ranks(mine) if reason is not None), None)
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
        return None if worst <= SPOILED_ERROR else "a tracking step found a spoiled gradient"

    def judge(self, suspicion: str, profile: Profile, found: Tracking) -> tuple[bool, str]:
        """Whether compression spoils the gradient of any kind of block, by codecs that end then, and the verdict."""
        errors = {kind: gradient.error for kind, gradient in found.gradients.items()}
        spoiled = {kind: error for kind, error in errors.items() if not error <= SPOILED_ERROR}
        if spoiled:
            return True, self._switched_off(suspicion, profile, found, spoiled)
        if errors:
            verdict = f"compression is not the cause: gradients are exact to {max(errors.values()):.3g}"
            log.info("Adacc: %s; %s", suspicion, verdict)
        else:
            verdict = "no exact gradient to compare with: it is zero or not finite without compression too"
            log.warning("Adacc: %s; %s", suspicion, verdict)
        return False, verdict

    def _switched_off(self, suspicion: str, profile: Profile, found: Tracking, spoiled: Mapping[int, float]) -> str:
        self.is_unproven = True
        culprits = sorted(key for key in found.spoiling if key[0] in spoiled)
        names = ", ".join(f"{full_name(profile, (kind, value))} ({codec})" for kind, value, codec in culprits)
        log.warning(
            "Adacc: %s, and compression spoils gradients (relative error %.3g) by %s: it is switched off for them",
            suspicion,
            max(spoiled.values()),
            names,
        )
        return f"lossy compression is switched off for {names}"
