"""A policy: one action for every activation of every block, as a frozen record that knows no torch.

A `Plan` holds the actions of one block; blocks that act alike share one. The file is JSON with a version and, per plan,
the digest of the tape that the actions belong to, so that a policy cannot be applied to another model.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.files import read_json, write_json
from adacc_hf.artifacts.units import format_bytes

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import CodecOption, KindProfile, Profile, Value
    from adacc_hf.artifacts.size_model import Shapes

FORMAT_VERSION = 3
COMPILED_FORMAT = "adacc_hf.compiled_policy"
"""What the file of a policy for compiled graphs says it is; see `adacc_hf/compiler/compiled_policy.py`."""
HEADS = ("plain", "chunked")
CHECKPOINTED_SHARE = 0.15
"""How many blocks torch's checkpoint runs under a random policy of whole blocks too, of those that can be replayed."""
IDLE_KIND = "idle"
"""What stands for a tape's digest in the plan of a block that the profiled batch ran without gradients alone: there is
nothing to decide. See `adacc_hf/price/heads.py`."""

Place = tuple[int | str, ...]
"""Where an argument is among those of a call: its position or name, then the steps into containers."""


class BlockAction(str, Enum):
    """What happens to a block as a whole."""

    PLAIN = "plain"
    """It runs untouched: autograd keeps what it saves."""
    CHECKPOINT = "checkpoint"
    """torch's checkpoint runs it: its inputs are kept, some as a codec's payload, and backward runs it once more."""
    REPLAY = "replay"
    """Each of its activations has an action of its own."""


class Action(str, Enum):
    """What happens to an activation between forward and backward (R_{i,t} of the paper's equation 4)."""

    RETAIN = "retain"
    """Keep the tensor as autograd would."""
    COMPRESS = "compress"
    """Keep a codec's payload instead and decode it in backward."""
    RECOMPUTE = "recompute"
    """Keep nothing and replay the operators that made it when backward asks."""

    @classmethod
    def parse(cls, name: str | Action) -> Action:
        """The action called `name`. Raises ValueError naming the allowed ones."""
        try:
            return cls(name)
        except ValueError:
            allowed = ", ".join(action.value for action in cls)
            raise ValueError(f"action={name!r} is unknown: choose from {allowed}") from None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The action for one activation, with its codec and the codec's options if it is COMPRESS."""

    action: Action
    codec: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.action.value if self.codec is None else f"{self.action.value}({self.codec})"

    @classmethod
    def compress(cls, option: CodecOption) -> Choice:
        return cls(action=Action.COMPRESS, codec=option.codec, options=option.options)

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"action": self.action.value}
        if self.codec is not None:
            record |= {"codec": self.codec, "options": dict(self.options)}
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Choice:
        options = tuple(sorted(record.get("options", {}).items()))
        return cls(action=Action.parse(record["action"]), codec=record.get("codec"), options=options)


RETAIN = Choice(action=Action.RETAIN)
RECOMPUTE = Choice(action=Action.RECOMPUTE)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The actions of one block of the kind `kind` (its tape's digest): one choice per activation, by value index."""

    kind: str
    choices: tuple[tuple[int, Choice], ...]
    is_checkpointed: bool = False
    """Whether torch's checkpoint runs the whole block. Its inputs alone are retained or compressed then."""
    places: tuple[tuple[int, Place], ...] = ()
    """Where a call of a checkpointed block finds each input that is compressed, by value index."""

    @property
    def is_plain(self) -> bool:
        """Whether the block runs untouched: everything is retained."""
        return not self.is_checkpointed and all(choice.action is Action.RETAIN for _, choice in self.choices)

    @property
    def block_action(self) -> BlockAction:
        """What happens to the block as a whole."""
        if self.is_checkpointed:
            return BlockAction.CHECKPOINT
        return BlockAction.PLAIN if self.is_plain else BlockAction.REPLAY

    def choice(self, value: int) -> Choice:
        return dict(self.choices)[value]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """An action for every activation of every block, with what it is predicted to cost.

    Build one with `solve_policy`, `Policy.uniform`, `Policy.random` or `Policy.load`.
    """

    plans: tuple[Plan, ...]
    """The different plans of this policy."""
    blocks: tuple[tuple[str, int], ...]
    """Every call of a block in a step, in forward order, and the index of its plan: the block's module path, and from
    its second call on "path#2"."""
    predicted_stored_bytes: int
    """Bytes that forward leaves behind for backward, storages counted once, the model's embedding and head included."""
    predicted_peak_bytes: int
    """Peak of live tensor bytes over a training step: parameters, buffers, gradients as they appear, optimizer state if
    there is any, stored activations and temporaries."""
    predicted_overhead_ms: float
    """Time per step spent on replay, encoding and decoding (the paper's equation 4), and by a slower head."""
    head: str = "plain"
    """How the output layer and the loss run: "plain", or "chunked" without whole logits."""
    batch: Shapes = field(default=(), compare=False)
    """Names and sizes of the tensors of the batch that the predictions are for. Empty if they are not known."""
    facts: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    """How it came about: solver status, gap, seconds, budget. JSON scalars only."""

    def plan_of(self, block: str) -> Plan:
        return self.plans[dict(self.blocks)[block]]

    @property
    def is_plain(self) -> bool:
        """Whether this policy does nothing at all."""
        return self.head == "plain" and all(plan.is_plain for plan in self.plans)

    @cached_property
    def digest(self) -> str:
        """A hash of what is done to which activation of which block; predictions and facts are left out."""
        record = self.to_json()
        actions = {name: record[name] for name in ("head", "plans", "blocks")}
        return hashlib.sha256(json.dumps(actions, sort_keys=True).encode()).hexdigest()

    @property
    def idle_blocks(self) -> set[str]:
        """The blocks that the policy decides nothing about, since the profiled batch did not train them."""
        return {name for name, index in self.blocks if self.plans[index].kind == IDLE_KIND}

    def block_counts(self) -> Counter[str]:
        """How many calls of blocks get each action of a whole block; none of those with nothing to decide."""
        plans = (self.plans[index] for _, index in self.blocks)
        return Counter(plan.block_action.value for plan in plans if plan.kind != IDLE_KIND)

    def action_counts(self) -> Counter[str]:
        """How many activations of all blocks get each action."""
        counts: Counter[str] = Counter()
        for _, plan in self.blocks:
            counts.update(choice.action.value for _, choice in self.plans[plan].choices)
        return counts

    def _num_masks(self) -> int:
        """How many of the activations that all blocks compress are masks that become bits."""
        named = [choice.codec for _, plan in self.blocks for _, choice in self.plans[plan].choices if choice.codec]
        if not named:
            return 0
        from adacc_hf.kernels.codecs import MASK, codecs_suiting  # they need torch

        bits = codecs_suiting(MASK)
        return sum(name in bits for name in named)

    def summary(self) -> str:
        """One line for a log. Masks that become bits, at no loss, are counted apart from what is compressed."""
        counts, num_masks = self.action_counts(), self._num_masks()
        counts[Action.COMPRESS.value] -= num_masks
        actions = ", ".join(f"{counts[action.value]} {action.value}" for action in Action)
        num_checkpointed = self.block_counts()[BlockAction.CHECKPOINT.value]
        checkpointed = f" ({num_checkpointed} under torch's checkpoint)" if num_checkpointed else ""
        actions += f", {num_masks} mask{'' if num_masks == 1 else 's'} as bits" if num_masks else ""
        head = "" if self.head == "plain" else f", {self.head} head"
        num_blocks = len(num_calls(name for name, _ in self.blocks))
        again = "" if num_blocks == len(self.blocks) else f" called {len(self.blocks)} times"
        return (
            f"{num_blocks} block{'' if num_blocks == 1 else 's'}{again}{checkpointed}, {actions}{head}; "
            f"stored {format_bytes(self.predicted_stored_bytes)}, "
            f"peak {format_bytes(self.predicted_peak_bytes)}, overhead {self.predicted_overhead_ms:.2f} ms per step"
        )

    def __str__(self) -> str:
        lines = [f"Policy: {self.summary()}"]
        for index, plan in enumerate(self.plans):
            names = [name for name, plan_index in self.blocks if plan_index == index]
            lines.append(f"  plan {index}, kind {plan.kind[:12]}, {len(names)} blocks: {', '.join(names)}")
            lines += [f"    activation {value:3d}  {choice}" for value, choice in plan.choices]
        return "\n".join(lines)

    @classmethod
    def build(cls, profile: Profile, plans: Sequence[Plan], facts: dict[str, Any] | None = None) -> Policy:
        """The policy that gives `plans[i]` to the i-th block of `profile`, with its head and its predicted cost."""
        from adacc_hf.artifacts.memory_simulator import simulate

        different = list(dict.fromkeys(plans))
        outcome = simulate(profile, plans)
        return cls(
            plans=tuple(different),
            blocks=tuple(
                (block.name, different.index(plan)) for block, plan in zip(profile.blocks, plans, strict=True)
            ),
            predicted_stored_bytes=outcome.stored_bytes,
            predicted_peak_bytes=outcome.peak_bytes,
            predicted_overhead_ms=outcome.overhead_ms,
            head=profile.head,
            batch=profile.measured[0][0] if profile.measured else (),
            facts=tuple((facts or {}).items()),
        )

    @classmethod
    def uniform(cls, profile: Profile, action: Action | str, codec: str | None = None) -> Policy:
        """Give every activation `action`, where it can take it; else RETAIN.

        With RECOMPUTE, torch's checkpoint runs blocks that cannot be replayed, and what cannot be recomputed (a mask
        drawn from a generator of the user's own) is stored by a lossless codec where one was priced.
        With COMPRESS, `codec` picks the codec; None takes each activation's first priced one. Raises ValueError for a
        codec that was not priced for any activation.
        """
        action = Action.parse(action)
        if action is Action.COMPRESS and codec is not None:
            _check_priced(profile, codec)
        return cls.build(profile, [_uniform_plan(profile.kind_of(block), action, codec) for block in profile.blocks])

    @classmethod
    def checkpoint(cls, profile: Profile) -> Policy:
        """Have torch's checkpoint run every block that it may run; the others run plainly."""
        plans = [checkpoint_plan(kind) or plain_plan(kind) for kind in profile.kinds]
        return cls.build(profile, [plans[block.kind] for block in profile.blocks])

    @classmethod
    def random(
        cls,
        profile: Profile,
        seed: int,
        actions: Sequence[Action | str] = (Action.RETAIN, Action.RECOMPUTE),
        lossless: bool = False,
        whole_blocks: bool = False,
    ) -> Policy:
        """A random action out of `actions` for every activation of every block, each where it can take it.

        With `lossless`, COMPRESS takes lossless codecs only. With RECOMPUTE among the actions, torch's checkpoint runs
        half of the blocks that cannot be replayed, and, with `whole_blocks`, some of the others.
        """
        generator = random.Random(seed)
        allowed = [Action.parse(action) for action in actions]
        share = CHECKPOINTED_SHARE if whole_blocks else 0.0
        plans = [_random_plan(profile.kind_of(block), generator, allowed, lossless, share) for block in profile.blocks]
        return cls.build(profile, plans)

    def save(self, path: str | Path) -> None:
        """Write the policy as JSON, atomically."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "adacc_hf.policy",
            "version": FORMAT_VERSION,
            "predicted_stored_bytes": self.predicted_stored_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "predicted_overhead_ms": self.predicted_overhead_ms,
            "head": self.head,
            "batch": {name: list(size) for name, size in self.batch},
            "facts": dict(self.facts),
            "plans": [
                {
                    "kind": plan.kind,
                    "choices": {str(value): choice.to_json() for value, choice in plan.choices},
                    "is_checkpointed": plan.is_checkpointed,
                    "places": {str(value): list(place) for value, place in plan.places},
                }
                for plan in self.plans
            ],
            "blocks": dict(self.blocks),
        }

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Read what `save` wrote.

        Raises FileNotFoundError if there is no such file and PolicyMismatchError if it is not a whole policy file of
        this version.
        """
        return cls.from_json(read_json(path, PolicyMismatchError, "policy"), str(path))

    @classmethod
    def from_json(cls, record: Any, source: str) -> Policy:
        if not isinstance(record, dict) or record.get("format") != "adacc_hf.policy":
            raise PolicyMismatchError(f"{source} is not an adacc_hf policy file: solve a policy and save it again")
        if record.get("version") != FORMAT_VERSION:
            raise PolicyMismatchError(
                f"{source} has policy format version {record.get('version')!r}, this release reads {FORMAT_VERSION}: "
                f"solve the policy again"
            )
        try:
            return cls(
                plans=tuple(
                    Plan(
                        kind=plan["kind"],
                        choices=tuple((int(v), Choice.from_json(c)) for v, c in plan["choices"].items()),
                        is_checkpointed=bool(plan["is_checkpointed"]),
                        places=tuple((int(v), tuple(place)) for v, place in plan["places"].items()),
                    )
                    for plan in record["plans"]
                ),
                blocks=tuple(_checked_blocks(record)),
                predicted_stored_bytes=int(record["predicted_stored_bytes"]),
                predicted_peak_bytes=int(record["predicted_peak_bytes"]),
                predicted_overhead_ms=float(record["predicted_overhead_ms"]),
                head=_checked_head(record["head"]),
                batch=tuple((name, tuple(map(int, size))) for name, size in record.get("batch", {}).items()),
                facts=tuple(record["facts"].items()),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PolicyMismatchError(
                f"{source} is a damaged policy file ({type(error).__name__}: {error}): solve the policy again"
            ) from error


def _checked_head(name: str) -> str:
    if name not in HEADS:
        raise ValueError(f"head {name!r} is none of {', '.join(HEADS)}")
    return name


def _checked_blocks(record: dict[str, Any]) -> list[tuple[str, int]]:
    blocks = [(str(name), int(plan)) for name, plan in record["blocks"].items()]
    if any(not 0 <= plan < len(record["plans"]) for _, plan in blocks):
        raise ValueError("a block names a plan that is not in the file")
    return blocks


def _check_priced(profile: Profile, codec: str) -> None:
    values = [value for kind in profile.kinds for value in kind.values]
    priced = sorted({option.codec for value in values for option in value.codecs})
    if codec in priced:
        return
    names = ", ".join(priced) or "none"
    if any(codec in dict(value.too_coarse) for value in values):
        raise ValueError(
            f"codec={codec!r} would degrade gradients wherever it was tried, so that this profile has {names}: choose "
            f"one of these"
        )
    raise ValueError(
        f"codec={codec!r} was not priced in this profile, which has {names}: profile again with "
        f"AdaccConfig(codecs=({codec!r},))"
    )


def checkpoint_plan(kind: KindProfile, codecs: Mapping[int, Choice] | None = None) -> Plan | None:
    """Return the plan that checkpoints a block of `kind` and compresses its inputs as `codecs` says.

    None if the kind does not allow torch's checkpoint (`KindProfile.block_actions`).
    """
    if BlockAction.CHECKPOINT not in kind.block_actions:
        return None
    codecs = codecs or {}
    inputs = {value.index for value in kind.inputs}
    return Plan(
        kind=kind.digest,
        choices=tuple(
            (v.index, codecs.get(v.index, RETAIN) if v.index in inputs else RECOMPUTE) for v in kind.activations
        ),
        is_checkpointed=True,
        places=tuple((value, kind.values[value].place) for value in codecs),
    )


def plain_plan(kind: KindProfile) -> Plan:
    """Return the plan that leaves a block of `kind` untouched."""
    return Plan(kind=kind.digest, choices=tuple((value.index, RETAIN) for value in kind.activations))


def recompute_plan(kind: KindProfile) -> Plan:
    """Return the plan that recomputes all it can, or checkpoints a block that cannot be replayed."""
    return _uniform_plan(kind, Action.RECOMPUTE, None)


def _uniform_plan(kind: KindProfile, action: Action, codec: str | None) -> Plan:
    must_run_again = BlockAction.PLAIN not in kind.block_actions
    checkpointed = checkpoint_plan(kind)
    if checkpointed is not None and (must_run_again or (kind.untrusted and action is Action.RECOMPUTE)):
        return checkpointed

    def choose(value: Value) -> Choice:
        if action is Action.RECOMPUTE:
            lossless = [Choice.compress(option) for option in value.codecs if option.lossless]
            return RECOMPUTE if value.recomputable else next(iter(lossless), RETAIN)
        if action is Action.COMPRESS:
            options = [option for option in value.codecs if codec in (None, option.codec)]
            if options:
                return Choice.compress(options[0])
        return RETAIN

    return Plan(kind=kind.digest, choices=tuple((value.index, choose(value)) for value in kind.activations))


def _random_plan(
    kind: KindProfile, generator: random.Random, allowed: Sequence[Action], lossless: bool, share: float
) -> Plan:
    """A random plan; torch's checkpoint runs a `share` of the blocks that can be replayed."""
    checkpointed = checkpoint_plan(kind)
    if BlockAction.PLAIN not in kind.block_actions and checkpointed is not None:
        return checkpointed
    share = 0.5 if kind.untrusted else share
    if share and checkpointed is not None and Action.RECOMPUTE in allowed and generator.random() < share:
        return checkpointed
    choices, coded = {}, set()
    for value in kind.activations:
        options = [option for option in value.codecs if option.lossless or not lossless]
        menu = [RETAIN] if Action.RETAIN in allowed else []
        if Action.RECOMPUTE in allowed and value.recomputable:
            menu.append(RECOMPUTE)
        if Action.COMPRESS in allowed:
            menu += [Choice.compress(option) for option in options]
        choices[value.index] = generator.choice(menu) if menu else RETAIN
        if choices[value.index] in [Choice.compress(option) for option in options if not option.lossless]:
            coded.add(value.index)
    kept = [v for v in kind.index_values(coded) | kind.exactness_dependents_of(coded) if choices.get(v) == RECOMPUTE]
    return Plan(kind=kind.digest, choices=tuple((choices | dict.fromkeys(kept, RETAIN)).items()))


# The calls of a block in one step, by name.
#
# A model may call a block several times before backward: layers share their weights, or the loss calls the model
# twice.
# Each call has a name of its own, and so a plan: the first that of its block, the others "block#2", "block#3".


def call_name(block: str, number: int) -> str:
    """The name of the call of `block` with that number in a step, counted from 1."""
    return block if number == 1 else f"{block}#{number}"


def numbered(names: Iterable[str]) -> list[str]:
    """`names` told apart as calls are: the second "norm" is "norm#2"."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(call_name(name, seen[name]))
    return found


def block_of_call(name: str) -> str:
    """The block of a call with that name."""
    return split_call(name)[0]


def split_call(name: str) -> tuple[str, int]:
    """The block of a call and its number in a step, counted from 1."""
    block, mark, number = name.rpartition("#")
    return (block, int(number)) if mark and number.isdigit() else (name, 1)


def num_calls(names: Iterable[str]) -> dict[str, int]:
    """How often each block is called in a step that has calls with these `names`."""
    found: dict[str, int] = {}
    for name in names:
        block, number = split_call(name)
        found[block] = max(number, found.get(block, 0))
    return found
