"""Which forward values a compiled graph hands to its backward, and in which form: the program of `milp` on one graph.

Unlike the executor, a graph can hand over any value, not only what autograd would save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adacc_hf.milp import BlockVariables, KindModel, Store
from adacc_hf.policy import RETAIN, Choice
from adacc_hf.profile import CodecOption, KindProfile
from adacc_hf.program import Program, Solver, SolverLog


@dataclass(frozen=True, kw_only=True)
class GraphChoice:
    """What backward gets."""

    stored: Mapping[int, Choice]
    """How each handed-over value is stored; what is not here and needed is remade."""
    nbytes: int
    ms: float


def graph_model(
    kind: KindProfile, keep_ms: Mapping[int, float], codecs: Mapping[int, tuple[CodecOption, ...]]
) -> KindModel:
    """The choices there are: keep each value, for the time that takes, code it, or run its operator again."""
    menus = {
        value.index: (
            Store(RETAIN, value.nbytes, keep_ms[value.index]),
            *(
                Store(Choice.compress(option), option.nbytes, option.encode_ms + option.decode_ms)
                for option in codecs.get(value.index, ())
            ),
        )
        for value in kind.values
    }
    runnable = frozenset(operator.index for operator in kind.operators if operator.replayable)
    return KindModel(whole=kind, kind=kind, menus=menus, runnable=runnable)


def least_time(model: KindModel, cap_bytes: int, log: SolverLog) -> GraphChoice | None:
    """The fastest choice that stores at most `cap_bytes`; None if there is none."""
    program = Program()
    block = BlockVariables(program, model)
    # In KiB, so that coefficients are of ordinary size; half a byte keeps rounding away from both sides.
    program.constrain(block.terms_bytes(1 / 1024), high=(cap_bytes + 0.5) / 1024)
    solution = Solver(program, log, integer=True).minimize(block.terms_ms())
    return None if solution is None else _choice(model, block, solution)


def least_bytes(model: KindModel, log: SolverLog) -> GraphChoice:
    """The choice that stores least."""
    program = Program()
    block = BlockVariables(program, model)
    solution = Solver(program, log, integer=True).minimize(block.terms_bytes(1 / 1024))
    assert solution is not None, "keeping everything is always a solution"
    return _choice(model, block, solution)


def _choice(model: KindModel, block: BlockVariables, solution: Sequence[float]) -> GraphChoice:
    """What the solved variables mean, less what nobody reads."""
    taken = {
        value: store
        for value, menu in model.menus.items()
        for option, store in enumerate(menu)
        if solution[block.store[value, option]] > 0.5
    }
    pending = [value.index for value in model.kind.values if value.saved]
    read: set[int] = set()
    runs: set[int] = set()
    while pending:
        value = pending.pop()
        if value in read:
            continue
        read.add(value)
        if value not in taken:
            producer = model.kind.values[value].producer
            if producer not in runs:
                runs.add(producer)
                pending += model.kind.operators[producer].inputs
    stores = {value: store for value, store in taken.items() if value in read}
    replay_ms = sum(model.kind.operators[j].ms for j in runs)
    return GraphChoice(
        stored={value: store.choice for value, store in stores.items()},
        nbytes=sum(store.nbytes for store in stores.values()),
        ms=replay_ms + sum(store.ms for store in stores.values()),
    )
