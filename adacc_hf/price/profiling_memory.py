"""Prediction of the memory that profiling takes on a part of a batch (some samples, with some of their tokens), from
the profile of a smaller part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import Value
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import parse_bytes
from adacc_hf.price.batch_subsampling import Batch
from adacc_hf.torch_glue.batch_shapes import num_elements


def peak_limit(config: AdaccConfig) -> int | None:
    """Return the bytes that the peak of a step may take, or None if the budget is not a number of bytes.

    With the budget "auto", profiling may use all memory of the device, and fails with an error if this is not enough.
    """
    budget = config.memory_budget
    if isinstance(budget, float) or budget == "auto":
        return None
    return parse_bytes(budget, "memory_budget") if isinstance(budget, str) else budget


FIRST_SHARE = 0.25
"""Largest share of the batch's elements in the first profiled part, if the budget is a number of bytes. Nothing
predicts the memory of the first part. Up to this share, the first part of T5, GPT-2 and LLaMA takes less than the least
peak that any policy reaches on the whole batch."""


def start_small(choices: Sequence[Sequence[Batch]], whole: Batch) -> list[list[Batch]]:
    """Return copies of the lists in `choices` that begin with a small part of the batch `whole`.

    Each list contains parts of the batch, to be profiled one after the other. If the first part has more than
    `FIRST_SHARE` of the batch's elements, this part is replaced by the smallest first part of all lists, even if that
    part is too large as well.
    """
    smallest = min((parts[0] for parts in choices), key=lambda part: num_elements(part.shapes))
    limit = FIRST_SHARE * num_elements(whole.shapes)
    return [list(parts) if num_elements(parts[0].shapes) <= limit else [smallest, *parts[1:]] for parts in choices]


def parts_within(limit: int, first: Profile, choices: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Return the parts of the batch (some samples, with some of their tokens) to profile. Each list in `choices`
    contains alternative parts.

    The part `choices[0][0]` was profiled before, with the result `first`, and is always the first part returned. The
    other parts come from one of the lists: the first list in which each part is predicted to take at most `limit` bytes
    to profile. If there is no such list, they come from the last list.
    """
    profiled = choices[0][0]
    for parts in choices:
        others = [part for part in parts if part.shapes != profiled.shapes]
        if parts is choices[-1] or all(profiling_bytes(first, profiled, part) <= limit for part in others):
            break
    return [profiled, *others]


def profiling_bytes(profile: Profile, part: Batch, other: Batch) -> int:
    """Predict the peak of memory while the batch `other` is profiled without timing.

    `profile` is the profile of the batch `part`. Its byte counts are scaled by the growth from `part` to `other`. The
    peak occurs either while a block is recorded, which keeps all values of the block alive, or in the measured step, in
    which all blocks are recomputed. The memory of the head and of other code outside the blocks is scaled by the
    largest growth.

    The prediction may be too high, for two reasons: a dimension that equals a sequence length only by chance is scaled
    like this length, and the gradients of parameters are scaled like activations.
    """
    growth = _Growth.between(part, other)
    static_bytes = profile.static_bytes
    bases = [block.forward_base_bytes - static_bytes for block in profile.blocks]
    recorded = max(sum(growth.bytes_of(v) for v in kind.values if _is_computed(v)) for kind in profile.kinds)
    recomputed = simulate(profile, [recompute_plan(profile.kind_of(block)) for block in profile.blocks]).peak_bytes
    outside = max(profile.outside_peak_bytes, profile.loss_peak_bytes) - static_bytes
    mean = growth.mean([value for kind in profile.kinds for value in kind.values if _is_computed(value)])
    in_blocks = max(int(mean * max(bases)) + recorded, int(mean * (recomputed - static_bytes)))
    return static_bytes + in_blocks + int((growth.linear - mean) * outside)


def _is_computed(value: Value) -> bool:
    return value.producer is not None and value.shared is None


@dataclass(frozen=True)
class _Growth:
    """Growth from a first, profiled part of a batch to a second part: sizes in the second part, divided by sizes in the
    first. A part contains some of the batch's samples, and some of the tokens of each sample."""

    samples: float
    """Number of samples in the second part, divided by the number in the first part."""
    lengths: Mapping[int, float]
    """Ratio of sequence lengths (second part divided by first part), by the length in the first part. A number of
    tokens in all samples is listed like a length, because layers may merge samples and tokens into one dimension."""
    has_features: bool
    """True if the batch has features of images or audio, which are as long in all parts."""

    @classmethod
    def between(cls, part: Batch, other: Batch) -> _Growth:
        lengths: dict[int, float] = {}
        for before, after in zip(part.shapes, other.shapes, strict=True):
            if len(before.size) == 2:
                ratio = after.size[1] / before.size[1]
                for length in {before.size[1], before.size[0] * before.size[1]}:
                    lengths[length] = max(lengths.get(length, 0.0), ratio)
        return cls(other.num_samples / part.num_samples, lengths, part.has_features)

    @property
    def linear(self) -> float:
        """Largest factor, at least 1, by which the bytes of a value grow from the first part of the batch to the
        second, if one of the value's dimensions is the length of a sequence."""
        return max(1.0, self.samples * max(self.lengths.values(), default=1.0))

    def bytes_of(self, value: Value) -> int:
        """Predict the bytes that `value` has when the second part of the batch is run. `value` is from the profile of
        the first part.

        Every dimension that equals a sequence length of the first part is scaled. Attention's scores have two such
        dimensions. If no dimension equals a sequence length, and the batch has features, the value may belong to the
        features, which have the same length in all parts. Its bytes are then scaled by the number of samples. In other
        batches, the bytes are scaled by the largest factor (`linear`).
        """
        ratios = [self.lengths[size] for size in value.shape if size in self.lengths]
        if ratios or self.has_features:
            return int(value.nbytes * max(1.0, self.samples * prod(ratios)))
        return int(value.nbytes * self.linear)

    def mean(self, values: Sequence[Value]) -> float:
        """Return the factor by which the bytes of all `values` together grow.

        In a batch without features, all values grow with the sequences, and the factor is the largest one (`linear`).
        """
        nbytes = sum(value.nbytes for value in values)
        return sum(map(self.bytes_of, values)) / nbytes if nbytes and self.has_features else self.linear
