"""Dynamo traces: the coverage of guards, its gaps, and that a trace leaves no state behind."""

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import is_torchdynamo_compiling

from adacc_hf.run.call import Recording
from adacc_hf.tape.execution_plan import ExecutionPlan, least_memory_choices
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.torch_glue.dynamo import NotTraceableError, trace


class Block(nn.Module):
    """A block that runs `code(block, hidden, *args)`."""

    def __init__(self, code):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.code = code
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden, *args, **kwargs):
        return self.code(self, hidden, *args, **kwargs)


def text(samples=2, tokens=6):
    return torch.ones(samples, tokens, 8)


def scope_of(block, *args, **kwargs):
    return {"call": block, "args": args or (text(),), "kwargs": kwargs}


def trace_block(block, *args, **kwargs):
    return trace(scope_of(block, *args, **kwargs))


# Coverage of guards


def test_sizes_are_symbols():
    """Sizes are symbols if no branch depends on them. 0 and 1 are separate because torch's operators treat them so."""
    block = Block(lambda block, hidden: block.layer(hidden) if hidden.shape[1] < 20 else hidden)
    guards = trace_block(block)
    are_held = [
        guards.hold(scope_of(block, text(*size))) for size in ((3, 7), (6, 6), (2, 19), (2, 20), (1, 6), (2, 1))
    ]
    assert are_held == [True, True, True, False, False, False]


def test_sizes_that_are_equal_by_chance_are_different_symbols():
    block = Block(lambda block, hidden, other: hidden + other.sum(1, keepdim=True))
    guards = trace_block(block, text(4, 4), text(4, 4))
    assert guards.hold(scope_of(block, text(4, 4), text(4, 9)))


# Gaps of guards, and their treatment


def test_whole_numbers_among_the_arguments_are_inputs():
    block = Block(lambda block, hidden, count, by=1: block.layer(hidden).narrow(1, 0, count) * by)
    guards = trace_block(block, text(), 3, by=2)
    for count, by in ((3, 2), (4, 2), (3, 5)):
        scope = scope_of(block, text(), count, by=by)
        assert guards.hold(scope)
        assert sorted(guards.numbers(scope)) == sorted((count, by))


class Shared(nn.Module):
    """A layer whose weight is a view of a part of a storage."""

    def __init__(self, offset):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.put_at(offset)

    def put_at(self, offset):
        rows = torch.linspace(-1, 1, 128).view(16, 8)
        self.layer.weight.data = rows[offset : offset + 8]

    def forward(self, hidden):
        return self.layer(hidden).tanh().exp()


@pytest.mark.parametrize("offset", [1, 8])
def test_a_storage_offset_is_noticed_by_the_plan_alone(offset):
    block, hidden = Shared(0), text().requires_grad_()
    guards = trace_block(block, hidden)
    recording = Recording("block", block, (hidden,), {})
    recording.run(block)
    tape = TapeCache().verified_tape(recording.recorder)
    recording.close()
    plan = ExecutionPlan(tape, least_memory_choices(tape))

    def has_all():
        return plan.fetch(block, (hidden,), {}) is not None

    assert has_all()
    block.put_at(offset)
    assert guards.hold(scope_of(block, hidden))
    assert not has_all()


@pytest.mark.parametrize("is_compiling", [torch.compiler.is_compiling, is_torchdynamo_compiling])
def test_code_that_asks_whether_it_is_compiled_takes_its_eager_branch(is_compiling):
    """Code that asks if it is being compiled takes its eager branch, which is the branch that runs."""

    def code(block, hidden):
        scale = block.compiled if is_compiling() else block.eager
        return block.layer(hidden) * scale

    block = Block(code)
    block.eager, block.compiled = 1.0, 2.0
    guards = trace_block(block)
    block.compiled = 3.0
    assert guards.hold(scope_of(block))
    block.eager = 4.0
    assert not guards.hold(scope_of(block))


# Untraceable code

DRAWN = "a number is drawn from Python's random generator"


@torch.compiler.disable
def opaque(hidden):
    return hidden.tanh()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param(lambda block, hidden: opaque(block.layer(hidden)), "torch.compiler.disable", id="disabled"),
        pytest.param(lambda block, hidden: hidden * 2 if hidden.sum() > 0 else hidden, "branching", id="branch"),
        pytest.param(lambda block, hidden: print("a") or block.layer(hidden), "builtin", id="print"),
        pytest.param(lambda block, hidden: hidden * np.random.rand(), "data-dependent", id="numpy's dice"),
        pytest.param(lambda block, hidden: block.nothing(hidden), "observed exception", id="error"),
        pytest.param(lambda block, hidden: hidden.tolist(), "tolist", id="data"),
        pytest.param(lambda block, hidden: hidden * random.randint(1, 3), DRAWN, id="randint"),
        pytest.param(lambda block, hidden: hidden * random.uniform(1.0, 2.0), DRAWN, id="uniform"),
    ],
)
def test_what_cannot_be_traced_has_a_reason_in_one_line(code, reason):
    block, state = Block(code), random.getstate()
    with pytest.raises(NotTraceableError) as error_info:
        trace_block(block)
    message = str(error_info.value)
    assert reason.lower() in message.lower()
    assert 0 < len(message) <= 200
    assert "\n" not in message
    assert random.getstate() == state


@pytest.mark.parametrize("stance", ["force_eager", "default"])
def test_a_stance_that_forbids_compiling_runs_nothing(stance):
    runs = []

    def code(block, hidden):
        if not torch.compiler.is_dynamo_compiling():
            runs.append(block)
        return block.layer(hidden)

    block = Block(code)
    with torch.compiler.set_stance(stance):
        if stance == "default":
            trace_block(block)
        else:
            with pytest.raises(NotTraceableError, match="set_stance"):
                trace_block(block)
    assert runs == []


# State left behind by a trace


def test_no_operator_runs_and_no_state_changes():
    def code(block, hidden):
        block.number += 1
        block.names.append("a")
        block.calls.add_(1)
        block.last = nn.functional.dropout(block.layer(hidden), 0.5)
        return block.last

    block = Block(code)
    block.number, block.names, block.last = 0, [], None
    state = torch.get_rng_state()
    trace_block(block)
    assert (block.number, block.names, block.last, block.calls.item()) == (0, [], None, 0.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert block.layer.weight.grad is None
    assert not any(map(vars, [*block.parameters(), *block.buffers()])), "a mark of a static input"


@pytest.mark.parametrize("can_be_traced", [True, False])
def test_a_traced_model_is_collected(can_be_traced):
    block = Block(lambda block, hidden: block.layer(hidden) if can_be_traced else hidden.tolist())
    block.config = PretrainedConfig(scale=1.0)
    hidden = text()
    trace = None
    try:
        trace = trace_block(block, hidden)
    except NotTraceableError:
        assert not can_be_traced
    references = [weakref.ref(each) for each in (block, block.layer, block.layer.weight, block.config, hidden)]
    del block, hidden
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert (trace is not None) == can_be_traced


def test_guards_outlive_a_reset_of_dynamo():
    """Guards outlive `torch._dynamo.reset()`, which tests and evaluations call between two models."""
    block = Block(lambda block, hidden: block.layer(hidden) * block.value * block.number)
    block.value, block.number = 1.0, np.float64(2.0)
    guards = trace_block(block)
    torch._dynamo.reset()
    assert guards.hold(scope_of(block))
    assert guards.numbers(scope_of(block)) == (2.0,)
    block.value = 2.0
    assert not guards.hold(scope_of(block))
    assert trace_block(block).hold(scope_of(block))
