"""Why each activation gets its action: what a plan does with it and what every other action would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.exact_recompute_rules import walk_back
from adacc_hf.artifacts.plans import checkpoint_plan, plain_plan
from adacc_hf.artifacts.policy import (
    IDLE_KIND,
    Action,
    BlockAction,
    Choice,
    Plan,
    Policy,
)
from adacc_hf.artifacts.profile import CodecOption, KindProfile, Profile, Value
from adacc_hf.artifacts.units import format_bytes

NOTHING_TO_DECIDE = (
    "nothing to decide: the profiled batch ran these blocks without gradients, so that they store nothing"
)


@dataclass(frozen=True, kw_only=True)
class ActivationRow:
    """One activation under one plan, with the price of every action it could take."""

    value: Value
    label: str
    """The value's name, numbered where the block has several of that name."""
    choice: Choice
    option: CodecOption | None
    """The codec it is compressed with."""
    replay_ms: float | None
    """Time to recompute it from what the plan stores; None if it cannot be replayed. Operators that two rows need count
    in both, though they run once."""
    twin: str | None = None
    """The label of the activation that it repeats, and is taken from where it is recomputed."""
    is_decided: bool = False
    """Whether it follows from what the plan stores with loss, and no replay may make it of that."""
    is_checkpointed: bool = False
    """Whether torch's checkpoint runs the whole block."""

    @property
    def reason(self) -> str:
        """The chosen action with its cost and the bytes that it frees, then the other possible ones."""
        others = [self._codec_price(option) for option in self.value.codecs if option != self.option]
        others += [f"{codec}: no, a gradient would be {error:.0%} off" for codec, error in self.value.too_coarse]
        if self.is_checkpointed and self.choice.action is Action.RECOMPUTE:
            return "recompute: with the whole block"
        if self.choice.action is Action.RETAIN:
            return "; ".join(["retain: frees nothing", self._replay_price(), *others])
        if self.option is None:
            return "; ".join([self._replay_price(), *others])
        return "; ".join([self._codec_price(self.option), self._replay_price(), *others])

    def _replay_price(self) -> str:
        if self.is_decided:
            return "recompute: not from what is stored with loss"
        if self.replay_ms is None:
            return "recompute: not possible"
        same = "" if self.twin is None else f", taken from {self.twin}"
        return f"recompute: {self.replay_ms:.2f} ms for {format_bytes(self.value.nbytes)}{same}"

    def _codec_price(self, option: CodecOption) -> str:
        freed = format_bytes(self.value.nbytes - option.nbytes)
        return f"{option.codec}: {option.encode_ms + option.decode_ms:.2f} ms for {freed}, error {option.error:.3g}"


def activation_rows(kind: KindProfile, plan: Plan) -> list[ActivationRow]:
    """One row per activation of `kind`, in the order in which the block makes them."""
    choices = dict(plan.choices)
    options = {value.index: _chosen_option(value, choices[value.index]) for value in kind.activations}
    coded = [value for value, option in options.items() if option is not None and not option.lossless]
    index_values = kind.index_values(coded) | kind.exactness_dependents_of(coded)
    return [
        ActivationRow(
            value=value,
            label=kind.names[value.index],
            choice=choices[value.index],
            option=options[value.index],
            replay_ms=_replay_ms(kind, choices, value),
            twin=None if value.equal_to is None else kind.names[value.equal_to],
            is_decided=value.index in index_values,
            is_checkpointed=plan.is_checkpointed,
        )
        for value in kind.activations
    ]


def check_belongs(policy: Policy, profile: Profile) -> None:
    """Raise PolicyMismatchError unless `policy` was made from a profile of the same blocks as `profile`."""
    expected = [(block.name, profile.kind_of(block).digest) for block in profile.blocks]
    given = [(name, policy.plans[plan].kind) for name, plan in policy.blocks]
    if given == expected:
        return
    if len(given) != len(expected):
        difference = f"the policy has {len(given)} blocks, the profile {len(expected)}"
    else:
        (name, kind), (other_name, other_kind) = next(p for p in zip(given, expected, strict=True) if p[0] != p[1])
        difference = f"the policy has block {name} of kind {kind[:12]}, the profile {other_name} of {other_kind[:12]}"
    raise PolicyMismatchError(
        f"policy and profile do not belong together: {difference}; give the profile that the policy was solved from"
    )


def plan_groups(policy: Policy, profile: Profile) -> list[tuple[str, KindProfile, Plan]]:
    """The different plans of `policy`, each with the blocks that follow it in words, and its kind."""
    kinds = [profile.kind_of(block) for block in profile.blocks]
    names = [name for name, _ in policy.blocks]
    groups = []
    for index, plan in enumerate(policy.plans):
        members = [position for position, (_, plan_index) in enumerate(policy.blocks) if plan_index == index]
        groups.append((_in_runs(names, members), kinds[members[0]], plan))
    return groups


def explain_policy(policy: Policy, profile: Profile) -> str:
    """The policy as text: for every activation of every plan its name, shape, bytes, action and reason."""
    check_belongs(policy, profile)
    lines = [f"Policy: {policy.summary()}", describe_head(policy, profile)]
    for blocks, kind, plan in plan_groups(policy, profile):
        cells = [("activation", "shape", "bytes", "action", "reason")]
        cells += [
            (
                row.label,
                format_shape(row.value),
                format_bytes(row.value.nbytes),
                str(row.choice),
                row.reason,
            )
            for row in activation_rows(kind, plan)
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines += ["", f"{kind.block_class}, {blocks}"]
        if plan.kind == IDLE_KIND:
            lines.append(f"  {NOTHING_TO_DECIDE}")
            continue
        lines += [f"  {note}" for note in describe_block(kind, plan)]
        lines += [_aligned(line, widths) for line in cells]
    return "\n".join(lines)


def describe_head(policy: Policy, profile: Profile) -> str:
    """The head that `policy` chose, with what each one that was profiled costs: its time, and the peak it makes."""
    costs = []
    for name in profile.heads:
        with_it = profile.with_head(name)
        time = f"{with_it.head_ms:.2f} ms, " if len(profile.heads) > 1 else ""
        live = format_bytes(max(with_it.outside_peak_bytes, with_it.loss_peak_bytes))
        costs.append(f"{name}: {time}{live} live besides what blocks store")
    return f"{policy.head} head; " + "; ".join(costs)


def describe_block(kind: KindProfile, plan: Plan) -> list[str]:
    """Return what a block of a kind does as a whole under `plan`, what else it could do, and what its calls cost."""
    plans = {BlockAction.PLAIN: plain_plan(kind), BlockAction.CHECKPOINT: checkpoint_plan(kind)}
    others = {
        action: other for action in kind.block_actions if (other := plans[action]) and action != plan.block_action
    }
    costs = [_block_price(kind, action, each) for action, each in [(plan.block_action, plan), *others.items()]]
    return ["; ".join(costs), *describe_calls(kind)]


def describe_calls(kind: KindProfile) -> list[str]:
    """Return a line for each reason why blocks of a kind are not replayed, or at a price for each call."""
    if kind.untrusted is not None:
        return [f"no replay: such a block runs plainly or under torch's checkpoint, since {kind.untrusted}"]
    if kind.untraced is not None:
        return [f"compared with its tape at each call (some 10 us an operator), since Dynamo stops at: {kind.untraced}"]
    return []


def _block_price(kind: KindProfile, action: BlockAction, plan: Plan) -> str:
    """ "checkpoint: 3.20 ms, stores 1.2 MiB"."""
    outcome = run_block(kind, plan)
    return f"{action.value}: {outcome.overhead_ms:.2f} ms, stores {format_bytes(outcome.stored_bytes)}"


def format_shape(value: Value) -> str:
    """ "float32[8, 256, 1024]"."""
    return f"{value.dtype.removeprefix('torch.')}{list(value.shape)}"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, shape, nbytes, action, reason = cells
    return f"  {name:{widths[0]}}  {shape:{widths[1]}}  {nbytes:>{widths[2]}}  {action:{widths[3]}}  {reason}"


def _chosen_option(value: Value, choice: Choice) -> CodecOption | None:
    if choice.action is not Action.COMPRESS:
        return None
    for option in value.codecs:
        if (option.codec, option.options) == (choice.codec, choice.options):
            return option
    raise PolicyMismatchError(
        f"the profile has no price for codec {choice.codec!r} with {dict(choice.options)} on activation {value.index} "
        f"({value.name}): give the profile that the policy was solved from"
    )


def _replay_ms(kind: KindProfile, choices: dict[int, Choice], value: Value) -> float | None:
    """Time of the operators between `value` and what the plan stores, `value` itself taken as not stored."""

    def reads(index: int) -> tuple[int, ...] | None:
        missing = kind.values[index]
        if missing is not value and _is_stored(missing, choices):
            return None
        if missing.equal_to is not None:
            return (missing.equal_to,)
        return () if missing.producer is None else kind.operators[missing.producer].inputs

    _, passed = walk_back([value.index], reads)
    recomputed = [kind.values[index] for index in passed if kind.values[index].equal_to is None]
    if any(v.producer is None or not v.recomputable or not kind.operators[v.producer].replayable for v in recomputed):
        return None
    return sum(kind.operators[index].ms for index in {v.producer for v in recomputed if v.producer is not None})


def _is_stored(value: Value, choices: dict[int, Choice]) -> bool:
    if value.shared is not None or value.is_generator_state:
        return True
    return value.index in choices and choices[value.index].action is not Action.RECOMPUTE


def _in_runs(names: Sequence[str], positions: Sequence[int]) -> str:
    """`positions` of `names`, neighbours drawn together: "h.0 to h.4 (5 blocks), h.7"."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][-1] + 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    words = [
        names[run[0]] if len(run) == 1 else f"{names[run[0]]} to {names[run[-1]]} ({len(run)} blocks)" for run in runs
    ]
    return ", ".join(words)
