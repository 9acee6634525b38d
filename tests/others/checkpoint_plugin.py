"""Pytest plugin that runs Transformers' own gradient checkpointing tests on our executor.

    cd transformers && PYTHONPATH=ADACC/tests/others pytest -p checkpoint_plugin -k gradient_checkpointing tests/models

Transformers passes its blocks to torch.utils.checkpoint.checkpoint. The plugin passes the blocks to an executor that
recomputes all activations that it can. See docs/TRANSFORMERS_TESTS.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import modeling_utils

from adacc_hf.artifacts.policy import Choice, Plan
from adacc_hf.run.block_executor import BlockExecutor
from adacc_hf.run.call import Call
from adacc_hf.run.entries import PlanEntries
from adacc_hf.tape.execution_plan import least_memory_choices
from adacc_hf.tape.tape import Tape
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.torch_glue.second_run import keyword_arguments


class LeastMemory(PlanEntries):
    """Entries of a plan that recomputes all activations that can be recomputed, for any block."""

    def choices(self, tape: Tape) -> tuple[dict[int, Choice], bool]:
        return least_memory_choices(tape), True


class RecomputeAll(BlockExecutor):
    """Executor that recomputes all activations that it can, for a block without a policy."""

    def __init__(self, name: str, library: TapeCache) -> None:
        super().__init__(name, Plan(kind="", choices=()), library)
        self.entries = LeastMemory(name, self.plan, library, self.known_shapes)
        self._is_plain = False


@dataclass
class Record:
    """Executors of all blocks so far, and counts of their calls."""

    tape_cache: TapeCache = field(default_factory=TapeCache)
    executors: WeakKeyDictionary[nn.Module, RecomputeAll] = field(default_factory=WeakKeyDictionary)
    num_calls: int = 0
    num_replayed: int = 0
    """Operators that backward replayed."""
    num_left: int = 0
    """Calls passed on to torch's checkpoint, because the function is not a module's forward."""
    num_untrusted: int = 0
    """Calls of blocks that torch's checkpoint runs, because the first call showed that replay is impossible."""
    untrusted: dict[str, str] = field(default_factory=dict)
    """Reason by class of block, for the calls counted in `num_untrusted`."""


RECORD = Record()


def block_of(fn: Any) -> nn.Module | None:
    """Return the block that `fn` calls, or None. Transformers 5.17 passes a partial of the bound `__call__`, and 5.23 a
    partial of the class's `forward` with the block as its first argument."""
    if isinstance(fn, partial) and fn.args and isinstance(fn.args[0], nn.Module):
        return fn.args[0]
    owner = getattr(fn.func if isinstance(fn, partial) else fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def checkpoint_by_replay(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
    """Return `function(*args)`. Backward replays operators, where torch's checkpoint would call `function` again."""
    if not torch.is_grad_enabled():
        return function(*args)
    real = function.side_effect if isinstance(function, mock.Mock) else function
    block = block_of(real)
    if block is None:
        RECORD.num_left += 1
        return checkpoint(function, *args, use_reentrant=False)
    if block not in RECORD.executors:
        RECORD.executors[block] = RecomputeAll(type(block).__name__, RECORD.tape_cache)
    RECORD.num_calls += 1
    executor = RECORD.executors[block]
    result = executor.run(block, function, args, keyword_arguments(real))
    reasons = [tape.untrusted for tape in executor.known_shapes.values() if tape.untrusted]
    if reasons:
        RECORD.num_untrusted += 1
        RECORD.untrusted[executor.name] = reasons[0]
    return result


def pytest_configure() -> None:
    PATCHES.setattr(modeling_utils, "checkpoint", checkpoint_by_replay)
    run = Call._run

    def counting(call: Call, program: Any, *rest: Any) -> torch.Tensor:
        RECORD.num_replayed += len(program.steps)
        return run(call, program, *rest)

    PATCHES.setattr(Call, "_run", counting)


def pytest_unconfigure() -> None:
    PATCHES.undo()


PATCHES = pytest.MonkeyPatch()


@pytest.fixture(autouse=True)
def replay_is_a_second_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept a replay where Transformers' tests expect a second call of a block's forward. The assertion that there was
    more than one call also holds if operators of the test were replayed, or if the one call has shown that torch's
    checkpoint must run the block from then on."""
    if request.cls is not None and hasattr(request.cls, "assertGreater"):
        original, counts = request.cls.assertGreater, (RECORD.num_replayed, RECORD.num_untrusted)

        def assert_greater(self: Any, first: Any, second: Any, msg: Any = None) -> None:
            if not (first == second == 1 and (RECORD.num_replayed, RECORD.num_untrusted) != counts):
                original(self, first, second, msg)

        monkeypatch.setattr(request.cls, "assertGreater", assert_greater)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"adacc_hf: {RECORD.num_calls} calls of blocks in place of torch's checkpoint, {RECORD.num_replayed} operators "
        f"replayed in backward, {RECORD.num_left} calls of other functions passed on to torch's checkpoint"
    )
    for name, reason in sorted(RECORD.untrusted.items()):
        terminalreporter.write_line(f"adacc_hf: torch's checkpoint runs {name}: {reason}")
