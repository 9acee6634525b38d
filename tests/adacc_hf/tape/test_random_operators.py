"""Random operators: which of them replay may redraw, and from which generator state (rule R5).

test_recorder.py tests how recorders detect random operators.
"""

import pytest
import torch
from torch import nn

from adacc_hf.tape.replay_check import verify


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)


def given_x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def random_operators(tape):
    return [operator for operator in tape.operators if operator.random]


def dropout(block, x):
    return nn.functional.dropout(block.up(x), 0.3)


def native_dropout(block, x):
    """Run native_dropout, which a CUDA device uses."""
    return torch.native_dropout(block.up(x), 0.3, True)[0]


def stochastic_depth(block, x):
    return block.up(x) * torch.rand(x.shape[0], 1, 1).add(0.5).floor()


def noise(block, x):
    return block.up(x) * torch.randn_like(x)


@pytest.mark.parametrize("forward", [dropout, native_dropout, stochastic_depth, noise])
def test_what_is_drawn_is_drawn_again_from_the_state_before(record_call, forward):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tape, recorder = record_call(forward, Linear(), given_x(2, 3, 8))
    after = torch.get_rng_state()
    refused = verify(tape, recorder.bases)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(after, before)
    (draw_operator,) = random_operators(tape)
    assert draw_operator.may_run_again
    externals = {v.index for v in tape.values if v.source is not None}
    assert {*draw_operator.results(), *tape.saved_values()} - refused == externals & {*tape.saved_values()}
    assert tape.is_generator_state(draw_operator.generator)
    assert not tape.is_held_elsewhere(draw_operator.generator)
    assert tape.values[draw_operator.generator].nbytes == before.nbytes


def own_generator(block, x):
    return block.up(x) * torch.empty_like(x).bernoulli_(0.5, generator=torch.Generator().manual_seed(1))


def of_data(block, x):
    return block.up(x) * torch.bernoulli(torch.sigmoid(x.detach()))


def random_relu(block, x):
    return nn.functional.rrelu(block.up(x), training=True, inplace=True)


def twice_with_nothing_saved_between(block, x):
    return block.up(x) * (torch.empty_like(x).bernoulli_(0.5) + torch.empty_like(x).bernoulli_(0.5))


@pytest.mark.parametrize(
    ("forward", "able"),
    [
        (own_generator, [False]),
        (of_data, [False]),
        (random_relu, [False]),
        (twice_with_nothing_saved_between, [True, False]),
    ],
)
def test_what_no_state_is_taken_for_is_not_drawn_again(record_call, forward, able):
    tape, recorder = record_call(forward, Linear(), given_x(2, 3, 8))
    assert [operator.may_run_again for operator in random_operators(tape)] == able
    refused = verify(tape, recorder.bases)
    assert [not refused.isdisjoint(operator.results()) for operator in random_operators(tape)] == able


def test_a_draw_from_a_seed_that_the_block_sets_is_found_out(record_call):
    def forward(block, x):
        y = block.up(x)
        torch.manual_seed(7)
        return nn.functional.dropout(y, 0.5)

    tape, recorder = record_call(forward, Linear(), given_x(2, 3, 8))
    (draw_operator,) = random_operators(tape)
    assert draw_operator.may_run_again
    (mask,) = [value for value in tape.saved_values() if tape.values[value].source is None]
    assert mask not in verify(tape, recorder.bases)
