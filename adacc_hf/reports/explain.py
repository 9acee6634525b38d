"""Explanation of a policy as text: the chosen action of each activation, and the cost of all other possible actions."""

from __future__ import annotations

from collections.abc import Iterator

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.exact_recompute_rules import walk_back
from adacc_hf.artifacts.kind_profile import CodecOption, KindProfile, Value
from adacc_hf.artifacts.plans import checkpoint_plan, plain_plan
from adacc_hf.artifacts.policy import IDLE_KIND, Action, BlockAction, Choice, Plan, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.tables import describe_names
from adacc_hf.artifacts.tiles import tile_rows
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.reports.text_table import table_lines

NOTHING_TO_DECIDE = (
    "nothing to decide: the profiled batch ran these blocks without gradients, so that they store nothing"
)

HEADERS = ("activation", "shape", "bytes", "action", "reason")


def activation_rows(kind: KindProfile, plan: Plan) -> list[tuple[str, ...]]:
    """Return one row of a report, with the columns of HEADERS, per activation of a block of `kind` under `plan`, in the
    order of the block's forward.

    Raises PolicyMismatchError if the profile has no cost for a codec that the plan uses.
    """
    choices = dict(plan.choices)
    try:
        chosen = {
            value: kind.codec_option(value, choice)
            for value, choice in choices.items()
            if choice.action is Action.COMPRESS
        }
    except ValueError as error:
        raise PolicyMismatchError(str(error)) from error
    exact_values = kind.exactness_dependents_of([value for value, option in chosen.items() if not option.lossless])
    rows: list[tuple[str, ...]] = []
    for value in kind.activations:
        choice, option = choices[value.index], chosen.get(value.index)
        replay = _replay_price(kind, choices, value)
        if value.index in exact_values:
            replay = "recompute: not allowed from values stored with loss"
        others = [_codec_price(value, other) for other in kind.codec_options(value.index) if other != option]
        others += [f"{codec}: no, the gradient error would be {error:.0%}" for codec, error in value.too_coarse]
        reasons = [replay, *others]
        if option is not None:
            reasons.insert(0, _codec_price(value, option))
        elif choice.action is Action.RETAIN:
            reasons.insert(0, "retain: frees nothing")
        elif plan.is_checkpointed:
            reasons = ["recompute: with the whole block"]
        shape = f"{value.dtype}{list(value.shape)}"
        rows.append((kind.names[value.index], shape, format_bytes(value.nbytes), str(choice), "; ".join(reasons)))
    return rows


def _codec_price(value: Value, option: CodecOption) -> str:
    ms, freed_bytes = option.encode_ms + option.decode_ms, format_bytes(value.nbytes - option.nbytes)
    host = f", {format_bytes(option.host_bytes)} in host memory" if option.host_bytes else ""
    return f"{option.codec}: {ms:.2f} ms for {freed_bytes}{host}, error {option.error:.3g}"


def check_belongs(policy: Policy, profile: Profile) -> None:
    """Raise PolicyMismatchError unless `policy` was solved from a profile of the same blocks as `profile`."""
    if len(policy.blocks) == len(profile.blocks):
        profile = _under(policy, profile)
    profile_blocks = [(block.name, profile.kind_of(block).digest) for block in profile.blocks]
    policy_blocks = [(name, policy.plans[plan].kind) for name, plan in policy.blocks]
    if policy_blocks == profile_blocks:
        return
    if len(policy_blocks) != len(profile_blocks):
        difference = f"the policy has {len(policy_blocks)} blocks, the profile {len(profile_blocks)}"
    else:
        (name, kind), (other_name, other_kind) = next(
            p for p in zip(policy_blocks, profile_blocks, strict=True) if p[0] != p[1]
        )
        difference = f"the policy has block {name} of kind {kind[:12]}, the profile {other_name} of {other_kind[:12]}"
    raise PolicyMismatchError(
        f"policy and profile do not belong together: {difference}: give the profile that the policy was solved from"
    )


def _under(policy: Policy, profile: Profile) -> Profile:
    """Return a copy of `profile` in which each block runs its modules in the tiles (groups of rows) that `policy` gives
    the block. The profile and the policy have the same number of blocks. Raises PolicyMismatchError if the policy sets
    tiles for a block that was not profiled in tiles."""
    try:
        return profile.under([policy.plans[index] for _, index in policy.blocks])
    except ValueError as error:
        raise PolicyMismatchError(str(error)) from None


def describe_plans(policy: Policy, profile: Profile) -> Iterator[tuple[str, list[str], list[tuple[str, ...]]]]:
    """Yield (names of the blocks as text, notes on a block as a whole, `activation_rows`) for each distinct plan of
    `policy`."""
    profile = _under(policy, profile)
    kinds = [profile.kind_of(block) for block in profile.blocks]
    names = [name for name, _ in policy.blocks]
    for index, plan in enumerate(policy.plans):
        members = [position for position, (_, plan_index) in enumerate(policy.blocks) if plan_index == index]
        kind = kinds[members[0]]
        title = f"{kind.block_class}: {describe_names(names, members)}"
        if plan.kind == IDLE_KIND:
            yield title, [NOTHING_TO_DECIDE], []
        else:
            yield title, describe_block(kind, plan), activation_rows(kind, plan)


def explain_policy(policy: Policy, profile: Profile) -> str:
    """Return the policy as text, with the name, shape, bytes, action and reason of every activation in every plan.

    Raises PolicyMismatchError if `policy` was not solved from `profile`.
    """
    check_belongs(policy, profile)
    lines = [f"Policy: {policy.summary()}", describe_head(policy, profile), *describe_host(policy, profile)]
    for title, notes, rows in describe_plans(policy, profile):
        lines += ["", title, *(f"  {note}" for note in notes)]
        lines += table_lines([HEADERS, *rows], right=(HEADERS.index("bytes"),)) if rows else []
    return "\n".join(lines)


def describe_host(policy: Policy, profile: Profile) -> list[str]:
    """Return a list with one sentence on the host memory that the policy uses, and on the bandwidth of copies.

    The list is empty if codec payloads must stay on the device.
    """
    link = next((kind.host_link for kind in profile.kinds if kind.host_link is not None), None)
    if link is None:
        return []
    limit = dict(policy.facts).get("host_limit_bytes")
    limit_text = "" if limit is None else f" of at most {format_bytes(limit)}"
    rates = [rate * 1e3 / 1e9 for rate in (link.to_host_bytes_per_ms, link.to_device_bytes_per_ms)]
    return [
        f"host memory: {format_bytes(policy.predicted_host_bytes)}{limit_text}; copies of {rates[0]:.1f} GB/s to the "
        f"host and {rates[1]:.1f} GB/s back"
    ]


def describe_head(policy: Policy, profile: Profile) -> str:
    """Return a sentence on the policy's head (output layer and loss), with the costs of all heads in the profile."""
    costs = {name: _head_cost(profile, name) for name in profile.heads}
    own_cost = f" ({costs.pop(policy.head)})" if policy.head in costs else ""
    others = "".join(f"; the {name} head would take {cost}" for name, cost in costs.items())
    return f"output layer and loss: {policy.head} head{own_cost}{others}"


def _head_cost(profile: Profile, name: str) -> str:
    """Return the cost of a head (output layer and loss) as text: live bytes in addition to the tensors of the blocks.
    If several heads were profiled, the text includes the time."""
    head_profile = profile.with_head(name)
    time = f"{head_profile.head_ms:.2f} ms, " if len(profile.heads) > 1 else ""
    live_bytes = max(head_profile.outside_peak_bytes, head_profile.loss_peak_bytes)
    return f"{time}{format_bytes(live_bytes)} in addition to what blocks store"


def describe_block(kind: KindProfile, plan: Plan) -> list[str]:
    """Return lines of text on a block as a whole.

    The lines give the cost of the block's action under `plan`, the cost of other possible actions, and reasons for slow
    or missing replay.
    """
    plans = {BlockAction.PLAIN: plain_plan(kind), BlockAction.CHECKPOINT: checkpoint_plan(kind)}
    others = {
        action: other for action in kind.block_actions if (other := plans[action]) and action != plan.block_action
    }
    costs = [
        _block_price(kind, action, block_plan) for action, block_plan in [(plan.block_action, plan), *others.items()]
    ]
    lines = ["; ".join(costs), *_describe_tiles(kind)]
    if kind.untrusted is not None:
        lines.append(
            f"no replay: blocks of this kind run plainly or under torch's checkpoint, because {kind.untrusted}"
        )
    return lines


def _describe_tiles(kind: KindProfile) -> list[str]:
    """Return a list with a sentence on the module that runs in tiles (some rows at a time), or [] without tiles."""
    tiles, tiling = kind.tiles, kind.tiling
    if tiles is None or tiling is None:
        return []
    number = tiling.num_tiles
    forward_bytes = max(module.forward_bytes(number) for module in tiles.modules)
    backward_bytes = max(module.backward_bytes(number) for module in tiles.modules)
    verb = "runs" if len(tiling.modules) == 1 else "run"
    return [
        f"{', '.join(tiling.modules)} {verb} in {number} tiles of {tile_rows(tiles.num_rows, number)} tokens, a second "
        f"time in backward: {kind.extra_ms:.2f} ms; a tile takes up to {format_bytes(forward_bytes)} in forward and "
        f"{format_bytes(backward_bytes)} in backward"
    ]


def _block_price(kind: KindProfile, action: BlockAction, plan: Plan) -> str:
    """Return the cost of an action on a whole block as text, such as "checkpoint: 3.20 ms, stores 1.2 MiB"."""
    outcome = run_block(kind, plan)
    host = f" and {format_bytes(outcome.host_bytes)} in host memory" if outcome.host_bytes else ""
    return f"{action.value}: {outcome.overhead_ms:.2f} ms, stores {format_bytes(outcome.stored_bytes)}{host}"


def _replay_price(kind: KindProfile, choices: dict[int, Choice], value: Value) -> str:
    """Return the time to recompute `value` from the values that the plan stores, as text. The time of an operator that
    two rows need is part of both, although the operator runs once."""

    def reads(index: int) -> tuple[int, ...] | None:
        source = kind.values[index]
        if source is not value and _is_stored_value(source, choices):
            return None
        if source.equal_to is not None:
            return (source.equal_to,)
        return () if source.producer is None else kind.operators[source.producer].inputs

    _, visited = walk_back([value.index], reads)
    recomputed = [kind.values[index] for index in visited if kind.values[index].equal_to is None]
    if any(v.producer is None or not v.recomputable or not kind.operators[v.producer].replayable for v in recomputed):
        return "recompute: not possible"
    ms = sum(kind.operators[index].ms for index in {v.producer for v in recomputed if v.producer is not None})
    source = "" if value.equal_to is None else f", taken from {kind.names[value.equal_to]}"
    return f"recompute: {ms:.2f} ms for {format_bytes(value.nbytes)}{source}"


def _is_stored_value(value: Value, choices: dict[int, Choice]) -> bool:
    """Return True if replay can read `value` without recomputing it. That is so if the plan's `choices` (actions by
    value) store it, if other blocks also hold it, or if it is the state of a random generator."""
    if value.shared is not None or value.is_generator_state:
        return True
    return value.index in choices and choices[value.index].action is not Action.RECOMPUTE
