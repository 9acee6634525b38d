"""Equal values: found only where they must be equal, and stored once."""

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN
from adacc_hf.tape.execution_plan import ExecutionPlan
from adacc_hf.tape.replay_check import equal_values, verify
from adacc_hf.torch_glue.memory import measure_step


@pytest.fixture
def record(record_call):
    """`record(forward, x)`: the verified tape of `forward(x)`."""

    def run(forward, x):
        tape, recorder = record_call(lambda _, x: forward(x), nn.Identity(), x)
        with torch.no_grad():
            tape.recomputable = verify(tape, recorder.bases)
        tape.equal = equal_values(tape, tape.recomputable)
        return tape

    return run


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


def squares(count):
    """Save `count` equal casts of one tensor, each in a square of its own."""
    return lambda x: [x.double().square() for _ in range(count)]


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda x: (x.double().square(), x.half().square()), id="other-dtype"),
        pytest.param(lambda x: ((x * 2).square(), (x * 3).square()), id="other-constant"),
        pytest.param(lambda x: (x.exp().square(), x.t().exp().square()), id="other-layout"),
        pytest.param(lambda x: (torch.rand_like(x) * x, torch.rand_like(x) * x), id="random"),
        pytest.param(lambda x: (x.double().mul_(2).square(), x.double().square()), id="in-place"),
        pytest.param(lambda x: (x.double().square(), x.detach().mul_(2), x.double().square()), id="input-changed"),
    ],
)
def test_different_values_are_not_equal(record, x, forward):
    assert record(forward, x).equal == {}


def test_a_value_that_nobody_saves_is_taken_from_a_saved_one(record, x):
    tape = record(lambda x: (x.exp(), x.exp() + 1), x)
    first, second = tape.saved_values()
    assert tape.equal == {second: first}
    tape = record(lambda x: (x.double().square(), x.double() + 1), x)
    (saved,) = tape.saved_values()
    (repeated,) = tape.equal
    assert tape.equal == {repeated: saved}


def test_slots_of_equal_values_share_a_cell(record, x):
    tape = record(squares(2), x)
    first, second = tape.saved_values()
    source = tape.operators[0].inputs()[0]
    plan = ExecutionPlan(tape, {source: RETAIN, first: RETAIN, second: RECOMPUTE})
    assert [(slot.value, slot.needs, slot.in_cell) for slot in plan.slots] == [(first, (first,), True)] * 2
    assert all(program.steps == () for program in plan.schedule.programs)
    apart = ExecutionPlan(tape, {source: RETAIN, first: RECOMPUTE, second: RETAIN})
    assert [slot.value for slot in apart.slots] == [first, second]
    assert ExecutionPlan(tape, {source: RETAIN, first: RETAIN, second: RETAIN}).is_plain


@pytest.fixture(scope="module")
def llama(tiny_llama, token_batch):
    model, batch = tiny_llama(), token_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model, batch, profile_model(model, batch, AdaccConfig(min_compress_bytes=0))


def test_llama_under_autocast_keeps_one_cast_of_three(llama):
    """Under autocast LLaMA stores one cast of three for q, k and v, which read one tensor, and one of two for gate and
    up."""
    kind = llama[2].kinds[0]
    pairs = {(kind.values[d].name, kind.values[c].name) for d, c in kind.equal.items() if kind.values[d].saved}
    assert pairs == {
        ("self_attn.k_proj:to_copy", "self_attn.q_proj:to_copy"),
        ("self_attn.v_proj:to_copy", "self_attn.q_proj:to_copy"),
        ("mlp.up_proj:to_copy", "mlp.gate_proj:to_copy"),
    }


def test_a_budget_just_below_plain_costs_nothing(llama, run_steps, assert_same_steps):
    model, batch, profile = llama
    plain = run_steps(model, batch, autocast=torch.bfloat16)
    policy = solve_policy(profile, 0.999)
    repeated = sum(value.nbytes for value in profile.kinds[0].activations if value.equal_to is not None)
    assert repeated > 0
    assert policy.predicted_overhead_ms == 0.0
    assert policy.predicted_stored_bytes == profile.plain_stored_bytes - len(profile.blocks) * repeated
    with apply_policy(model, policy):
        assert_same_steps(run_steps(model, batch, autocast=torch.bfloat16), plain)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            memory = measure_step(model, batch)
    assert memory.stored_bytes == policy.predicted_stored_bytes
