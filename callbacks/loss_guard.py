"""Suspicious losses, and the blocks whose gradients compression turns out to spoil.

A gradient is spoiled if its relative error is above SPOILED_ERROR. It is looked for in a block of every kind in the
step after a suspicious loss, and in the sampled blocks of every tracking step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from adacc_hf.config import AdaccConfig
from adacc_hf.profile import Profile
from adacc_hf.ranks import of_all_ranks
from adacc_hf.rectifier import Tracking
from adacc_hf.tracking.loss_watch import SPOILED_ERROR, LossWatch

log = logging.getLogger(__name__)


class LossGuard:
    """Asks for a check of all kinds of block after a suspicious loss, and judges what it found."""

    def __init__(self, config: AdaccConfig, losses: Iterable[float] = (), exact_blocks: Iterable[str] = ()) -> None:
        self.suspicion: str | None = None
        """What is to be looked into in the next step."""
        self.exact_blocks = frozenset(exact_blocks)
        """Blocks whose gradients compression has spoiled: lossless from then on, at every size of batch."""
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

    def doubt(self, found: Tracking) -> str | None:
        """What a tracking step found that needs no suspicious loss to be acted on."""
        worst = max((gradient.error for gradient in found.gradients.values()), default=0.0)
        return None if worst <= SPOILED_ERROR else "a tracking step found a spoiled gradient"

    def judge(self, suspicion: str, profile: Profile, found: Tracking) -> tuple[bool, str]:
        """Whether compression spoils the gradient of any kind of block, which is then exact, and the verdict."""
        errors = {kind: gradient.error for kind, gradient in found.gradients.items()}
        spoiled = {kind: error for kind, error in errors.items() if not error <= SPOILED_ERROR}
        if spoiled:
            return True, self._switch_off(suspicion, profile, spoiled)
        if errors:
            verdict = f"compression is not the cause: gradients are exact to {max(errors.values()):.3g}"
            log.info("Adacc: %s; %s", suspicion, verdict)
        else:
            verdict = "no exact gradient to compare with: it is zero or not finite without compression too"
            log.warning("Adacc: %s; %s", suspicion, verdict)
        return False, verdict

    def _switch_off(self, suspicion: str, profile: Profile, spoiled: Mapping[int, float]) -> str:
        self.exact_blocks |= {block.name for block in profile.blocks if block.kind in spoiled}
        names = ", ".join(profile.kinds[kind].block_class for kind in spoiled)
        log.warning(
            "Adacc: %s, and compression spoils the gradients of %s (relative error %.3g): it is switched off for them",
            suspicion,
            names,
            max(spoiled.values()),
        )
        return f"lossy compression is switched off for {names}"
