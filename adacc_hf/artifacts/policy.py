"""A policy: one action for every activation of every block, as a frozen record that knows no torch.

A `Plan` holds the actions of one block; blocks that act alike share one. The file is JSON with a version and, per plan,
the digest of the tape that the actions belong to, so that a policy cannot be applied to another model.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.call_names import num_calls
from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.files import read_json, write_json
from adacc_hf.artifacts.units import format_bytes

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import CodecOption
    from adacc_hf.artifacts.size_model import Shapes

FORMAT_VERSION = 3
COMPILED_FORMAT = "adacc_hf.compiled_policy"
"""What the file of a policy for compiled graphs says it is; see `adacc_hf/compiler/compiled_policy.py`."""
HEADS = ("plain", "chunked")
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

    Made by `solve_policy`, by the functions of `solve/simple_policies.py`, and by `Policy.load`.
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
