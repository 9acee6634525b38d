"""Check of every supported architecture: four promises, tested on tiny random models, and the published table.

    python -m adacc_hf.eval.repository.architectures --output docs/SUPPORT.md

1. Exact: under RECOMPUTE-everything and random exact policies, the loss and every gradient equal plain training's
   bit for bit, on a batch that the profile has not seen.
2. Compressed: the reference is plain training inside plain saved-tensor hooks that send the same storages through the
   same codecs. A policy that only retains and compresses gives the reference's gradients, bit for bit.
3. Stored bytes: the bytes alive after forward equal the policy's prediction, to the byte.
4. Mixed: a policy that compresses and recomputes has gradient errors of the codecs' own size. Replaying operators on
   values that a lossy codec stored adds no larger error.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from adacc_hf import AdaccConfig, Policy, Profile, apply_policy, profile_model
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.kind_profile import KindProfile
from adacc_hf.artifacts.policy import Action
from adacc_hf.eval.trials.gradients import Gradients, compute_gradients, first_difference
from adacc_hf.eval.zoo.architecture import Architecture, Batch
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.reports.run_record import markdown_table
from adacc_hf.run.blocks import CheckpointStrategy, Installation
from adacc_hf.solve.simple_policies import checkpoint_policy, random_policy, uniform_policy
from adacc_hf.solve.solver import least_policy
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=64)
"""Settings for tiny models, whose activations are small: tensors of 16 floats and more are compressed."""
PROFILED, TRAINED = 0, (1, 2, 1)
"""Seeds of the profiled batch, and of the batches of the training steps.

The executor records a block's first two calls. The third call runs like all later calls. The second batch has other
values."""

MIXED_FACTOR, MIXED_EXCESS = 2.0, 0.1
"""Bound on the relative gradient error of a mixed policy: MIXED_FACTOR times the error with everything compressed
(because the set of compressed tensors differs), plus MIXED_EXCESS (because that error is almost 0 if little can be
compressed)."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of checking one architecture."""

    architecture: Architecture
    attention: str
    num_blocks: int = 0
    num_kinds: int = 0
    is_exact: bool = False
    is_compressed_exact: bool | None = False
    """True if the second promise holds. None if nothing was compressed, because no block can be replayed."""
    is_stored_predicted: bool = False
    is_mixed_close: bool | None = False
    """True if the fourth promise holds. None if nothing was compressed with loss."""
    least_peak: float | None = None
    """Peak of a step under the exact policy with the least peak, divided by the peak with torch's checkpoint
    around every block. None if the model was refused."""
    calls: str = "-"
    """Ways in which calls of the blocks are matched with recorded calls (`describe_calls`)."""
    notes: tuple[str, ...] = ()
    """Reasons: blocks that cannot be replayed, differences in stored bytes, or the refusal of the model."""

    @property
    def is_green(self) -> bool:
        return (
            self.is_exact
            and self.is_compressed_exact is True
            and self.is_stored_predicted
            and self.is_mixed_close is True
        )

    def row(self) -> dict[str, str]:
        """Return the architecture's row of the table."""
        classes = self.architecture.block_classes
        settings = [] if classes is None else [f"AdaccConfig(block_classes={classes})"]
        return {
            "architecture": self.architecture.name,
            "model": self.architecture.model_class,
            "attention": self.attention,
            "blocks": str(self.num_blocks),
            "kinds": str(self.num_kinds),
            "exact": _word(self.is_exact),
            "compressed": _word(self.is_compressed_exact),
            "stored bytes": _word(self.is_stored_predicted),
            "mixed": _word(self.is_mixed_close),
            "least peak": "-" if self.least_peak is None else f"{math.ceil(100 * self.least_peak) / 100:.2f}",
            "calls": self.calls,
            "notes": "; ".join([*settings, *self.notes]),
        }


def check(architecture: Architecture) -> Verdict:
    """Train one architecture under seven policies and compare each with plain training."""
    model, batches = architecture.build(), [architecture.make_batch(seed) for seed in TRAINED]
    plain = train(model, batches)
    try:
        profile = profile_model(model, architecture.make_batch(PROFILED), config_of(architecture))
        return _verdict(architecture, model, batches, profile, plain)
    except AdaccError as error:
        return Verdict(architecture=architecture, attention=_attention(model), notes=(f"refused: {error}",))


def config_of(architecture: Architecture) -> AdaccConfig:
    """Return the configuration for profiling and training an architecture."""
    return replace(CONFIG, block_classes=architecture.block_classes)


def _verdict(
    architecture: Architecture,
    model: PreTrainedModel,
    batches: Sequence[Batch],
    profile: Profile,
    plain: list[Gradients],
) -> Verdict:
    actions = tuple(Action)
    policies = [uniform_policy(profile, Action.RECOMPUTE)]
    policies += [random_policy(profile, seed, actions, lossless=True, whole_blocks=True) for seed in range(2)]
    lossy = random_policy(profile, 2, (Action.RETAIN, Action.COMPRESS))
    config = config_of(architecture)
    policies.append(least_policy(profile, replace(config, exact=True)))
    *trials, checkpoint_trial, lossy_trial = [
        _try(model, batches, policy, config) for policy in [*policies, checkpoint_policy(profile), lossy]
    ]
    skipped = {block.name for block in profile.blocks if profile.kind_of(block).untrusted}
    expected = train_through_codecs(model, batches, profile, lossy, config, skipped)
    is_vacuous = same_bits(expected, plain)
    return Verdict(
        architecture=architecture,
        attention=_attention(model),
        num_blocks=len(profile.blocks),
        num_kinds=len(profile.kinds),
        is_exact=all(same_bits(trial.steps, plain) for trial in [*trials, checkpoint_trial]),
        is_compressed_exact=None if is_vacuous and skipped else same_bits(lossy_trial.steps, expected) > is_vacuous,
        is_stored_predicted=all(trial.excess_bytes == 0 for trial in [*trials, lossy_trial]),
        is_mixed_close=_is_mixed_well(model, batches, profile, config, plain),
        least_peak=trials[-1].peak_bytes / _checkpointing_peak(model, batches, config),
        calls=describe_calls(profile),
        notes=(*_unreplayed(profile), *_notes([*trials, lossy_trial])),
    )


def _checkpointing_peak(model: nn.Module, batches: Sequence[Batch], config: AdaccConfig) -> int:
    """Return the peak bytes of a step with torch's checkpoint around every block."""
    installation = Installation(model, config.block_classes)
    for call in installation.calls.values():
        call.strategy = CheckpointStrategy()
    try:
        train(model, batches)
        measure_step(model, batches[0])
        return measure_step(model, batches[0]).peak_bytes
    finally:
        installation.remove()


def describe_calls(profile: Profile) -> str:
    """Return how the calls of blocks run, the most frequent way first.

    "traced": under a plan for each activation. "checkpointed": plainly or under torch's checkpoint.
    """
    words = Counter("checkpointed" if profile.kind_of(block).untrusted else "traced" for block in profile.blocks)
    return ", ".join(word for word, _ in words.most_common())


def _unreplayed(profile: Profile) -> Iterator[str]:
    """Yield the reasons why blocks are not replayed. Each reason is yielded once."""
    reasons = ((kind.block_class, kind.untrusted) for kind in profile.kinds)
    yield from dict.fromkeys(f"{name}: {reason}" for name, reason in reasons if reason)


def _is_mixed_well(
    model: nn.Module, batches: Sequence[Batch], profile: Profile, config: AdaccConfig, plain: list[Gradients]
) -> bool | None:
    policies = [uniform_policy(profile, Action.COMPRESS)]
    policies += [random_policy(profile, seed, (Action.COMPRESS, Action.RECOMPUTE)) for seed in range(2)]
    errors = []
    for policy in policies:
        with apply_policy(model, policy, config):
            errors.append(error_of(train(model, batches), plain))
    compressed_error, *mixed_errors = errors
    if compressed_error == 0:
        return None
    # False for an error of nan.
    return all(error <= MIXED_FACTOR * compressed_error + MIXED_EXCESS for error in mixed_errors)


def error_of(steps: Sequence[Gradients], plain: Sequence[Gradients]) -> float:
    """Return the relative L2 error of all gradients against plain training's."""
    pairs = [
        (changed.by_name[name].double(), gradient.double())
        for changed, step in zip(steps, plain, strict=True)
        for name, gradient in step.by_name.items()
    ]
    excess = sum(float((changed - plain).square().sum()) for changed, plain in pairs)
    return math.sqrt(excess / sum(float(right.square().sum()) for _, right in pairs))


@dataclass(frozen=True)
class Trial:
    """Training steps under one policy, and their memory."""

    steps: list[Gradients]
    stored_bytes: int
    excess_bytes: int
    """Stored bytes beyond the policy's prediction."""
    peak_bytes: int


def _notes(trials: Sequence[Trial]) -> tuple[str, ...]:
    worst = max(trials, key=lambda trial: abs(trial.excess_bytes))
    if worst.excess_bytes == 0:
        return ()
    more = "more" if worst.excess_bytes > 0 else "fewer"
    return (f"{worst.stored_bytes} bytes stored, {abs(worst.excess_bytes)} {more} than predicted",)


def _try(model: nn.Module, batches: Sequence[Batch], policy: Policy, config: AdaccConfig) -> Trial:
    with apply_policy(model, policy, config):
        steps = train(model, batches)
        # A model may cache tensors on its modules. The meter counts a cached tensor's allocation, but its release only
        # if the meter saw the allocation. So the second measurement counts.
        measure_step(model, batches[0])
        memory = measure_step(model, batches[0])
        excess_bytes = memory.stored_bytes - policy.predicted_stored_bytes
        return Trial(steps, memory.stored_bytes, excess_bytes, memory.peak_bytes)


def train(model: nn.Module, batches: Sequence[Batch]) -> list[Gradients]:
    """Return the loss and every gradient of each batch.

    No optimizer runs, and buffers are restored, so that all runs start from the same state.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    steps = [compute_gradients(model, batch, seed) for seed, batch in enumerate(batches)]
    for buffer, before in buffers:
        buffer.copy_(before)
    return steps


def same_bits(first: Sequence[Gradients], second: Sequence[Gradients]) -> bool:
    """Return True if all losses and gradients of all steps are equal bit for bit."""
    return all(first_difference(a, b) is None for a, b in zip(first, second, strict=True))


def train_through_codecs(
    model: nn.Module,
    batches: Sequence[Batch],
    profile: Profile,
    policy: Policy,
    config: AdaccConfig,
    skipped: set[str],
) -> list[Gradients]:
    """Train plainly, with saved tensors passed through the codecs of `policy`. The executor does not run.

    This is the reference for compressed policies. The blocks in `skipped` train plainly.
    """
    installation = Installation(model, config.block_classes)
    installation.expect(block.name for block in profile.blocks)
    try:
        for block in [block for block in profile.blocks if block.name not in skipped]:
            strategy = ThroughCodecs(profile.kind_of(block), dict(policy.plan_of(block.name).choices))
            installation.calls[block.name].strategy = strategy
        return train(model, batches)
    finally:
        installation.remove()


class ThroughCodecs:
    """Strategy that saves, for each slot whose storage a plan compresses, the decoded payload in place of the
    tensor."""

    def __init__(self, kind: KindProfile, choices: dict[int, Any]) -> None:
        self._slots = kind.slots
        self._values = kind.values
        self._codecs: dict[int, Codec] = {
            value: get_codec(choice.codec, **dict(choice.options))
            for value, choice in choices.items()
            if choice.action is Action.COMPRESS
        }

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = iter(self._slots)
        decoded: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            value = next(slots)
            if value not in self._codecs:
                return tensor.detach()
            if value not in decoded:
                decoded[value] = self._round_trip(value, tensor)
            return _on_storage(decoded[value], tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return fn(*args)

    def _round_trip(self, value: int, tensor: torch.Tensor) -> torch.Tensor:
        """Encode and decode the whole storage of `tensor`, in the order of memory."""
        record, codec = self._values[value], self._codecs[value]
        dtype = getattr(torch, record.dtype)
        # torch makes the tensor contiguous if no strides are passed; its stubs do not declare this overload.
        dense = torch.empty(0, dtype=dtype)
        dense.set_(tensor.untyped_storage(), 0, record.encoded_shape)  # type: ignore[call-overload]
        return codec.decode(codec.encode(dense))


def _on_storage(decoded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view on the storage of `decoded`, with the offset, shape and strides of `like`."""
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(decoded.untyped_storage(), like.storage_offset(), like.shape, like.stride())


def _attention(model: PreTrainedModel) -> str:
    return str(model.config._attn_implementation)


def _word(holds: bool | None) -> str:
    return {True: "yes", False: "NO", None: "-"}[holds]


REGION = re.compile(r"(<!-- architectures -->\n).*(<!-- end of architectures -->)", re.DOTALL)


def support_table(verdicts: Sequence[Verdict]) -> str:
    """Return versions, the number of architectures that keep all promises, and a table for each family, as Markdown."""
    families: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        families.setdefault(verdict.architecture.family, []).append(verdict)
    green = [verdict for verdict in verdicts if verdict.is_green]
    summary = (
        f"{len(green)} of {len(verdicts)} architectures keep all four promises, checked with torch {torch.__version__} "
        f"and Transformers {transformers.__version__}. In {sum('checkpointed' in verdict.calls for verdict in green)} "
        f"of them some of the blocks cannot be traced (see notes).\n"
    )
    parts = [
        f"## {family[0].upper()}{family[1:]}\n\n{markdown_table([verdict.row() for verdict in group])}\n"
        for family, group in families.items()
    ]
    return "\n".join([summary, *parts])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Check every architecture and write the support table.")
    parser.add_argument("names", nargs="*", help="architectures to check (default: all)")
    parser.add_argument("--output", type=Path, help="page to write the tables into; requires all architectures")
    arguments = parser.parse_args(argv)
    table = architectures()
    unknown = [name for name in arguments.names if name not in table]
    if unknown:
        parser.error(f"unknown architecture {unknown[0]!r}; choose from: {', '.join(table)}")
    if arguments.names and arguments.output:
        parser.error("--output needs the whole table: leave out the names of architectures")
    torch.set_num_threads(1)  # floats are summed in a fixed order
    transformers.logging.set_verbosity_error()
    verdicts = []
    for name in arguments.names or table:
        verdicts.append(check(table[name]))
        print(" | ".join(verdicts[-1].row().values()), flush=True)
    if arguments.output:
        page, tables = arguments.output.read_text(encoding="utf-8"), support_table(verdicts)
        page = REGION.sub(lambda region: f"{region[1]}\n{tables}\n{region[2]}", page)
        arguments.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
