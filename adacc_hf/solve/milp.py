"""Mixed-integer linear program that chooses an action for every activation of one block (paper, section 3.3).

Variables of a block of one kind, all binary:
  store[v, o]    activation v is stored in option o of its menu: unencoded, or as one codec's payload
  run[j]         operator j is replayed in backward
  checkpoint[c]  torch's checkpoint runs the whole block, with its inputs stored in the c-th way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.plans import checkpoint_plan, plain_plan
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Action, BlockAction, Choice, Plan
from adacc_hf.kernels._host_payloads import encoding_of
from adacc_hf.solve.linear_program import LinearProgram

if TYPE_CHECKING:
    from adacc_hf.artifacts.block_walk import BlockOutcome
    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.kind_profile import KindProfile, Value


@dataclass(frozen=True)
class StoredForm:
    """Form in which an activation can be stored: the tensor itself, or the payload of one codec."""

    choice: Choice
    nbytes: int
    ms: float
    """Sum of encode and decode time, or 0 for the tensor itself."""
    is_lossless: bool = True
    host_bytes: int = 0
    """Payload bytes in host memory."""


@dataclass(frozen=True)
class KindModel:
    """Input of the integer program for one kind of block: the allowed actions on activations, with costs."""

    profiled_kind: KindProfile
    """Kind of block as profiled, before merging values with equal bits."""
    kind: KindProfile
    """Kind of block after merging values with equal bits. Equal to `profiled_kind` if recomputation is not allowed."""
    menus: Mapping[int, tuple[StoredForm, ...]]
    """Forms in which each activation can be stored, RETAIN first, by value index. The mapping is empty if torch's
    checkpoint must run the block."""
    runnable: frozenset[int]
    """Numbers of the operators that can be replayed, because all their inputs can be stored or recomputed."""
    checkpoints: tuple[PricedPlan, ...] = ()
    """Plans in which torch's checkpoint runs the whole block, one for each way to store its inputs."""

    @cached_property
    def total_ms(self) -> float:
        """Sum of the times of all operators, codecs and checkpoints, to scale the objective."""
        runs = sum(operator.ms for operator in self.kind.operators)
        codecs = sum(store.ms for menu in self.menus.values() for store in menu)
        return runs + codecs + sum(plan.ms for plan in self.checkpoints)

    def recompute(self, value: int) -> int | None:
        """Return the operator whose replay computes `value`, or None if `value` must not be recomputed."""
        record = self.kind.values[value]
        return record.producer if record.recomputable and record.producer in self.runnable else None


@dataclass(frozen=True, eq=False)
class PricedPlan:
    """Plan for one block, with the block's simulated memory and time. Compared by identity, for speed."""

    plan: Plan
    outcome: BlockOutcome

    @classmethod
    def of(cls, kind: KindProfile, plan: Plan) -> PricedPlan:
        return cls(plan, run_block(kind, plan))

    @property
    def nbytes(self) -> int:
        """Bytes that the block stores, without tensors that several blocks share."""
        return self.outcome.stored_bytes

    @property
    def ms(self) -> float:
        """Time of replay, encoding and decoding in ms."""
        return self.outcome.overhead_ms


def build_block_model(kind: KindProfile, config: AdaccConfig) -> KindModel:
    """Build the solver's model of a kind of block: the actions that `config` allows on the activations, with costs."""
    profiled_kind = kind
    if Action.RECOMPUTE in config.parsed_actions:
        kind = profiled_kind.with_merged_values(profiled_kind.equal)
    may_be_plain = BlockAction.PLAIN in kind.block_actions
    menus = {
        value.index: (StoredForm(RETAIN, value.nbytes, 0.0), *_codec_forms(kind, value, config)) if may_be_plain else ()
        for value in kind.activations
    }
    runnable: set[int] = set()
    if Action.RECOMPUTE in config.parsed_actions:
        for operator in kind.operators:
            inputs = [kind.values[value] for value in operator.inputs]
            if operator.replayable and all(
                _is_always_readable(v) or v.index in menus or (v.recomputable and v.producer in runnable)
                for v in inputs
            ):
                runnable.add(operator.index)
    checkpoints = tuple(_checkpoint_plans(profiled_kind, config))
    return KindModel(profiled_kind, kind, menus, frozenset(runnable), checkpoints)


MAX_CODED_INPUTS = 3
"""Maximum number of inputs of a checkpointed block for which codecs are tried, the largest first. All other inputs are
stored as they are."""


def _checkpoint_plans(kind: KindProfile, config: AdaccConfig) -> list[PricedPlan]:
    """Return the plans in which torch's checkpoint runs a block of `kind`, or [] if recomputation is not allowed."""
    if checkpoint_plan(kind) is None or not kind.slots:
        return []
    if Action.RECOMPUTE not in config.parsed_actions and BlockAction.PLAIN in kind.block_actions:
        return []
    coded_inputs = [v for v in sorted(kind.inputs, key=lambda v: -v.nbytes) if v.place][:MAX_CODED_INPUTS]
    menus = [
        [None, *(form for form in _codec_forms(kind, value, config) if form.is_lossless or kind.allows_lossy_inputs)]
        for value in coded_inputs
    ]
    plans = []
    for forms in product(*menus):
        pairs = zip(coded_inputs, forms, strict=True)
        plan = checkpoint_plan(kind, {value.index: form.choice for value, form in pairs if form is not None})
        assert plan is not None  # because there is a plan without codecs
        plans.append(PricedPlan.of(kind, plan))
    return [plan for plan in plans if _fits_host_memory(kind, plan.outcome.host_bytes)]


def _fits_host_memory(kind: KindProfile, host_bytes: int) -> bool:
    """Return True if a block of `kind` may store `host_bytes` of payloads in host memory."""
    limit = None if kind.host_link is None else kind.host_link.limit_bytes
    return limit is None or host_bytes <= limit


def _codec_forms(kind: KindProfile, value: Value, config: AdaccConfig) -> list[StoredForm]:
    """Return the encoded forms in which `config` allows `value` to be stored, one per codec. Lossless codecs are always
    allowed. Codecs in host memory are allowed only if `config` sets a limit on host memory."""
    allows_lossy = Action.COMPRESS in config.parsed_actions
    return [
        StoredForm(
            Choice.compress(option),
            option.nbytes,
            option.encode_ms + option.decode_ms,
            option.lossless,
            option.host_bytes,
        )
        for option in kind.codec_options(value.index)
        if (option.lossless or (allows_lossy and (config.codecs is None or encoding_of(option.codec) in config.codecs)))
        and (config.host_memory is not None or not option.host_bytes)
        and _fits_host_memory(kind, option.host_bytes)
        and (config.max_error is None or option.error <= config.max_error)
        and option.nbytes < value.nbytes
    ]


def _is_always_readable(value: Value) -> bool:
    """Return True if a replay can read `value` whatever the choices for the activations. Such values are tensors that
    several blocks share, and states of random generators, which are stored for the replay."""
    return value.shared is not None or value.is_generator_state


def plan_with(model: KindModel, choices: Mapping[int, Choice]) -> PricedPlan:
    """Return the plan with `choices`.

    Activations with the same bits as an earlier activation are recomputed. Activations that must not be recomputed from
    a lossily stored value are retained. If torch's checkpoint must run the block, `choices` are ignored.
    """
    kind = model.profiled_kind
    if BlockAction.PLAIN not in kind.block_actions:
        return model.checkpoints[0]
    choices = {v.index: choices[v.index] if v.index in model.menus else RECOMPUTE for v in kind.activations}
    lossy = [v for v, menu in model.menus.items() if any(s.choice == choices[v] and not s.is_lossless for s in menu)]
    choices |= {value: RETAIN for value in model.kind.exactness_dependents_of(lossy) if choices[value] == RECOMPUTE}
    return PricedPlan.of(kind, Plan(kind=kind.digest, choices=tuple(choices.items()), tiling=kind.tiling))


class BlockVariables:
    """Variables and constraints of one block in the integer program."""

    def __init__(self, program: LinearProgram, model: KindModel) -> None:
        self.model = model
        self.store = {
            (value, option): program.variable() for value, menu in model.menus.items() for option in range(len(menu))
        }
        self.run = {j: program.variable() for j in sorted(model.runnable)}
        self.checkpoint = [program.variable() for _ in model.checkpoints]
        self._constrain(program)

    def _constrain(self, program: LinearProgram) -> None:
        # [Once] an activation is stored in at most one way (equation 5).
        for value, menu in self.model.menus.items():
            if len(menu) > 1:
                program.constrain(self._stored(value), high=1.0)
        # [Available] an activation that autograd saved is stored, or its producer is replayed (equations 5 and 6), or
        # the whole block is checkpointed.
        checkpoint = [(variable, 1.0) for variable in self.checkpoint]
        for activation in self.model.kind.activations:
            if activation.saved:
                sources = [*self._stored(activation.index), *self._recomputed(activation.index)]
                program.constrain([*sources, *checkpoint], low=1.0)
        # [Dependency] the inputs of a replayed operator are available. [Available] ensures this for the saved ones.
        for j, run in self.run.items():
            for value in self._unsaved_inputs(j):
                program.constrain([*self._stored(value), *self._recomputed(value), (run, -1.0)], low=0.0)
        # [Exactness] if a value is stored with loss, the values that must not be recomputed from it are stored too.
        for value, others in self.model.kind.exactness_dependents.items():
            for other in others if self._recomputed(value) else ():
                lossy = [
                    (self.store[other, o], -1.0) for o, s in enumerate(self.model.menus[other]) if not s.is_lossless
                ]
                if lossy:
                    program.constrain([*self._stored(value), *lossy], low=0.0)
        # [Host] the payloads in host memory are within the block's limit. Half a byte absorbs rounding errors.
        link = self.model.profiled_kind.host_link
        if link is not None and (limit := link.limit_bytes) is not None:
            terms = [(x, self.model.menus[v][o].host_bytes / (limit + 1)) for (v, o), x in self.store.items()]
            terms = [(x, share) for x, share in terms if share]
            if terms:
                program.constrain(terms, high=(limit + 0.5) / (limit + 1))

    def _stored(self, value: int) -> list[tuple[int, float]]:
        return [(self.store[value, option], 1.0) for option in range(len(self.model.menus.get(value, ())))]

    def _recomputed(self, value: int) -> list[tuple[int, float]]:
        operator = self.model.recompute(value)
        return [] if operator is None else [(self.run[operator], 1.0)]

    def _unsaved_inputs(self, operator: int) -> list[int]:
        values = self.model.kind.values
        inputs = dict.fromkeys(self.model.kind.operators[operator].inputs)
        saved = {v for v in inputs if values[v].activation and values[v].saved}
        return [v for v in inputs if not _is_always_readable(values[v]) and v not in saved]

    def terms_ms(self, weight: float = 1.0) -> list[tuple[int, float]]:
        """Return the objective's terms for replay, encoding and decoding in ms (equation 4), times `weight`."""
        runs = [(run, weight * self.model.kind.operators[j].ms) for j, run in self.run.items()]
        runs += [(x, weight * plan.ms) for plan, x in zip(self.model.checkpoints, self.checkpoint, strict=True)]
        return runs + [(x, weight * self.model.menus[v][o].ms) for (v, o), x in self.store.items()]

    def terms_bytes(self, weight: float = 1) -> list[tuple[int, float]]:
        """Return the terms for the stored bytes (equation 8), times `weight`: activations and generator states."""
        values, operators = self.model.kind.values, self.model.kind.operators
        inputs = [(values[v], run) for j, run in self.run.items() for v in operators[j].inputs]
        terms = [(run, weight * value.nbytes) for value, run in inputs if value.is_generator_state]
        terms += [(x, weight * plan.nbytes) for plan, x in zip(self.model.checkpoints, self.checkpoint, strict=True)]
        return terms + [(x, weight * self.model.menus[v][o].nbytes) for (v, o), x in self.store.items()]

    def priced_plan(self, solution: Sequence[float]) -> PricedPlan:
        """Round the variables in `solution` to integers, and return the resulting plan."""
        for plan, variable in zip(self.model.checkpoints, self.checkpoint, strict=True):
            if solution[variable] > 0.5:
                return plan
        choices = {}
        for value, menu in self.model.menus.items():
            chosen = [store.choice for o, store in enumerate(menu) if solution[self.store[value, o]] > 0.5]
            choices[value] = chosen[0] if chosen else RECOMPUTE
        for activation in self.model.kind.activations:
            # An unread block input is not stored under any action, but its action cannot be RECOMPUTE.
            if not activation.saved and choices[activation.index] == RECOMPUTE:
                choices[activation.index] = RETAIN
        return plan_with(self.model, choices)


def retain_all(model: KindModel) -> PricedPlan:
    """Return the plan that retains all activations, including duplicates of other values.

    If the kind does not allow the action PLAIN, return the kind's plan under torch's checkpoint.
    """
    if BlockAction.PLAIN not in model.profiled_kind.block_actions:
        return model.checkpoints[0]
    return PricedPlan.of(model.profiled_kind, plain_plan(model.profiled_kind))
