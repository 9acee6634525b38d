"""Position of a call in its tape: where a call leaves the tape, and what is known of it then."""

import pytest
import torch
from torch import nn

from adacc_hf.artifacts.policy import Action, Choice
from adacc_hf.run.call import Recording
from adacc_hf.run.validation import Validator
from adacc_hf.tape.execution_plan import ExecutionPlan, least_memory_choices
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.torch_glue.memory import MemoryMeter

ROWS = 4096


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def rows():
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def usual(block, hidden):
    for _ in range(6):
        hidden = (block(hidden) * 2.0 + 1.0).tanh()
    return hidden


def plan_of(block, call, *args):
    recording = Recording("block", block, args, {})
    recording.run(lambda *values: call(block, *values))
    tape = TapeCache().verified_tape(recording.recorder)
    recording.close()
    return ExecutionPlan(tape, least_memory_choices(tape))


def validate(plan, block, call, *args, keeps=True, on_divergence=lambda values: None):
    """Run the call under a validator and return the validator. Saved tensors are freed at once unless `keeps`."""
    validator = Validator(plan, False, on_divergence)

    def pack(tensor):
        validator.saves(tensor)
        return tensor.detach() if keeps else None

    validator.begin(block, args, {})
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed), validator:
        call(block, *args)
    validator.finish()
    return validator


def test_a_call_that_is_its_tape_does_not_leave(linear):
    """A call equal to its tape passes, although storages are freed on the way and their addresses reused."""
    plan = plan_of(linear, usual, rows())
    assert validate(plan, linear, usual, rows(), keeps=False).divergence is None


def test_validation_keeps_no_memory(linear):
    hidden = rows()
    plan = plan_of(linear, usual, hidden)
    with MemoryMeter.for_device(torch.device("cpu")) as meter:
        validate(plan, linear, usual, hidden, keeps=False)
    nbytes = hidden.untyped_storage().nbytes()
    assert meter.peak_bytes < 4 * nbytes  # operands, result, and the product behind the sum
    with MemoryMeter.for_device(torch.device("cpu")) as meter:
        plan_of(linear, usual, hidden)
    assert meter.peak_bytes > 20 * nbytes  # of 24 results: shows that the line above can fail


def shorter(block, hidden):
    return (block(hidden) * 2.0 + 1.0).tanh()


def longer(block, hidden):
    return usual(block, hidden).exp()


def other_number(block, hidden):
    hidden = (block(hidden) * 2.0 + 1.0).tanh()
    return usual(block, hidden * 3.0)


def other_tensor(block, hidden):
    return (block(hidden) * 2.0 + 1.0).tanh() * block.weight[0, 0]


@pytest.mark.parametrize("call", [shorter, longer, other_number, other_tensor])
def test_it_tells_once_where_a_call_leaves_the_tape(linear, call):
    """The mismatch is reported once, together with the values that the plan stores of the operators before the
    mismatch."""
    divergences = []
    plan = plan_of(linear, usual, rows())
    validator = validate(plan, linear, call, rows(), on_divergence=divergences.append)
    assert validator.has_diverged
    assert validator.divergence
    (values,) = divergences
    assert values.keys() <= set(plan.roots)


def test_what_the_plan_would_store_is_given_where_a_call_leaves(linear):
    """A value computed early and saved last is among the values returned at a mismatch."""

    def call(block, hidden):
        early = block(hidden).tanh()
        return early.exp().exp() * early.detach()

    def leaves(block, hidden):
        early = block(hidden).tanh()
        return early.sin()

    divergences = []
    hidden = rows()
    tape = plan_of(linear, call, hidden).tape
    (tanh,) = [value.index for value in tape.values if value.name == "block:tanh"]
    choices = least_memory_choices(tape) | {tanh: Choice(action=Action.RETAIN)}
    plan = ExecutionPlan(tape, choices)
    assert tanh in plan.roots
    validate(plan, linear, leaves, hidden, on_divergence=divergences.append)
    # tanh saves its own result after computing it; once saved, the result is no longer held.
    assert [tanh in values for values in divergences] == [False]
    divergences.clear()

    def leaves_before(block, hidden):
        with torch.no_grad():
            early = block(hidden).tanh()
        return early.sin()

    validate(plan, linear, leaves_before, hidden, on_divergence=divergences.append)
    (values,) = divergences
    assert torch.equal(values[tanh], linear(hidden).tanh())


def test_what_runs_in_a_pause_is_not_the_blocks(linear):
    hidden = rows()
    plan = plan_of(linear, usual, hidden)
    validator = Validator(plan, False, lambda values: None)
    validator.begin(linear, (hidden,), {})

    def pack(tensor):
        validator.saves(tensor)
        with validator.paused():
            assert tensor.detach().exp().sum().tolist() > 0
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed), validator:
        usual(linear, hidden)
    validator.finish()
    assert not validator.has_diverged


def test_tensors_without_memory_are_no_affair_of_it(linear):
    """The validator ignores meta tensors, on which DTensors infer shapes."""

    def call(block, hidden):
        shape = (torch.empty(3, 5, device="meta") @ torch.empty(5, 2, device="meta")).add_(1).shape
        return block(hidden).tanh() * shape[0]

    def other(block, hidden):
        torch.ones(3, device="meta").mul_(2).add_(torch.ones(3, device="meta"))
        return block(hidden).tanh() * 3

    plan = plan_of(linear, call, rows())
    for each in (call, other):
        assert validate(plan, linear, each, rows()).divergence is None


def test_collectives_are_compared_by_their_tensors(linear, one_rank):
    from torch import distributed
    from torch.distributed import _functional_collectives as functional

    def call(block, hidden, which=0, group=None):
        one, other = block(hidden), block(hidden) * 2
        summed = functional.all_reduce((one, other)[which].detach(), "sum", group or distributed.group.WORLD)
        return one * other * summed

    plan = plan_of(linear, call, rows())
    assert plan.tape.has_collectives
    assert validate(plan, linear, call, rows()).divergence is None
    another = distributed.new_group([0])
    assert validate(plan, linear, lambda b, h: call(b, h, group=another), rows()).divergence is None
    assert validate(plan, linear, lambda b, h: call(b, h, which=1), rows()).has_diverged
