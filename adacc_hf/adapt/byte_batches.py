"""ByteBatches: divides the samples of each optimizer step into micro-batches, as large as the budget allows.

The samples arrive uncollated, so that each step is divided with the newest predictions of the run, whatever a data
loader has prefetched. The plan of a step depends on the lengths of its samples, on the profile that predicts other
sizes, and on the corrections. A checkpoint has all of these, so that a resumed run makes the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from adacc_hf.adapt.corrections import with_static_memory
from adacc_hf.adapt.run_state import RunState
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.files import fields_of, from_fields
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.batch_costs import BatchCosts, longest_fitting, with_samples
from adacc_hf.solve.batch_plan import Lengths, longest_of, plan_step
from adacc_hf.torch_glue.batch_shapes import batch_shapes
from adacc_hf.torch_glue.compat import shifts_labels
from adacc_hf.torch_glue.distributed import fail_together, gather_from_all_ranks

MULTIPLES = tuple(2**power for power in range(10))
"""Multiples to which a collate_fn may pad (`pad_to_multiple_of`)."""
TOKENS_OF_A_LAUNCH = 64
"""Assumed cost of a micro-batch, in tokens, before the run can predict times."""
NO_LENGTHS = (
    "batch_by_bytes needs samples that are mappings with lists or tensors, such as input_ids: a sample of the dataset "
    "is %s"
)
NOT_PADDED = (
    "batch_by_bytes: %s. It divides samples into batches of its own, so collate_fn must return a mapping of tensors "
    "whose first dimension is the number of samples, each padded to the longest sample: leave out padding_free, and "
    "trainers that make their own batches, or train without batch_by_bytes"
)


class Samples:
    """Uncollated samples of one batch of a data loader. A class of its own, which loaders pass on as it is."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = list(rows)


@contextmanager
def uncollated(loader: Any) -> Iterator[Callable[[list[Any]], Any]]:
    """Let a data loader return `Samples` in the `with` block, and yield its own collate_fn."""
    inner = getattr(loader, "base_dataloader", loader)  # Accelerate's loaders have their DataLoader in this attribute
    collate_fn, inner.collate_fn = inner.collate_fn, Samples
    try:
        yield collate_fn
    finally:
        inner.collate_fn = collate_fn


class PaddedSizes:
    """Shapes of a collate_fn's batches, learned from them. The second dimension of a tensor is the longest list of a
    field, rounded up to a multiple, or constant, as all later dimensions are."""

    def __init__(self) -> None:
        self.fields: list[str] = []
        """Names of the fields of samples that have a length, the main one first."""
        self.batches: list[tuple[Lengths, Shapes]] = []
        """The batches from which a rule was learned."""
        self._rules: dict[str, list[tuple[int, int]]] = {}
        """Possible rules for each tensor: (index of the field, multiple), or (-1, size) for a constant size."""
        self._shapes: Shapes = ()

    def lengths(self, sample: Any) -> Lengths:
        """Return the length of each field of `sample`."""
        if not self.fields:
            sizes = {name: _length(value) for name, value in sample.items()} if isinstance(sample, Mapping) else {}
            self.fields = sorted((n for n, size in sizes.items() if size is not None), key=lambda n: n != "input_ids")
            if not self.fields:
                raise TypeError(NO_LENGTHS % type(sample).__name__)
        return tuple(_length(sample.get(name)) or 0 for name in self.fields)

    def learn(self, longest: Lengths, shapes: Shapes) -> None:
        """Learn from a batch with `shapes`, made of samples whose `longest` lengths are known."""
        before = {name: list(rules) for name, rules in self._rules.items()}
        for name, size in shapes:
            if len(size) > 1:
                own = self.fields.index(name) if name in self.fields else 0
                order = [own, *(index for index in range(len(longest)) if index != own)]
                every = [(index, multiple) for index in order for multiple in MULTIPLES] + [(-1, size[1])]
                candidates = self._rules.get(name, every)
                self._rules[name] = [rule for rule in candidates if _padded(longest, rule) == size[1]]
                if not self._rules[name]:
                    text = f"batches have {size[1]} as the length of {name!r}, which does not follow from the samples"
                    raise ValueError(NOT_PADDED % text)
        if self._rules != before or not self._shapes:
            self.batches.append((longest, with_samples(shapes, 1)))
        self._shapes = shapes

    def sample(self, longest: Lengths) -> Shapes:
        """Return the shapes of a batch of one sample with these lengths."""
        return tuple(
            (name, (1, _padded(longest, self._rules[name][0]), *size[2:]) if len(size) > 1 else (1,))
            for name, size in self._shapes
        )


def _length(value: Any) -> int | None:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return len(value)
    shape = getattr(value, "shape", ())
    return shape[0] if shape else None


def _padded(longest: Lengths, rule: tuple[int, int]) -> int:
    index, multiple = rule
    return multiple if index < 0 else -(-longest[index] // multiple) * multiple


class ByteBatches:
    """Micro-batches of a run's optimizer steps, from the uncollated samples of each step.

    `batch_size` samples of any length are known to fit: they form the micro-batches of the first steps, until the run
    has recorded enough sizes to predict all others. A resumed run continues with the predictions of its checkpoint.
    """

    def __init__(self, run: RunState, batch_size: int) -> None:
        if isinstance(run.config.memory_budget, float):
            raise ValueError(
                f"batch_by_bytes with memory_budget={run.config.memory_budget}: a fraction of plain training's bytes "
                f'grows with the batch, so it limits no batch. Set a size, such as memory_budget="20GiB", or "auto"'
            )
        if run.source is not None:
            raise ValueError(
                "batch_by_bytes with a policy=... of your own: leave policy out, so that sizes are predicted"
            )
        self._run, self._batch_size = run, batch_size
        self._sizes = PaddedSizes()
        self._num_steps = self._most_tokens = 0
        """Numbers of steps so far, and of tokens of their largest micro-batch."""
        self._predictor: Profile | None = None
        """Profile that predicts the costs of micro-batches: the run's first one, also after it is resumed."""
        self._costs: BatchCosts | None = None
        self._version: tuple[int, int] | None = None
        """Version of the corrections in `_costs`, and their static bytes."""
        if run.saved_batches is not None:
            self._continue(run.saved_batches)

    def steps(self, loader: Any) -> Iterator[list[tuple[dict[str, Any], float]]]:
        """Yield each step's micro-batches, on the model's device, with weights. A batch of `loader` is one step."""
        device = next(self._run.model.parameters()).device
        with uncollated(loader) as collate_fn:
            for samples in loader:
                batches = self.divide(samples.rows, collate_fn)
                yield [
                    ({n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in batch.items()}, weight)
                    for batch, weight in zip(batches, self.weights(batches), strict=True)
                ]

    def divide(self, samples: Sequence[Any], collate_fn: Callable[[list[Any]], Any]) -> list[Any]:
        """Return the micro-batches of one optimizer step on `samples`, made by `collate_fn`."""
        with fail_together():
            lengths = [self._sizes.lengths(sample) for sample in samples]
            self._update_costs()
            cost = self._first_cost(len(samples)) if self._costs is None else self._predicted_ms
            groups = plan_step(lengths, cost)
            self._check_single(lengths, groups)
        most = max(gather_from_all_ranks(len(groups)))
        groups = plan_step(lengths, cost, most) if most > len(groups) else groups
        if most > len(groups):
            raise ValueError(
                f"a rank has {len(groups)} samples in a step in which another one has {most} micro-batches: give all "
                f"ranks equally many samples (drop_last=True, or Accelerate's even_batches=True)"
            )
        if self._costs is None:  # the second micro-batch is recorded: of many samples in every other step
            groups = sorted(groups, key=len, reverse=self._num_steps % 2 == 1)
        self._num_steps += 1
        return [
            self._checked(collate_fn([samples[index] for index in group]), [lengths[index] for index in group])
            for group in groups
        ]

    def _checked(self, batch: Any, lengths: Sequence[Lengths]) -> Any:
        """Return `batch`, made of samples with these lengths, and learn from its sizes."""
        longest, number = longest_of(lengths), len(lengths)
        self._most_tokens = max(self._most_tokens, number * longest[0])
        shapes = batch_shapes(batch) if isinstance(batch, Mapping) else ()
        if not shapes or any(size[0] != number for _, size in shapes):
            sizes = ", ".join(f"{name} {list(size)}" for name, size in shapes) or "no tensors"
            raise ValueError(NOT_PADDED % f"collate_fn made a {type(batch).__name__} with {sizes} of {number} samples")
        self._sizes.learn(longest, shapes)
        return batch

    def _first_cost(self, num_samples: int) -> Callable[[int, Lengths], float | None]:
        """Return the cost of micro-batches while no profile predicts them. At least two form a step, because one of
        them is recorded after gradients exist. Their numbers of samples vary, so that predictions learn from them."""
        batch_size = self._batch_size
        most = (num_samples, max(2, batch_size - 1), max(2, batch_size // 2))[self._num_steps % 3]
        most = min((num_samples + 1) // 2, most)

        def cost(number: int, longest: Lengths) -> float | None:
            tokens = number * longest[0]
            has_room = number <= most and (number <= batch_size or tokens <= self._most_tokens)
            return tokens + TOKENS_OF_A_LAUNCH if has_room else None

        return cost

    def _predicted_ms(self, number: int, longest: Lengths) -> float | None:
        assert self._costs is not None
        return self._costs.ms(number, self._sizes.sample(longest))

    def _update_costs(self) -> None:
        """Take over the run's corrections, and its first profile that predicts other sizes."""
        run = self._run
        found = run.size_predictor if self._predictor is None else None
        if found is not None and found.sizes is not None:  # a run of single samples predicts no pairs
            own = found.measured[0][0]
            self._predictor = found if found.sizes.size_class(with_samples(own, 2 * own[0][1][0])) else None
        version = (run.corrections.version, run.corrections.static_bytes)
        if self._predictor is not None and version != self._version:
            self._version = version
            budget = run.budget(self._predictor)
            self._costs = BatchCosts(self._predictor, run.config, budget.nbytes, run.corrections.applied)

    def _check_single(self, lengths: Sequence[Lengths], groups: Sequence[Sequence[int]]) -> None:
        """Report a sample that does not fit even alone, before it trains, with the longest that does."""
        costs, run, sizes = self._costs, self._run, self._sizes
        if costs is None:
            return
        for own in {lengths[group[0]] for group in groups if len(group) == 1}:
            sample = sizes.sample(own)
            if costs.ms(1, sample) is not None or costs.fits_alone(sample):
                continue

            def shorter(length: int, own: Lengths = own) -> Shapes:
                return sizes.sample(tuple(min(length, size) for size in own))

            name, least, longest = sizes.fields[0], costs.least_peak(sample), longest_fitting(costs, shorter, own[0])
            text = (
                f"a sample of {own[0]} {name} does not fit memory_budget={run.config.memory_budget!r} even alone: it "
                f"needs {least} bytes ({format_bytes(least)}) at least. The longest that fits has {longest} {name}: "
                f"truncate samples to that (max_length), or raise memory_budget"
            )
            if run.config.on_over_budget == "error":
                raise InfeasibleBudgetError(text, least)
            run.warn_of_memory(text, key=("batch_by_bytes", own))

    def weights(self, batches: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the factor of the mean loss of each micro-batch of a step with which the step has the gradients of all
        its samples in one batch: its share of the labels of all ranks, times the number of ranks, because ranks average
        their gradients. Without labels, the shares of samples."""
        counts = [num_labels(batch, self._run.model) for batch in batches]
        by_rank = gather_from_all_ranks(sum(counts))
        return [len(by_rank) * count / max(1, sum(by_rank)) for count in counts]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON record of what plans depend on, for a checkpoint."""
        self._update_costs()  # as the next step would
        static = self._run.corrections.static_bytes
        return {
            "steps": self._num_steps,
            "most_tokens": self._most_tokens,
            "fields": self._sizes.fields,
            "batches": self._sizes.batches,
            # A resumed run's corrections count no state that was there when it began.
            "profile": self._predictor and fields_of(with_static_memory(self._predictor, static)),
        }

    def _continue(self, record: Mapping[str, Any]) -> None:
        """Continue after the steps of the run whose `to_json` is `record`."""
        self._num_steps, self._most_tokens = record["steps"], record["most_tokens"]
        self._sizes.fields = record["fields"]
        for longest, shapes in record["batches"]:
            self._sizes.learn(tuple(longest), tuple((name, tuple(size)) for name, size in shapes))
        self._predictor = record["profile"] and from_fields(Profile, record["profile"])


def num_labels(batch: Mapping[str, Any], model: nn.Module) -> int:
    """Return the number of labels of which a model's loss on `batch` is the mean, or of samples without labels."""
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return batch_shapes(batch)[0][1][0]
    is_shifted = labels.dim() > 1 and "shift_labels" not in batch and shifts_labels(model)
    return int((labels[..., 1:] if is_shifted else labels).ne(-100).sum())
