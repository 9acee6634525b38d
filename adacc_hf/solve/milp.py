"""The choice of an action for every activation of one block, as a mixed-integer linear program (paper, section 3.3).

For a block of one kind, all variables binary:
  store[v, o]  activation v is stored as option o of its menu: as it is, or as one codec's payload
  run[j]       operator j is replayed in backward
  again[c]     torch's checkpoint runs the whole block, its inputs stored in the c-th way
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.exact_recompute_rules import walk_back
from adacc_hf.artifacts.plans import checkpoint_plan, plain_plan
from adacc_hf.artifacts.policy import (
    RECOMPUTE,
    RETAIN,
    Action,
    BlockAction,
    Choice,
    Plan,
)
from adacc_hf.solve.linear_program import LinearProgram

if TYPE_CHECKING:
    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.profile import KindProfile, Value


@dataclass(frozen=True)
class StoredForm:
    """One way to store an activation."""

    choice: Choice
    nbytes: int
    ms: float
    """Encode and decode time; 0 for the tensor itself."""
    is_lossless: bool = True


@dataclass(frozen=True)
class KindModel:
    """What the solver may do with one kind under a config."""

    whole: KindProfile
    """The kind as it was profiled."""
    kind: KindProfile
    """The kind in which no value repeats another, if replay is allowed: one that would is taken from the other."""
    menus: Mapping[int, tuple[StoredForm, ...]]
    """The ways to store each activation, RETAIN first; none of a block that only torch's checkpoint may run."""
    runnable: frozenset[int]
    """Operators that can be replayed: their inputs can all be stored or recomputed."""
    index_values: frozenset[int] = frozenset()
    """Indices that a codec's error could make others, which are stored if they are needed."""
    checkpoints: tuple[PricedPlan, ...] = ()
    """What torch's checkpoint of the whole block costs, with its inputs stored in each way."""

    @cached_property
    def total_ms(self) -> float:
        """Sum of all operators' and codecs' times: a scale for the objective."""
        runs = sum(operator.ms for operator in self.kind.operators)
        codecs = sum(store.ms for menu in self.menus.values() for store in menu)
        return runs + codecs + sum(plan.ms for plan in self.checkpoints)

    def recompute(self, value: int) -> int | None:
        """The operator whose replay makes `value`, or None if none may."""
        record = self.kind.values[value]
        may_be = record.recomputable and value not in self.index_values
        return record.producer if may_be and record.producer in self.runnable else None

    def is_lossy(self, value: int, choice: Choice) -> bool:
        """Whether `choice` stores the value with loss."""
        if choice.action is not Action.COMPRESS:
            return False
        return any(store.choice == choice and not store.is_lossless for store in self.menus[value])


@dataclass(frozen=True, eq=False)
class PricedPlan:
    """One plan for a block of a kind, with its price in whole bytes. Compared by identity, which is quick to hash."""

    plan: Plan
    nbytes: int
    """Bytes it stores, shared tensors left out."""
    shared: frozenset[int]
    """Shared tensors that its replay reads."""
    ms: float


def build_block_model(kind: KindProfile, config: AdaccConfig) -> KindModel:
    """The actions that `config` allows on `kind`."""
    whole = kind
    if Action.RECOMPUTE in config.parsed_actions:
        kind = whole.merged(whole.equal)
    may_be_plain = BlockAction.PLAIN in kind.block_actions
    menus = {
        value.index: (StoredForm(RETAIN, value.nbytes, 0.0), *_codec_stores(value, config)) if may_be_plain else ()
        for value in kind.activations
    }
    kept = kind.index_values(lossy_values(menus))
    runnable: set[int] = set()
    if Action.RECOMPUTE in config.parsed_actions:
        for operator in kind.operators:
            available = (_is_available(kind.values[value], menus, runnable, kept) for value in operator.inputs)
            if operator.replayable and all(available):
                runnable.add(operator.index)
    return KindModel(whole, kind, menus, frozenset(runnable), kept, tuple(_checkpoints(whole, config)))


MOST_CODED_INPUTS = 3
"""Inputs of a block whose codecs are all combined, where torch's checkpoint runs it; the smaller ones are retained."""


def _checkpoints(kind: KindProfile, config: AdaccConfig) -> list[PricedPlan]:
    """The ways to have torch's checkpoint run a block of `kind`: none if nothing may be recomputed."""
    if checkpoint_plan(kind) is None or not kind.slots:
        return []
    if Action.RECOMPUTE not in config.parsed_actions and BlockAction.PLAIN in kind.block_actions:
        return []
    coded = [value for value in sorted(kind.inputs, key=lambda v: -v.nbytes) if value.place][:MOST_CODED_INPUTS]
    menus = [
        [None, *(form for form in _codec_stores(value, config) if form.is_lossless or kind.bears_coded_inputs)]
        for value in coded
    ]
    found = []
    for forms in product(*menus):
        chosen = zip(coded, forms, strict=True)
        plan = checkpoint_plan(kind, {value.index: form.choice for value, form in chosen if form is not None})
        assert plan is not None  # there was one without codecs
        outcome = run_block(kind, plan)
        found.append(PricedPlan(plan, outcome.stored_bytes, outcome.shared, outcome.overhead_ms))
    return found


def lossy_values(menus: Mapping[int, Sequence[StoredForm]]) -> set[int]:
    """The values that may be stored with loss."""
    return {value for value, menu in menus.items() if any(not store.is_lossless for store in menu)}


def _codec_stores(value: Value, config: AdaccConfig) -> list[StoredForm]:
    """The codecs that `config` allows for `value`: lossless ones always, since they change nothing."""
    lossy = Action.COMPRESS in config.parsed_actions
    return [
        StoredForm(Choice.compress(option), option.nbytes, option.encode_ms + option.decode_ms, option.lossless)
        for option in value.codecs
        if (option.lossless or (lossy and (config.codecs is None or option.codec in config.codecs)))
        and (config.max_error is None or option.error <= config.max_error)
        and option.nbytes < value.nbytes
    ]


def _is_available(value: Value, menus: Mapping[int, Any], runnable: set[int], kept: Collection[int]) -> bool:
    """Whether a replayed operator can read `value`, given the operators before it that can be replayed."""
    can_be_recomputed = value.recomputable and value.producer in runnable and value.index not in kept
    return _is_at_hand(value) or value.index in menus or can_be_recomputed


def _is_at_hand(value: Value) -> bool:
    """Whether a replay can read `value` whatever is chosen for activations: others hold it, or it is stored for the
    replay alone, as the state is of the generator that it draws from."""
    return value.shared is not None or value.is_generator_state


def price(model: KindModel, choices: Mapping[int, Choice]) -> PricedPlan:
    """The plan with these choices; what nobody reads is neither replayed nor stored.

    A block input that autograd does not save costs bytes only if a replay reads it, and so does a generator's state.
    Activations that repeat another are recomputed. What no replay may make beside what is stored with loss is retained.
    Of a block that must not run plainly there are no choices: torch's checkpoint runs it.
    """
    if BlockAction.PLAIN not in model.whole.block_actions:
        return model.checkpoints[0]
    choices = {v.index: choices[v.index] if v.index in model.menus else RECOMPUTE for v in model.whole.activations}
    coded = [value for value, choice in choices.items() if model.is_lossy(value, choice)]
    choices |= {value: RETAIN for value in model.kind.exactness_dependents_of(coded) if choices[value] == RECOMPUTE}
    values = model.kind.values
    runs: set[int] = set()

    def reads(value: int) -> tuple[int, ...] | None:
        if _is_at_hand(values[value]) or choices.get(value, RECOMPUTE) != RECOMPUTE:
            return None
        operator = model.recompute(value)
        assert operator is not None, f"the program lets value {value} be recomputed, which cannot be"
        runs.add(operator)
        return model.kind.operators[operator].inputs

    wanted = [value.index for value in model.kind.activations if value.saved and choices[value.index] == RECOMPUTE]
    read, _ = walk_back(wanted, reads)
    kept = [v.index for v in model.kind.activations if choices[v.index] != RECOMPUTE and (v.saved or v.index in read)]
    drawn_from = [value for value in read if values[value].is_generator_state]
    stores = [next(store for store in model.menus[v] if store.choice == choices[v]) for v in kept]
    return PricedPlan(
        plan=Plan(kind=model.kind.digest, choices=tuple(choices.items())),
        nbytes=sum(store.nbytes for store in stores) + sum(values[v].nbytes for v in drawn_from),
        shared=frozenset(shared for v in read if (shared := values[v].shared) is not None),
        ms=sum(model.kind.operators[j].ms for j in runs) + sum(store.ms for store in stores),
    )


class BlockVariables:
    """The variables and constraints of one block of `model` inside `program`."""

    def __init__(self, program: LinearProgram, model: KindModel) -> None:
        self.model = model
        self.store = {
            (value, option): program.variable() for value, menu in model.menus.items() for option in range(len(menu))
        }
        self.run = {j: program.variable() for j in sorted(model.runnable)}
        self.again = [program.variable() for _ in model.checkpoints]
        self._constrain(program)

    def _constrain(self, program: LinearProgram) -> None:
        # [Once] an activation is stored in at most one way (equation 5).
        for value, menu in self.model.menus.items():
            if len(menu) > 1:
                program.constrain(self._stored(value), high=1.0)
        # [Available] what autograd saved is stored, or its producer runs again (equations 5 and 6), or the whole block.
        again = [(variable, 1.0) for variable in self.again]
        for activation in self.model.kind.activations:
            if activation.saved:
                made = [*self._stored(activation.index), *self._recomputed(activation.index)]
                program.constrain([*made, *again], low=1.0)
        # [Dependency] a replayed operator has its inputs; for what autograd saved, [Available] says so already.
        for j, run in self.run.items():
            for value in self._unsaved_inputs(j):
                program.constrain([*self._stored(value), *self._recomputed(value), (run, -1.0)], low=0.0)
        # [Fragile] what no replay may make where another one is stored with loss is stored then.
        for value, others in self.model.kind.exactness_dependents.items():
            for other in others if self._recomputed(value) else ():
                lossy = [
                    (self.store[other, o], -1.0) for o, s in enumerate(self.model.menus[other]) if not s.is_lossless
                ]
                if lossy:
                    program.constrain([*self._stored(value), *lossy], low=0.0)

    def _stored(self, value: int) -> list[tuple[int, float]]:
        return [(self.store[value, option], 1.0) for option in range(len(self.model.menus.get(value, ())))]

    def _recomputed(self, value: int) -> list[tuple[int, float]]:
        operator = self.model.recompute(value)
        return [] if operator is None else [(self.run[operator], 1.0)]

    def _unsaved_inputs(self, operator: int) -> list[int]:
        values = self.model.kind.values
        inputs = dict.fromkeys(self.model.kind.operators[operator].inputs)
        return [v for v in inputs if not _is_at_hand(values[v]) and not (values[v].activation and values[v].saved)]

    def shared_readers(self) -> list[tuple[int, int]]:
        """Pairs of a shared tensor and the variable of what reads it: an operator, or the whole block."""
        values = self.model.kind.values
        inputs = [(v, run) for j, run in self.run.items() for v in dict.fromkeys(self.model.kind.operators[j].inputs)]
        read = [(shared, run) for v, run in inputs if (shared := values[v].shared) is not None]
        plans = zip(self.model.checkpoints, self.again, strict=True)
        return read + [(shared, variable) for plan, variable in plans for shared in plan.shared]

    def terms_ms(self, weight: float = 1.0) -> list[tuple[int, float]]:
        """Replay, encoding and decoding, in ms (equation 4), times `weight`."""
        runs = [(run, weight * self.model.kind.operators[j].ms) for j, run in self.run.items()]
        runs += [(x, weight * plan.ms) for plan, x in zip(self.model.checkpoints, self.again, strict=True)]
        return runs + [(x, weight * self.model.menus[v][o].ms) for (v, o), x in self.store.items()]

    def terms_bytes(self, weight: float = 1) -> list[tuple[int, float]]:
        """What is stored, in bytes (equation 8), times `weight`: activations, and states that replay draws from."""
        values, operators = self.model.kind.values, self.model.kind.operators
        states = [(values[v], run) for j, run in self.run.items() for v in operators[j].inputs]
        drawn = [(run, weight * value.nbytes) for value, run in states if value.is_generator_state]
        drawn += [(x, weight * plan.nbytes) for plan, x in zip(self.model.checkpoints, self.again, strict=True)]
        return drawn + [(x, weight * self.model.menus[v][o].nbytes) for (v, o), x in self.store.items()]

    def column(self, solution: Sequence[float]) -> PricedPlan:
        """The plan that the solved variables mean, rounded to integers and priced anew."""
        for plan, variable in zip(self.model.checkpoints, self.again, strict=True):
            if solution[variable] > 0.5:
                return plan
        choices = {}
        for value, menu in self.model.menus.items():
            taken = [store.choice for o, store in enumerate(menu) if solution[self.store[value, o]] > 0.5]
            choices[value] = taken[0] if taken else RECOMPUTE
        for activation in self.model.kind.activations:
            # A block input that nothing needs is not stored under any action; it cannot be RECOMPUTE.
            if not activation.saved and choices[activation.index] == RECOMPUTE:
                choices[activation.index] = RETAIN
        return price(self.model, choices)


def retain_all(model: KindModel) -> PricedPlan:
    """The plan that leaves the block untouched, values that repeat others included.

    Where a block must not run plainly, it is torch's checkpoint.
    """
    if BlockAction.PLAIN not in model.whole.block_actions:
        return model.checkpoints[0]
    return PricedPlan(
        plan=plain_plan(model.whole),
        nbytes=sum(value.nbytes for value in model.whole.activations if value.saved),
        shared=frozenset(),
        ms=0.0,
    )
