"""Corrections: what a run has learned about memory, codecs and its budget, applied to the profile of any batch size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adacc_hf.adapt.outlier_tracking import Observation
from adacc_hf.adapt.profile_updates import (
    SwitchedOff,
    with_errors,
    with_finer,
    with_outlier_counts,
    with_static_memory,
    without_codecs,
)
from adacc_hf.price.memory_profile import with_missing_bytes
from adacc_hf.torch_glue.batch_shapes import BatchShapes, num_elements

if TYPE_CHECKING:
    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.profile import Profile


@dataclass
class Corrections:
    """Corrections of a run's predictions, the same for all batch sizes. Blocks and activations go by their names."""

    config: AdaccConfig
    tightened: float | int | None = None
    """Smaller budget, after a step ran out of memory. None if no step has run out of memory."""
    switched_off: frozenset[SwitchedOff] = frozenset()
    """Codecs that degraded gradients. No policy uses them."""
    num_outliers: dict[tuple[str, str], int] = field(default_factory=dict)
    """Outlier channels at the latest tracking step, by (block, activation)."""
    errors: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """Round-trip errors at the latest tracking step, by (block, activation, codec)."""
    missing_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by which measured steps exceeded their predictions, by part of the step, such as a block's backward."""
    counted_elements: int = 0
    """Number of elements of the batch that `missing_bytes` belong to, or 0 before a step was measured."""
    static_bytes: int = 0
    """Bytes that live throughout training since the profile, such as the optimizer's state."""
    version: int = 0
    """Number of changes so far. A policy whose version is lower has to be compared with the budget again."""
    reason: str = ""
    """The latest change, for the history."""

    @property
    def memory_budget(self) -> str | float | int:
        """Budget of policies: the config's, or a smaller one after a step ran out of memory."""
        return self.config.memory_budget if self.tightened is None else self.tightened

    def changed(self, reason: str) -> None:
        """Let all policies be compared with the budget again, because of `reason`."""
        self.version += 1
        self.reason = reason

    def switch_off(self, codecs: Iterable[SwitchedOff]) -> None:
        """Exclude `codecs` from policies."""
        more = self.switched_off | frozenset(codecs)
        if more != self.switched_off:
            self.switched_off = more
            self.changed("codecs that degrade gradients were switched off")

    def observe(self, observed: Observation) -> None:
        """Take over the outlier channels and errors of a tracking step. The keys of `observed` are names."""
        counts, errors = self.num_outliers | observed.num_outliers, self.errors | observed.option_errors
        if (counts, errors) != (self.num_outliers, self.errors):
            self.num_outliers, self.errors = counts, errors
            self.changed("outlier channels or errors changed")

    def add_missing(self, excess: Mapping[str, int], elements: int, reason: str) -> None:
        """Count the bytes by which a step with a batch of `elements` exceeded its prediction, by part of the step."""
        ratio = self._ratio(elements)
        before = {moment: int(nbytes * ratio) for moment, nbytes in self.missing_bytes.items()}
        self.missing_bytes = {m: before.get(m, 0) + excess.get(m, 0) for m in {**before, **excess}}
        self.counted_elements = max(elements, self.counted_elements)
        self.changed(reason)

    def _ratio(self, elements: int) -> float:
        """Return the factor of `missing_bytes` for a batch of `elements`. What does not grow with the batch would be
        too low for a smaller one, so that the factor is at least 1."""
        return max(1.0, elements / self.counted_elements) if self.counted_elements else 1.0

    def applied(self, profile: Profile, shapes: BatchShapes | None) -> Profile:
        """Return the `profile` of batches of `shapes` (None if unknown) with all corrections."""
        ratio = self._ratio(num_elements(shapes or ()))
        missing = {moment: int(nbytes * ratio) for moment, nbytes in self.missing_bytes.items()}
        corrected = with_missing_bytes(profile, missing) if any(missing.values()) else profile
        corrected = with_static_memory(corrected, self.static_bytes) if self.static_bytes else corrected
        if self.num_outliers or self.errors:
            named = Observation(
                num_outliers=self.num_outliers,
                errors={},
                option_errors=self.errors,
                gradients={},
                degrading_codecs=frozenset(),
            )
            observed = named.for_profile(corrected)
            corrected = with_errors(with_outlier_counts(corrected, observed.num_outliers), observed.option_errors)
        return with_finer(corrected, self.switched_off, self.config) if self.switched_off else corrected

    def allowed(self, profile: Profile) -> Profile:
        """Return `profile` without switched-off codecs, and without codecs for values below `min_compress_bytes`."""
        return without_codecs(profile, self.switched_off).without_codecs_below(self.config.min_compress_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON record of the corrections, for a checkpoint."""
        return {
            "tightened": self.tightened,
            "switched_off": sorted(map(list, self.switched_off)),
            "num_outliers": [[*name, count] for name, count in self.num_outliers.items()],
            "errors": [[*name, error] for name, error in self.errors.items()],
            "missing_bytes": self.missing_bytes,
            "counted_elements": self.counted_elements,
        }

    @classmethod
    def from_json(cls, config: AdaccConfig, record: Mapping[str, Any]) -> Corrections:
        """Return the corrections in a checkpoint's `record`. Static bytes are part of a new profile."""
        return cls(
            config,
            tightened=record["tightened"],
            switched_off=frozenset((block, name, codec) for block, name, codec in record["switched_off"]),
            num_outliers={(block, name): count for block, name, count in record["num_outliers"]},
            errors={(block, name, codec): error for block, name, codec, error in record["errors"]},
            missing_bytes=dict(record["missing_bytes"]),
            counted_elements=record["counted_elements"],
        )
