"""Rule R7: values that replay cannot recompute are detected, on blocks designed to deceive the check."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.errors import CheckpointMismatchError
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy
from adacc_hf.solve.solver import least_policy
from adacc_hf.tape.execution_plan import ExecutionPlan
from adacc_hf.tape.replay_check import equal_values, same_bits, verify
from adacc_hf.torch_glue.memory import measure_step
from adacc_hf.torch_glue.meters import CpuMemoryMeter, MemoryMeter


@torch.library.custom_op("adacc_test::scale_and_write", mutates_args=())
def scale_and_write(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Double x. The schema hides that `counter` counts the calls."""
    counter.numpy()[:] += 1
    return x * 2


@torch.library.custom_op("adacc_test::scale_and_degrade", mutates_args=())
def scale_and_degrade(x: torch.Tensor) -> torch.Tensor:
    """Double x. The schema hides that x changes afterwards."""
    doubled = x * 2
    x.detach().numpy()[:] *= 1.5
    return doubled


@torch.library.custom_op("adacc_test::thin_out", mutates_args=())
def thin_out(x: torch.Tensor) -> torch.Tensor:
    """Multiply by random numbers of torch's generator, without the tag of a random operator."""
    return x * torch.rand(x.shape)


_noise = np.random.default_rng(0)


@torch.library.custom_op("adacc_test::never_twice_alike", mutates_args=())
def never_twice_alike(x: torch.Tensor) -> torch.Tensor:
    """Add random numbers that torch's seed does not control."""
    return x + torch.from_numpy(_noise.random(tuple(x.shape), dtype=np.float32))


for operator in (scale_and_write, scale_and_degrade, thin_out, never_twice_alike):
    operator.register_fake(lambda x, *_: torch.empty_like(x))
scale_and_write.register_autograd(lambda ctx, gradient: (2 * gradient, None))
scale_and_degrade.register_autograd(lambda ctx, gradient: 2 * gradient)
thin_out.register_autograd(lambda ctx, gradient: gradient)
never_twice_alike.register_autograd(lambda ctx, gradient: gradient)


def add_buffer(block):
    block.register_buffer("count", torch.zeros(8))


def counts_in_hiding(block, hidden):
    return hidden + block.down((scale_and_write(block.up(hidden), block.count) + block.count).tanh())


def degrades_its_input(block, hidden):
    x = block.up(hidden)
    return hidden + block.down(scale_and_degrade(x).tanh()) * x.sigmoid()


def thins_out(block, hidden):
    return hidden + block.down(thin_out(block.up(hidden)).tanh())


@pytest.mark.parametrize("forward", [counts_in_hiding, degrades_its_input, thins_out])
def test_what_replay_cannot_recompute_is_not_recomputable(toy_model, toy_batch, assert_exact, forward):
    """Training with misdeclared operators equals plain training, generators and buffers included (rule R7)."""
    profile = assert_exact(toy_model(forward, setup=add_buffer), toy_batch())
    kind = profile.kinds[0]
    tanh = next(value for value in kind.activations if value.name.endswith("tanh"))
    assert not tanh.recomputable


def test_verification_holds_an_operator_s_input_and_result_at_a_time(record_call):
    def forward(block, hidden):
        for _ in range(12):
            hidden = block(hidden).tanh()
        return hidden

    hidden = torch.randn(256, 64, requires_grad=True)
    tape, recorder = record_call(forward, nn.Linear(64, 64), hidden)
    with MemoryMeter.for_device(torch.device("cpu")) as meter, torch.no_grad():
        assert len(verify(tape, recorder.bases)) == 24
    assert meter.peak_bytes <= 2 * hidden.untyped_storage().nbytes()


# A second forward of a whole block (torch's checkpoint) runs all of these operators again, also those that replay
# skips.


class NeverTwiceAlike(torch.autograd.Function):
    """A Function over a kernel that writes by address and that torch's seed does not control."""

    @staticmethod
    def forward(ctx, x):
        result = torch.empty_like(x)
        result.numpy()[:] = x.numpy() + _noise.random(tuple(x.shape), dtype=np.float32)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def adds_noise(block, hidden):
    return hidden + block.down(never_twice_alike(block.up(hidden)).tanh())


def adds_noise_at_its_end(block, hidden):
    """Add noise after the last saved tensor. The noise is computed again all the same."""
    return never_twice_alike(hidden + block.down(block.up(hidden).tanh())).sigmoid()


def adds_noise_in_a_function(block, hidden):
    return hidden + block.down(NeverTwiceAlike.apply(block.up(hidden)).tanh())


def adds_noise_unseen(block, hidden):
    """Add noise outside of any operator or Function."""
    x = block.up(hidden).tanh()
    x.detach().numpy()[:] += _noise.random(tuple(x.shape), dtype=np.float32)
    return hidden + block.down(x * 1.0)


NOISY = [adds_noise, adds_noise_at_its_end, adds_noise_in_a_function, adds_noise_unseen]


@pytest.mark.parametrize("forward", NOISY)
def test_a_block_that_does_not_make_the_same_bits_again_is_not_checkpointed(toy_model, toy_batch, forward):
    """Or the run stops: the block's own generator is a global, which is not restored."""
    model, batch = toy_model(forward, num_blocks=3), toy_batch(64)
    config = AdaccConfig(actions=("retain", "recompute"))
    profile = profile_model(model, batch, config)

    def gradients():
        _noise.bit_generator.state = np.random.default_rng(1).bit_generator.state
        model.zero_grad()
        model(**batch).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    assert all(map(torch.equal, gradients(), plain))
    for policy in (checkpoint_policy(profile), least_policy(profile, config), uniform_policy(profile, "recompute")):
        # Without an operator that verification runs again, only the comparison with the second run finds the noise.
        is_hidden = forward in (adds_noise_in_a_function, adds_noise_unseen) and not policy.is_plain
        with (
            apply_policy(model, policy, config),
            pytest.raises(CheckpointMismatchError) if is_hidden else nullcontext(),
        ):
            assert all(map(torch.equal, gradients(), plain))


LAYOUTS = {
    "contiguous": lambda x: x,
    "swapped": lambda x: x.transpose(0, 2),
    "rotated": lambda x: x.permute(2, 0, 1),
    "every second": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
    "one number": lambda x: x[0, 0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bits_are_compared_in_every_layout(layout):
    first = torch.randn(4, 6, 8)
    first[0, 0, 1] = torch.nan
    assert same_bits(layout(first), layout(first.clone()))
    for index in range(layout(first).numel()):
        second = first.clone()
        place = tuple(int(i) for i in np.unravel_index(index, layout(first).shape))
        layout(second)[place].view(torch.int32).bitwise_xor_(1)
        assert not same_bits(layout(first), layout(second))


@pytest.mark.parametrize("layout", ["contiguous", "swapped", "rotated"])
def test_comparing_bits_makes_no_copy_of_a_dense_tensor(layout):
    first = torch.randn(32, 64, 128)
    second = first.clone()
    with CpuMemoryMeter() as meter:
        assert same_bits(LAYOUTS[layout](first), LAYOUTS[layout](second))
    assert meter.peak_bytes < first.untyped_storage().nbytes() // 8


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
    """LLaMA stores one cast of three for q, k and v, which read one tensor, and one of two for gate and up."""
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
