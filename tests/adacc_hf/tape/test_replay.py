"""Replay: rules R5 and R6 on blocks designed to break them, and the schedule of a backward."""

import itertools

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.policy import BlockAction
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.tape.replay import StorageMap, schedule, share_elements, single_program, view
from adacc_hf.tape.replay_check import verify
from adacc_hf.tape.tape import TensorRef


def overwrites_what_was_read(block, hidden):
    """Have `second` read a version of x that a later write replaced, after a replay has computed that next version."""
    x = block.up(hidden)
    second = x.tanh()
    x.add_(1.0)
    third = x.sigmoid()
    x.mul_(hidden)
    fourth = x.exp()
    x.masked_fill_(x > 0, 0.5)
    return hidden + block.down(x) * second + third * fourth


def relu_in_place(block, hidden):
    return hidden + block.down(torch.relu_(block.up(hidden)))


def buckets_in_place(block, hidden):
    """Change integers in place and look them up, as T5's relative position bias does."""
    distance = torch.arange(6)[:, None] - torch.arange(6)[None, :]
    buckets = (distance > 0).long() * 4
    buckets += torch.where(distance.abs() < 2, distance.abs(), torch.full_like(distance, 3))
    bias = nn.functional.embedding(buckets, block.up.weight)
    scores = (block.up(hidden) @ hidden.transpose(1, 2)) + bias[..., 0]
    return hidden + block.down(scores.softmax(-1) @ hidden)


def overwrites_what_nobody_differentiates(block, hidden):
    """Overwrite x, which is saved for the sine, but has no gradient. The exponential reads the new version."""
    x = block.up(hidden)
    block.diagnostic = x.sin().detach()
    y = x.exp()
    x.mul_(2.0)
    return hidden + block.down(x.tanh()) * y


def writes_into_view(block, hidden):
    x = block.up(hidden)
    y = x.clone()
    y[..., :4].mul_(2.0)
    y[..., 4:] = x[..., :4].sigmoid()
    return hidden + block.down(y).tanh() * y.exp()


def rotates_complex(block, hidden):
    pairs = torch.view_as_complex(block.up(hidden).unflatten(-1, (4, 2)))
    turned = pairs * torch.polar(torch.ones(4), torch.arange(4.0))
    return hidden + block.down(torch.view_as_real(turned).flatten(-2)).tanh()


def conjugates_lazily(block, hidden):
    pairs = torch.view_as_complex(block.up(hidden).unflatten(-1, (4, 2)))
    return hidden + block.down(torch.view_as_real(pairs.conj() * pairs.exp()).flatten(-2))


@pytest.mark.parametrize(
    "forward",
    [
        overwrites_what_was_read,
        relu_in_place,
        buckets_in_place,
        overwrites_what_nobody_differentiates,
        writes_into_view,
        rotates_complex,
        conjugates_lazily,
    ],
)
def test_blocks_with_versions_and_views_train_exactly(toy_model, toy_batch, assert_exact, forward):
    """Blocks with overwritten versions (rule R6) and complex views of real storages (rule R2) train exactly."""
    assert_exact(toy_model(forward), toy_batch(), num_policies=8)


def add_buffer(block):
    block.register_buffer("count", torch.zeros(8))


def add_batch_norm(block):
    block.norm = nn.BatchNorm1d(6)


def reads_and_updates_buffer(block, hidden):
    x = block.up(hidden) * (1 + block.count)
    block.count.add_(1.0)
    return hidden + block.down(x.sigmoid()) * (2 + block.count.clone())


def normalises_batch(block, hidden):
    """Normalize by torch's batch norm, which writes its running statistics without declaring the write."""
    return hidden + block.down(block.norm(block.up(hidden)).relu())


@pytest.mark.parametrize(
    ("forward", "setup"), [(reads_and_updates_buffer, add_buffer), (normalises_batch, add_batch_norm)]
)
def test_buffers_changed_in_place_change_once_per_step(toy_model, toy_batch, assert_exact, forward, setup):
    """Buffers change once per step. `assert_exact` compares them, so a replay that updated them again would show."""
    assert_exact(toy_model(forward, setup=setup), toy_batch())


def add_recurrent_cells(block):
    block.lstm, block.gru = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)


def runs_recurrent_cells(block, hidden):
    return hidden + block.down(block.gru(block.lstm(block.up(hidden))[0])[0].tanh())


def test_recurrent_cells_train_exactly(toy_model, toy_batch, assert_exact):
    profile = assert_exact(toy_model(runs_recurrent_cells, setup=add_recurrent_cells), toy_batch(), num_policies=4)
    values = {value.name: value for value in profile.kinds[0].activations if value.producer is not None}
    assert not values["lstm:mkldnn_rnn_layer"].recomputable
    assert any(value.recomputable for name, value in values.items() if name.startswith("gru"))


def writes_unseen(block, hidden):
    x = block.up(hidden)
    y = x.tanh()
    z = x * y
    y.data.mul_(0.5)
    return hidden + block.down(z) * x.sigmoid()


def test_what_autograd_does_not_see_changed_is_retained(toy_model, toy_batch, assert_exact):
    """A block with a write unseen by autograd trains plainly: a checkpoint's second run may end before the write."""
    profile = assert_exact(toy_model(writes_unseen), toy_batch())
    assert "behind autograd's back" in profile.kinds[0].untrusted
    assert profile.kinds[0].block_actions == (BlockAction.PLAIN,)


def test_backward_leaves_the_generator_alone(tiny_gpt2, token_batch):
    """Backward leaves the random generator unchanged (rule R5)."""
    model, batch = tiny_gpt2("eager"), token_batch()
    profile = profile_model(model, batch, AdaccConfig(min_compress_bytes=0))
    with apply_policy(model, uniform_policy(profile, "recompute")):
        for _ in range(3):
            loss = model(**batch).loss
            before = torch.get_rng_state()
            loss.backward()
            assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def chain(record_call):
    """A tape with a version chain and a cheap operator that two values share, and its recorder."""
    torch.manual_seed(0)

    def forward(block, hidden):
        x = block(hidden)
        y = x.tanh()
        x.add_(1.0)
        z = x.sigmoid()
        return (y * z).exp()

    return record_call(forward, nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True))


def environment_of(tape, recorder, at_hand):
    return [recorder.bases[value] if value in at_hand else None for value in range(len(tape.values))]


def outside(tape):
    return frozenset(value.index for value in tape.values if value.source is not None)


def test_every_order_of_unpacks_gives_the_recorded_tensors(chain):
    """In each order, operators run at most once, tensors are the recorded ones, and no value stays live."""
    tape, recorder = chain
    assert verify(tape, recorder.bases) >= {v for v in tape.saved_values() if tape.values[v].source is None}
    store = StorageMap(outside(tape), frozenset(), frozenset())
    own = [slot for slot, ref in enumerate(tape.slots) if tape.values[ref.value].source is None]
    assert len(own) == 5
    for order in itertools.permutations(own):
        environment = environment_of(tape, recorder, outside(tape))
        run_indices = []
        for slot, program in zip(order, schedule(tape, store, order), strict=True):
            for step in program.steps:
                step.run(environment)
                run_indices.append(step.operator.index)
            ref = tape.slots[slot]
            restored = view(environment[ref.value], ref)
            expected = view(recorder.bases[ref.value], ref)
            assert torch.equal(restored, expected)
            assert restored.stride() == expected.stride()
            for value in program.frees:
                environment[value] = None
        assert len(run_indices) == len(set(run_indices))
        assert {value for value, tensor in enumerate(environment) if tensor is not None} == outside(tape)


def test_an_unpack_out_of_order_uses_what_is_at_hand(chain):
    tape, _ = chain
    store = StorageMap(outside(tape), frozenset(), frozenset())
    last = len(tape.slots) - 1
    program = single_program(tape, store, last, set())
    assert [step.operator.index for step in program.steps] == sorted({step.operator.index for step in program.steps})
    assert not program.frees
    assert single_program(tape, store, last, {tape.slots[last].value}).steps == ()


@pytest.mark.parametrize("default_device", ["cpu", "meta"])
def test_views_share_elements_where_both_reach_whatever_the_default_device(default_device):
    def columns(first):
        return TensorRef(0, ((4, 2), (6, 1), first), torch.float32)

    with torch.device(default_device):
        assert share_elements(columns(0), columns(1))
        assert not share_elements(columns(0), columns(2))
