"""The choice of an action for every activation of one block, as a mixed-integer linear program (paper, section 3.3).

For a block of one kind, all variables binary:
  store[v, o]  activation v is stored as option o of its menu: as it is, or as one codec's payload
  run[j]       operator j is replayed in backward
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adacc_hf.policy import RECOMPUTE, RETAIN, Action, Choice, Plan

if TYPE_CHECKING:
    import pulp

    from adacc_hf.config import AdaccConfig
    from adacc_hf.profile import KindProfile, Value


MAX_NODES = 2000
"""Branches that CBC may take. GPT-2's programs end long before; one of many kinds could take hours to prove. A limit on
time would make the policy depend on the machine's load."""
TIME_LIMIT_SECONDS = 60
"""A guard against a hang, far above what MAX_NODES take."""
CBC_TOLERANCES = ("primalTolerance 1e-9", "integerTolerance 1e-9")
"""CBC's own (1e-7 and 1e-6) let stored bytes exceed the budget by kilobytes, since coefficients are large."""


class Cbc:
    """The solver that PuLP ships, with a record of its runs. Starting it takes about 10 ms."""

    def __init__(self) -> None:
        self.num_solves = 0
        self.num_unproven = 0
        """Runs that ended before their solution was proven the best one."""

    def solve(self, problem: pulp.LpProblem) -> bool:
        """Solve `problem`; False if no solution was found."""
        from pulp import COIN_CMD, LpSolutionOptimal, LpStatusInfeasible, LpStatusOptimal
        from pulp.apis.coin_api import pulp_cbc_path

        limits = {"gapRel": 0.0, "gapAbs": 0.0, "maxNodes": MAX_NODES, "timeLimit": TIME_LIMIT_SECONDS}
        # PULP_CBC_CMD, the usual name of the same program, warns that PuLP 4 will drop it.
        status = problem.solve(COIN_CMD(path=pulp_cbc_path, msg=False, options=list(CBC_TOLERANCES), **limits))
        self.num_solves += 1
        self.num_unproven += status != LpStatusInfeasible and problem.sol_status != LpSolutionOptimal
        return status == LpStatusOptimal


@dataclass(frozen=True)
class Store:
    """One way to store an activation."""

    choice: Choice
    nbytes: int
    ms: float
    """Encode and decode time; 0 for the tensor itself."""


@dataclass(frozen=True)
class KindModel:
    """What the solver may do with one kind under a config."""

    whole: KindProfile
    """The kind as it was profiled."""
    kind: KindProfile
    """The kind in which no value repeats another, if replay is allowed: one that would is taken from the other."""
    menus: Mapping[int, tuple[Store, ...]]
    """The ways to store each activation, RETAIN first."""
    runnable: frozenset[int]
    """Operators that can be replayed: their inputs can all be stored or remade."""

    def remake(self, value: int) -> int | None:
        """The operator whose replay makes `value`, or None if none may."""
        record = self.kind.values[value]
        return record.producer if record.recomputable and record.producer in self.runnable else None


@dataclass(frozen=True, eq=False)
class Column:
    """One plan for a block of a kind, with its price in whole bytes. Compared by identity, which is quick to hash."""

    plan: Plan
    nbytes: int
    """Bytes it stores, shared tensors left out."""
    shared: frozenset[int]
    """Shared tensors that its replay reads."""
    ms: float


def build_model(kind: KindProfile, config: AdaccConfig) -> KindModel:
    """The actions that `config` allows on `kind`."""
    whole = kind
    if Action.RECOMPUTE in config.parsed_actions:
        kind = whole.merged(whole.equal)
    menus = {
        value.index: (Store(RETAIN, value.nbytes, 0.0), *_codec_stores(value, config)) for value in kind.activations
    }
    runnable: set[int] = set()
    if Action.RECOMPUTE in config.parsed_actions:
        for operator in kind.operators:
            available = (_is_available(kind.values[value], menus, runnable) for value in operator.inputs)
            if operator.replayable and all(available):
                runnable.add(operator.index)
    return KindModel(whole, kind, menus, frozenset(runnable))


def _codec_stores(value: Value, config: AdaccConfig) -> list[Store]:
    """The codecs that `config` allows for `value`: lossless ones always, since they change nothing."""
    lossy = Action.COMPRESS in config.parsed_actions
    return [
        Store(Choice.compress(option), option.nbytes, option.encode_ms + option.decode_ms)
        for option in value.codecs
        if (option.lossless or (lossy and (config.codecs is None or option.codec in config.codecs)))
        and (config.max_error is None or option.error <= config.max_error)
        and option.nbytes < value.nbytes
    ]


def _is_available(value: Value, menus: Mapping[int, Any], runnable: set[int]) -> bool:
    """Whether a replayed operator can read `value`, given the operators before it that can be replayed."""
    return value.shared is not None or value.index in menus or (value.recomputable and value.producer in runnable)


def price(model: KindModel, choices: Mapping[int, Choice]) -> Column:
    """The plan with these choices; what nobody reads is neither replayed nor stored.

    A block input that autograd does not save costs bytes only if a replay reads it. Activations that repeat another
    are recomputed.
    """
    choices = {v.index: choices[v.index] if v.index in model.menus else RECOMPUTE for v in model.whole.activations}
    values = model.kind.values
    pending = [value.index for value in model.kind.activations if value.saved and choices[value.index] == RECOMPUTE]
    read: set[int] = set()
    runs: set[int] = set()
    while pending:
        operator = model.kind.operators[_producer(model, pending.pop())]
        if operator.index not in runs:
            runs.add(operator.index)
            read.update(operator.inputs)
            pending += [
                v for v in operator.inputs if values[v].shared is None and choices.get(v, RECOMPUTE) == RECOMPUTE
            ]
    kept = [v.index for v in model.kind.activations if choices[v.index] != RECOMPUTE and (v.saved or v.index in read)]
    stores = [next(store for store in model.menus[v] if store.choice == choices[v]) for v in kept]
    return Column(
        plan=Plan(kind=model.kind.digest, choices=tuple(choices.items())),
        nbytes=sum(store.nbytes for store in stores),
        shared=frozenset(values[v].shared for v in read if values[v].shared is not None),
        ms=sum(model.kind.operators[j].ms for j in runs) + sum(store.ms for store in stores),
    )


def _producer(model: KindModel, value: int) -> int:
    operator = model.remake(value)
    assert operator is not None, f"the program lets value {value} be remade, which cannot be"
    return operator


class BlockVariables:
    """The variables and constraints of one block of `model` inside the program `problem`."""

    def __init__(self, problem: pulp.LpProblem, model: KindModel, prefix: str) -> None:
        from pulp import lpSum

        self.model = model
        self.store = {
            (value, option): problem.add_variable(f"{prefix}store_{value}_{option}", cat="Binary")
            for value, menu in model.menus.items()
            for option in range(len(menu))
        }
        self.run = {j: problem.add_variable(f"{prefix}run_{j}", cat="Binary") for j in sorted(model.runnable)}
        self.stored = {v: lpSum(self.store[v, o] for o in range(len(menu))) for v, menu in model.menus.items()}
        self._constrain(problem)

    def _constrain(self, problem: pulp.LpProblem) -> None:
        # [Once] an activation is stored in at most one way (equation 5).
        for value, menu in self.model.menus.items():
            if len(menu) > 1:
                problem += self.stored[value] <= 1
        # [Available] what autograd saved is stored, or its producer is replayed (equations 5 and 6).
        for value in self.model.kind.activations:
            if value.saved:
                problem += self.stored[value.index] + self._remade(value.index) >= 1
        # [Dependency] a replayed operator has its inputs; for what autograd saved, [Available] says so already.
        for j, run in self.run.items():
            for value in self._unsaved_inputs(j):
                problem += self.stored.get(value, 0) + self._remade(value) >= run

    def _unsaved_inputs(self, operator: int) -> list[int]:
        values = self.model.kind.values
        inputs = dict.fromkeys(self.model.kind.operators[operator].inputs)
        return [v for v in inputs if values[v].shared is None and not (values[v].activation and values[v].saved)]

    def _remade(self, value: int) -> Any:
        operator = self.model.remake(value)
        return 0 if operator is None else self.run[operator]

    def shared_readers(self) -> list[tuple[int, Any]]:
        """Pairs of a shared tensor and the run variable of an operator that reads it."""
        values = self.model.kind.values
        inputs = [(v, run) for j, run in self.run.items() for v in dict.fromkeys(self.model.kind.operators[j].inputs)]
        return [(values[v].shared, run) for v, run in inputs if values[v].shared is not None]

    def terms_ms(self) -> list[tuple[Any, float]]:
        """Replay, encoding and decoding, in ms (equation 4)."""
        runs = [(run, self.model.kind.operators[j].ms) for j, run in self.run.items()]
        return runs + [(x, self.model.menus[v][o].ms) for (v, o), x in self.store.items()]

    def terms_bytes(self) -> list[tuple[Any, int]]:
        """What is stored, in bytes (equation 8)."""
        return [(x, self.model.menus[v][o].nbytes) for (v, o), x in self.store.items()]

    def column(self) -> Column:
        """The plan that the solved variables mean, rounded to integers and priced anew."""
        choices = {}
        for value, menu in self.model.menus.items():
            taken = [store.choice for o, store in enumerate(menu) if self.store[value, o].value() > 0.5]
            choices[value] = taken[0] if taken else RECOMPUTE
        for value in self.model.kind.activations:
            # A block input that nothing needs is not stored under any action; it cannot be RECOMPUTE.
            if not value.saved and choices[value.index] == RECOMPUTE:
                choices[value.index] = RETAIN
        return price(self.model, choices)


def combine(terms: Iterable[tuple[Any, float]]) -> Any:
    """The linear expression sum of coefficient * variable, in which a variable may occur more than once."""
    from pulp import LpAffineExpression

    total: dict[Any, float] = defaultdict(float)
    for variable, coefficient in terms:
        total[variable] += coefficient
    return LpAffineExpression(total)


def retain_all(model: KindModel) -> Column:
    """The plan that leaves the block untouched, values that repeat others included."""
    activations = model.whole.activations
    return Column(
        plan=Plan(kind=model.whole.digest, choices=tuple((value.index, RETAIN) for value in activations)),
        nbytes=sum(value.nbytes for value in activations if value.saved),
        shared=frozenset(),
        ms=0.0,
    )


def total_ms(models: Sequence[KindModel]) -> float:
    """Sum of all operators' and codecs' times: a scale for the objective."""
    runs = sum(operator.ms for model in models for operator in model.kind.operators)
    return runs + sum(store.ms for model in models for menu in model.menus.values() for store in menu)
