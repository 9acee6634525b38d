"""A policy: one action for every activation of every block.

Blocks with the same actions share a `Plan`. A policy's file is JSON with a version and, for each plan, the digest of
the block's tape, so that it cannot be applied to another model.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.call_names import calls_per_block
from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.files import POLICY_FILE, from_labelled, labelled, policy_file, read_json, write_json
from adacc_hf.artifacts.tables import policy_tables
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.kernels._host_payloads import is_on_host

if TYPE_CHECKING:
    from adacc_hf.artifacts.kind_profile import CodecOption

FORMAT_VERSION = 5
HEADS = ("plain", "chunked")
IDLE_KIND = "idle"
"""Placeholder for the tape's digest in the plan of an idle block (`price/idle_blocks.py`), which has no actions."""

Place = tuple[int | str, ...]
"""Place of a tensor among the arguments of a call: the argument's position or name, then the keys into containers."""


class BlockAction(str, Enum):
    """Action on a whole block."""

    PLAIN = "plain"
    """Run the block unchanged: autograd keeps all saved tensors."""
    CHECKPOINT = "checkpoint"
    """Run the block under torch's checkpoint: store only the inputs, some of them compressed, and run the block again
    in backward."""
    REPLAY = "replay"
    """Apply an action to each activation of the block."""


class Action(str, Enum):
    """Action on an activation between forward and backward (R_{i,t} of the paper's equation 4)."""

    RETAIN = "retain"
    """Keep the tensor, as autograd does."""
    COMPRESS = "compress"
    """Keep a codec's payload in place of the tensor, and decode the payload in backward."""
    RECOMPUTE = "recompute"
    """Free the tensor in forward. When backward needs the tensor, replay the operators that compute the tensor."""

    @classmethod
    def parse(cls, name: str | Action) -> Action:
        """Return the action `name`. Raises ValueError, which lists the allowed actions, for an unknown name."""
        try:
            return cls(name)
        except ValueError:
            allowed = ", ".join(action.value for action in cls)
            raise ValueError(f"action={name!r} is unknown: choose from {allowed}") from None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The action for one activation, with the codec and its options if the action is COMPRESS."""

    action: Action
    codec: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.action.value if self.codec is None else f"{self.action.value}({self.codec})"

    @classmethod
    def compress(cls, option: CodecOption) -> Choice:
        return cls(action=Action.COMPRESS, codec=option.codec, options=option.options)


RETAIN = Choice(action=Action.RETAIN)
RECOMPUTE = Choice(action=Action.RECOMPUTE)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The actions of one block: one choice per activation, by value index. `kind` is the digest of the block's tape."""

    kind: str
    choices: tuple[tuple[int, Choice], ...]
    is_checkpointed: bool = False
    """True if torch's checkpoint runs the whole block. A checkpointed block retains or compresses only its inputs."""
    places: tuple[tuple[int, Place], ...] = ()
    """(value index, argument place) of each compressed input of a checkpointed block."""
    tiling: Tiling | None = None
    """Tiles in which modules of the block run, or None. With tiles, `kind` is the digest of the tape in tiles."""

    @property
    def is_idle(self) -> bool:
        """True if the block ran only without gradients when the model was profiled."""
        return self.kind == IDLE_KIND

    @property
    def is_plain(self) -> bool:
        """True if all activations are retained, and no module runs in tiles: the block runs unchanged."""
        return (
            not self.is_checkpointed
            and self.tiling is None
            and all(choice.action is Action.RETAIN for _, choice in self.choices)
        )

    @property
    def block_action(self) -> BlockAction:
        """Action that this plan implies for the block as a whole."""
        if self.is_checkpointed:
            return BlockAction.CHECKPOINT
        return BlockAction.PLAIN if self.is_plain else BlockAction.REPLAY

    def choice(self, value: int) -> Choice:
        return dict(self.choices)[value]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """An action for every activation of every block, with the predicted memory and time.

    `solve_policy`, the functions in `solve/simple_policies.py`, and `Policy.load` return policies.
    """

    plans: tuple[Plan, ...]
    """Distinct plans of this policy."""
    blocks: tuple[tuple[str, int], ...]
    """(name of the call, index of its plan) of each block call in a step, in forward order (`call_names.py`)."""
    predicted_stored_bytes: int
    """Bytes that forward stores for backward, embedding and head included. Each storage counts once."""
    predicted_peak_bytes: int
    """Peak of live tensor bytes in a training step: parameters, buffers, gradients, optimizer state if it exists,
    stored activations and temporaries."""
    predicted_overhead_ms: float
    """Time per micro-batch of replay, encoding and decoding (the paper's equation 4), and of a slower head."""
    predicted_host_bytes: int = 0
    """Peak of the bytes that a training step stores in host memory."""
    head: str = "plain"
    """Head, which runs the output layer and the loss: "plain", or "chunked" without whole logits."""
    batch: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), compare=False)
    """Names and sizes of the tensors of the batch that the predictions are for, or () if unknown."""
    facts: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    """Facts about the solver run, as JSON scalars: status, gap, seconds, budget, bytes stored by plain training."""

    def plan_of(self, block: str) -> Plan:
        return self.plans[dict(self.blocks)[block]]

    @property
    def is_plain(self) -> bool:
        """True if the policy changes nothing: the head is plain, and every block runs unchanged."""
        return self.head == "plain" and all(plan.is_plain for plan in self.plans)

    @cached_property
    def digest(self) -> str:
        """Hash of the head and of the actions of all blocks. Predicted memory and time are not included."""
        record = self.to_json()
        actions = {name: record[name] for name in ("head", "plans", "blocks")}
        return hashlib.sha256(json.dumps(actions, sort_keys=True).encode()).hexdigest()

    @property
    def idle_blocks(self) -> set[str]:
        """Names of blocks that ran only without gradients when the model was profiled."""
        return {name for name, index in self.blocks if self.plans[index].kind == IDLE_KIND}

    def block_counts(self) -> Counter[str]:
        """Return the number of block calls with each action on the whole block, without idle blocks."""
        plans = (self.plans[index] for _, index in self.blocks)
        return Counter(plan.block_action.value for plan in plans if plan.kind != IDLE_KIND)

    def action_counts(self) -> Counter[str]:
        """Return the number of activations with each action, over all block calls."""
        counts: Counter[str] = Counter()
        for _, plan in self.blocks:
            counts.update(choice.action.value for _, choice in self.plans[plan].choices)
        return counts

    def _codecs(self) -> list[str]:
        return [choice.codec for _, plan in self.blocks for _, choice in self.plans[plan].choices if choice.codec]

    @property
    def tilings(self) -> tuple[Tiling | None, ...]:
        """Tiles in which modules of each block call run, or None, in forward order."""
        return tuple(self.plans[plan].tiling for _, plan in self.blocks)

    def _num_masks(self) -> int:
        """Return the number of boolean masks that are stored as bits, over all block calls."""
        codecs = self._codecs()
        if not codecs:
            return 0
        from adacc_hf.kernels.codecs import MASK, codecs_suiting  # imported here, because codecs import torch

        mask_codecs = codecs_suiting(MASK)
        return sum(codec in mask_codecs for codec in codecs)

    def summary(self) -> str:
        """Return a summary in one line for a log: the actions, and the predicted memory and time."""
        host = f", {format_bytes(self.predicted_host_bytes)} in host memory" if self.predicted_host_bytes else ""
        return (
            f"{self.describe_actions()}; stored {format_bytes(self.predicted_stored_bytes)}{host}, "
            f"peak {format_bytes(self.predicted_peak_bytes)}, "
            f"overhead {self.predicted_overhead_ms:.2f} ms per micro-batch"
        )

    def describe_actions(self) -> str:
        """Return text with the number of blocks and activations for each action, and of masks as bits."""
        counts, num_masks = self.action_counts(), self._num_masks()
        counts[Action.COMPRESS.value] -= num_masks
        num_host = sum(map(is_on_host, self._codecs()))
        notes = {Action.COMPRESS: f" ({num_host} in host memory)"} if num_host else {}
        actions = ", ".join(f"{counts[action.value]} {action.value}{notes.get(action, '')}" for action in Action)
        num_checkpointed = self.block_counts()[BlockAction.CHECKPOINT.value]
        checkpointed = f" ({num_checkpointed} under torch's checkpoint)" if num_checkpointed else ""
        actions += f", {num_masks} mask{'' if num_masks == 1 else 's'} as bits" if num_masks else ""
        head = "" if self.head == "plain" else f", {self.head} head"
        numbers = [tiling.num_tiles for tiling in self.tilings if tiling is not None]
        tiles = f", {len(numbers)} blocks in up to {max(numbers)} tiles" if numbers else ""
        num_blocks = len(calls_per_block(name for name, _ in self.blocks))
        calls = "" if num_blocks == len(self.blocks) else f" called {len(self.blocks)} times"
        return f"{num_blocks} block{'' if num_blocks == 1 else 's'}{calls}{checkpointed}, {actions}{tiles}{head}"

    def describe(self) -> str:
        """Return the summary and, if recorded in `facts`, the bytes that plain training stores."""
        plain_bytes = dict(self.facts).get("plain_stored_bytes")
        plain = "" if plain_bytes is None else f"; plain training stores {format_bytes(plain_bytes)}"
        return f"{self.summary()}{plain}"

    def __repr__(self) -> str:
        return f"<Policy: {self.describe()}>"

    def _repr_markdown_(self) -> str:
        """Return the policy as a small table, which notebooks show."""
        return policy_tables(self.describe(), self)

    def save(self, path: str | Path) -> None:
        """Write the policy as JSON, atomically."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        return labelled(asdict(self), "policy", FORMAT_VERSION)

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Read a policy file, or the policy file in the folder of a run or checkpoint.

        Raises FileNotFoundError if the policy file does not exist, and PolicyMismatchError if the file is not a
        complete policy of this format version.
        """
        path = policy_file(path, (POLICY_FILE,))
        return cls.from_json(read_json(path, PolicyMismatchError, "policy"), str(path))

    @classmethod
    def from_json(cls, record: Any, source: str) -> Policy:
        return from_labelled(
            cls, record, "policy", FORMAT_VERSION, PolicyMismatchError, source=source, advice="solve the policy",
            check=lambda policy: (
                policy.head in HEADS and all(0 <= plan < len(policy.plans) for _, plan in policy.blocks)
            ),
        )  # fmt: skip
