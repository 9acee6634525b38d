"""A pytest plugin that runs Transformers' own gradient checkpointing tests on our executor.

    cd transformers && PYTHONPATH=ADACC/tests/others pytest -p checkpoint_plugin -k gradient_checkpointing tests/models

Transformers hands its blocks to torch.utils.checkpoint.checkpoint; here they are handed to an executor that recomputes
all it can. See docs/TRANSFORMERS_TESTS.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
from adacc_hf.torch_glue.compat import block_of, keyword_arguments


class LeastMemory(PlanEntries):
    """Entries of a plan that recomputes all that can be, whatever the block runs."""

    def choices(self, tape: Tape) -> tuple[dict[int, Choice], bool]:
        return least_memory_choices(tape), True


class RecomputeAll(BlockExecutor):
    """The strategy that recomputes all it can, for a block that no policy knows."""

    def __init__(self, name: str, library: TapeCache) -> None:
        super().__init__(name, Plan(kind="", choices=()), library)
        self.entries = LeastMemory(name, self.plan, library, self.known_shapes)
        self._is_plain = False


@dataclass
class Record:
    """What was done in place of torch's checkpoint so far."""

    library: TapeCache = field(default_factory=TapeCache)
    strategies: WeakKeyDictionary[nn.Module, RecomputeAll] = field(default_factory=WeakKeyDictionary)
    num_calls: int = 0
    num_replayed: int = 0
    """Operators that backward replayed."""
    num_left: int = 0
    """Calls left to torch's checkpoint, because what it was given is no module's forward."""
    num_untrusted: int = 0
    """Calls of blocks that are left to torch's checkpoint once the first call has shown why."""
    untrusted: dict[str, str] = field(default_factory=dict)
    """Per class of such blocks, why."""


RECORD = Record()


def checkpoint_by_replay(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
    """What `function(*args)` returns. Backward replays operators; torch's checkpoint would call it again."""
    if not torch.is_grad_enabled():
        return function(*args)
    real = function.side_effect if isinstance(function, mock.Mock) else function
    block = block_of(real)
    if block is None:
        RECORD.num_left += 1
        return checkpoint(function, *args, use_reentrant=False)
    if block not in RECORD.strategies:
        RECORD.strategies[block] = RecomputeAll(type(block).__name__, RECORD.tape_cache)
    RECORD.num_calls += 1
    strategy = RECORD.strategies[block]
    result = strategy.run(block, function, args, keyword_arguments(real))
    reasons = [tape.untrusted for tape in strategy.tapes.values() if tape.untrusted]
    if reasons:
        RECORD.num_untrusted += 1
        RECORD.untrusted[strategy.name] = reasons[0]
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
    """Transformers tells that checkpointing is on by a second call of a block's forward; replay makes none.

    Here the assertion that there was more than one call also holds if operators of the test were replayed, or if the
    one call has shown that the block must be left to torch's checkpoint from then on.
    """
    if request.cls is not None and hasattr(request.cls, "assertGreater"):
        plain, before = request.cls.assertGreater, (RECORD.num_replayed, RECORD.num_untrusted)

        def assert_greater(self: Any, first: Any, second: Any, msg: Any = None) -> None:
            if not (first == second == 1 and (RECORD.num_replayed, RECORD.num_untrusted) != before):
                plain(self, first, second, msg)

        monkeypatch.setattr(request.cls, "assertGreater", assert_greater)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"adacc_hf: {RECORD.num_calls} calls of blocks in place of torch's checkpoint, {RECORD.num_replayed} operators "
        f"replayed in backward, {RECORD.num_left} calls of other functions left to torch's checkpoint"
    )
    for name, reason in sorted(RECORD.untrusted.items()):
        terminalreporter.write_line(f"adacc_hf: {name} is left to torch's checkpoint: {reason}")
