"""Every architecture, exactly: four promises checked on tiny random models, and the table of what was found.

    python -m adacc_hf.eval.architectures --output docs/SUPPORT.md

1. Lossless: under RECOMPUTE-everything and random lossless policies, the loss and every gradient are bit for bit those
   of plain training, on a batch that the profile has not seen.
2. Compressed: a policy that only retains and compresses gives bit for bit the gradients of plain training inside a
   plain pair of saved-tensor hooks that sends the same storages through the same codecs.
3. Stored bytes: what forward leaves behind is what the policy predicted, byte for byte.
4. Mixed: policies that compress and recompute are off by no more than codecs are: what replay makes of numbers that a
   lossy codec stored is as near as these.
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
from adacc_hf.artifacts.policy import Action
from adacc_hf.artifacts.profile import KindProfile
from adacc_hf.eval.zoo.architecture import Architecture, Batch
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.reports.run_record import markdown_table
from adacc_hf.run.blocks import Checkpointed, Installation
from adacc_hf.solve.simple_policies import checkpoint_policy, random_policy, uniform_policy
from adacc_hf.solve.solver import least_policy
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=64)
LOSSLESS = ("retain", "recompute")
"""Tiny models have tiny activations; the smallest that is worth a payload here has 16 floats."""
PROFILED, TRAINED = 0, (1, 2, 1)
"""Seeds of the batch that is profiled, and of those that are trained on, step by step.

A block's first two calls are recorded, the third runs as all later ones do; the second batch has other values.
"""

MIXED_FACTOR, MIXED_EXCESS = 2.0, 0.1
"""How far off the gradient may be under a mixed policy: so many times what it is with everything compressed, as other
tensors are coded then, and so much of its norm more, since where little can be compressed that is next to nothing."""

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found for one architecture."""

    architecture: Architecture
    attention: str
    num_blocks: int
    num_kinds: int
    lossless: bool
    compressed: bool | None
    """None where nothing was compressed, because no block can be replayed."""
    stored: bool
    mixed: bool | None
    """None where nothing was compressed with loss."""
    least_peak: float | None = None
    """Peak of a step under the lossless policy that needs least, over that with torch's checkpoint around every block;
    None where the model was refused."""
    calls: str = "-"
    """What tells whether a call of a block runs what was recorded (`describe_calls`)."""
    notes: tuple[str, ...] = ()
    """Why blocks cannot be replayed, by how much stored bytes differ, or why the model was refused."""

    @property
    def is_green(self) -> bool:
        return self.lossless and self.compressed is True and self.stored and self.mixed is True

    def row(self) -> dict[str, str]:
        """The architecture's line of the table."""
        return {
            "architecture": self.architecture.name,
            "model": self.architecture.model_class,
            "attention": self.attention,
            "blocks": str(self.num_blocks),
            "kinds": str(self.num_kinds),
            "lossless": _word(self.lossless),
            "compressed": _word(self.compressed),
            "stored bytes": _word(self.stored),
            "mixed": _word(self.mixed),
            "least peak": "-" if self.least_peak is None else f"{math.ceil(100 * self.least_peak) / 100:.2f}",
            "calls": self.calls,
            "notes": "; ".join([*self._settings(), *self.notes]),
        }

    def _settings(self) -> list[str]:
        """What a user has to set."""
        classes = self.architecture.block_classes
        return [] if classes is None else [f"AdaccConfig(block_classes={classes})"]


def check(architecture: Architecture) -> Verdict:
    """Train one architecture under seven policies and compare each with plain training."""
    model, batches = architecture.build(), [architecture.make_batch(seed) for seed in TRAINED]
    plain = train(model, batches)
    try:
        profile = profile_model(model, architecture.make_batch(PROFILED), config_of(architecture))
        return _verdict(architecture, model, batches, profile, plain)
    except AdaccError as error:
        return Verdict(
            architecture=architecture,
            attention=_attention(model),
            num_blocks=0,
            num_kinds=0,
            lossless=False,
            compressed=False,
            stored=False,
            mixed=False,
            notes=(f"refused: {error}",),
        )


def config_of(architecture: Architecture) -> AdaccConfig:
    """What an architecture is profiled and trained with."""
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
    policies.append(least_policy(profile, replace(config, actions=LOSSLESS)))
    *trials, by_checkpoint, lossy_trial = [
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
        lossless=all(same_bits(trial.steps, plain) for trial in [*trials, by_checkpoint]),
        compressed=None if is_vacuous and skipped else same_bits(lossy_trial.steps, expected) > is_vacuous,
        stored=all(trial.excess_bytes == 0 for trial in [*trials, lossy_trial]),
        mixed=_is_mixed_well(model, batches, profile, config, plain),
        least_peak=trials[-1].peak_bytes / _checkpointing_peak(model, batches, config),
        calls=describe_calls(profile),
        notes=(*_unreplayed(profile), *_notes([*trials, lossy_trial])),
    )


def _checkpointing_peak(model: nn.Module, batches: Sequence[Batch], config: AdaccConfig) -> int:
    """Return the peak of a step with torch's checkpoint around every block, in bytes."""
    installation = Installation(model, config.block_classes)
    for function in installation.blocks.values():
        function.strategy = Checkpointed()
    try:
        train(model, batches)
        measure_step(model, batches[0])
        return measure_step(model, batches[0]).peak_bytes
    finally:
        installation.remove()


def describe_calls(profile: Profile) -> str:
    """Return what tells whether calls run what was recorded, for all kinds of blocks, the commonest first.

    "traced" by Dynamo whole, so that guards tell; "witnessed", compared with the tape at each call; "not replayed", so
    that blocks run plainly or under torch's checkpoint.
    """
    words: Counter[str] = Counter()
    for block in profile.blocks:
        kind = profile.kind_of(block)
        words["not replayed" if kind.untrusted else "witnessed" if kind.untraced else "traced"] += 1
    return ", ".join(word for word, _ in words.most_common())


def _unreplayed(profile: Profile) -> Iterator[str]:
    """Yield why blocks are not replayed, or witnessed, each reason once."""
    reasons = ((kind.block_class, kind.untrusted or kind.untraced) for kind in profile.kinds)
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
    compressed, *mixed = errors
    if compressed == 0:
        return None
    return all(error <= MIXED_FACTOR * compressed + MIXED_EXCESS for error in mixed)  # no error is below nan


def error_of(steps: Sequence[Gradients], plain: Sequence[Gradients]) -> float:
    """Norm of the difference of all gradients over that of the plain ones."""
    pairs = [
        (changed[name].double(), gradient.double())
        for changed, step in zip(steps, plain, strict=True)
        for name, gradient in step.items()
        if name != "loss"
    ]
    excess = sum(float((left - right).square().sum()) for left, right in pairs)
    return math.sqrt(excess / sum(float(right.square().sum()) for _, right in pairs))


@dataclass(frozen=True)
class Trial:
    """Training under one policy."""

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
    excess = f"{worst.stored_bytes} bytes stored, {abs(worst.excess_bytes)} {more} than predicted"
    return (excess,)


def _try(model: nn.Module, batches: Sequence[Batch], policy: Policy, config: AdaccConfig) -> Trial:
    with apply_policy(model, policy, config):
        steps = train(model, batches)
        # Of what a model keeps on its modules the meter sees the next one come, but the last one go only if it saw it.
        measure_step(model, batches[0])
        memory = measure_step(model, batches[0])
        excess_bytes = memory.stored_bytes - policy.predicted_stored_bytes
        return Trial(steps, memory.stored_bytes, excess_bytes, memory.peak_bytes)


def train(model: nn.Module, batches: Sequence[Batch]) -> list[Gradients]:
    """Per batch the loss and every gradient. No optimizer runs and buffers are put back: all runs start alike."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    steps = [_step(model, batch, seed) for seed, batch in enumerate(batches)]
    for buffer, before in buffers:
        buffer.copy_(before)
    return steps


def _step(model: nn.Module, batch: Batch, seed: int) -> Gradients:
    torch.manual_seed(seed)
    loss = model(**batch).loss
    loss.backward()
    result = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), **result}


def same_bits(left: Sequence[Gradients], right: Sequence[Gradients]) -> bool:
    """Whether all losses and gradients of all steps are equal bit for bit."""
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(left, right, strict=True)
    )


def train_through_codecs(
    model: nn.Module,
    batches: Sequence[Batch],
    profile: Profile,
    policy: Policy,
    config: AdaccConfig,
    skipped: set[str],
) -> list[Gradients]:
    """Plain training whose saved tensors go through the codecs of `policy`, without the executor: the codec oracle.

    The blocks in `skipped` train plainly.
    """
    installation = Installation(model, config.block_classes)
    installation.expect(block.name for block in profile.blocks)
    try:
        for block in [block for block in profile.blocks if block.name not in skipped]:
            strategy = ThroughCodecs(profile.kind_of(block), dict(policy.plan_of(block.name).choices))
            installation.functions[block.name].strategy = strategy
        return train(model, batches)
    finally:
        installation.remove()


class ThroughCodecs:
    """The strategy that keeps, for each slot whose storage a plan compresses, what the codec makes of it."""

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
        """The whole storage of `tensor`, in the order of memory, after encoding and decoding."""
        record, codec = self._values[value], self._codecs[value]
        dtype = getattr(torch, record.dtype)
        # Contiguous without strides, which torch does not declare.
        dense = torch.empty(0, dtype=dtype)
        dense.set_(tensor.untyped_storage(), 0, record.encoded_shape)  # type: ignore[call-overload]
        return codec.decode(codec.encode(dense))


def _on_storage(decoded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The storage of `decoded`, viewed as `like` views its own."""
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
    head = (
        f"{len(green)} of {len(verdicts)} architectures keep all four promises, checked with torch {torch.__version__} "
        f"and Transformers {transformers.__version__}. In {sum('not replayed' in verdict.calls for verdict in green)} "
        f"of them some of the blocks cannot be replayed (see notes).\n"
    )
    parts = [
        f"## {family[0].upper()}{family[1:]}\n\n{markdown_table([verdict.row() for verdict in group])}\n"
        for family, group in families.items()
    ]
    return "\n".join([head, *parts])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Check every architecture and write the table of what is supported.")
    parser.add_argument("names", nargs="*", help="architectures to check; all if none is named")
    parser.add_argument("--output", type=Path, help="the page to write the tables into; needs all architectures")
    arguments = parser.parse_args(argv)
    table = architectures()
    unknown = [name for name in arguments.names if name not in table]
    if unknown:
        parser.error(f"unknown architecture {unknown[0]!r}; known: {', '.join(table)}")
    if arguments.names and arguments.output:
        parser.error("--output takes the whole table: name no architectures")
    torch.set_num_threads(1)  # sums of floats are made in one order
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
