"""Execution plans of a tape: slots, their dependencies, and the layout of values for codecs."""

import pytest
import torch
from torch import nn

from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Action, Choice
from adacc_hf.tape.execution_plan import ExecutionPlan, encode_view, least_memory
from adacc_hf.tape.replay import view
from adacc_hf.tape.replay_check import verify

INT8 = Choice(action=Action.COMPRESS, codec="int8")


@pytest.fixture
def tape(record_call):
    """hidden -> up -> tanh -> exp -> transposed product; saved: hidden, tanh, exp and two parameters."""
    torch.manual_seed(0)
    block = nn.Linear(8, 8)
    hidden = torch.randn(3, 8, requires_grad=True)
    tape, recorder = record_call(lambda block, hidden: block(hidden).tanh().exp() * 2, block, hidden)
    tape.recomputable = verify(tape, recorder.bases)
    return tape


def values_of(tape):
    """Return the indices of the hidden tensor, of tanh's result and of exp's."""
    indices = {value.name: value.index for value in tape.values}
    return [indices[name] for name in ("argument 0", "block:tanh", "block:exp")]


def test_replay_starts_at_the_nearest_stored_value(tape):
    hidden, tanh, exp = values_of(tape)
    plan = ExecutionPlan(tape, {hidden: RETAIN, tanh: INT8, exp: RECOMPUTE})
    needs = {slot.value: slot.needs for slot in plan.slots}
    assert needs[exp] == needs[tanh] == (tanh,)
    assert plan.externals == []  # no replay reads parameters


def test_codecs_see_dimensions_in_the_order_of_memory(record_call):
    """Codecs see dimensions in memory order: a transposed attention output is encoded without a copy."""
    base = torch.randn(2, 3, 4)
    tape, _ = record_call(lambda _, x: x + 1, nn.Identity(), base.permute(2, 0, 1))
    value = next(value for value in tape.values if value.source is not None)
    assert value.ref.geometry == ((4, 2, 3), (1, 12, 4), 0)
    ref = encode_view(tape, value.index)
    assert ref.geometry == ((2, 3, 4), (12, 4, 1), 0)
    assert torch.equal(view(base, ref), base)
    assert view(base, ref).is_contiguous()


@pytest.mark.parametrize(
    ("draw", "is_mask"),
    [
        (lambda x: torch.empty_like(x).bernoulli_(0.9), True),
        (lambda x: torch.empty_like(x).bernoulli_(0.9).div_(0.9), True),
        (lambda x: torch.empty_like(x).bernoulli_(0.9).div_(-0.9), False),
        (lambda x: torch.empty_like(x).bernoulli_(0.9).mul_(2).sub_(1), False),
        (torch.rand_like, False),
    ],
    ids=["bits", "dropout", "negative zeros", "signs", "noise"],
)
def test_masks_that_are_drawn_become_bits_and_other_draws_do_not(record_call, draw, is_mask):
    """Random masks become bits, and other random values do not. A CPU's dropout has float masks of 0 and 1/(1-p)."""
    x = torch.randn(4, 16, requires_grad=True)
    tape, _ = record_call(lambda _, x: x * draw(x), nn.Identity(), x)
    (noise,) = [value for value in tape.saved_values() if tape.values[value].source is None]
    expected = Choice(action=Action.COMPRESS, codec="bitmask") if is_mask else RETAIN
    if noise in tape.recomputable:
        pytest.fail("what is drawn must not be replayed")
    assert least_memory(tape, noise) == expected
