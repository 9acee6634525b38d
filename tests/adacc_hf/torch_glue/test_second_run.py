"""The second run of a checkpointed call gives the numbers of the first, or training stops."""

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adacc_hf.artifacts.errors import CheckpointMismatchError
from adacc_hf.torch_glue import second_run
from adacc_hf.torch_glue.rng_state import RandomStates
from adacc_hf.torch_glue.second_run import checkpoint_call
from adacc_hf.torch_glue.tensors import weighted_sum

SCALE = {"global": 1.0}


class Block(nn.Module):
    factor = 1.0

    def __init__(self, last=nn.Identity()) -> None:  # noqa: B008
        super().__init__()
        self.up, self.down, self.drop, self.last = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1), last
        self.scale, self.layers = 1.0, {"scale": 1.0}

    def forward(self, x):
        scale = self.scale * SCALE["global"] * self.layers["scale"] * self.factor
        return self.last(x + self.drop(self.down(F.gelu(self.up(x) * scale))))


class Sorting(Block):
    def forward(self, x):
        order = self.up(x).sum(-1).argsort(-1)
        return x + self.down(F.gelu(self.up(x.gather(1, order.unsqueeze(-1).expand_as(x)))))


class Overwriting(Block):
    def forward(self, x):
        hidden = self.up(x)
        hidden.mul_(2.0)
        return x + self.down(hidden.relu_())


class Differentiating(Block):
    def forward(self, x):
        (slope,) = torch.autograd.grad(self.up(x).tanh().sum(), x, create_graph=True)
        return x + slope + self.down(F.gelu(self.up(x)))


def gradients(block, is_checkpointed, change=lambda block: None, restore=lambda block: None):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, requires_grad=True)
    change(block)
    result = checkpoint_call(block, block, x) if is_checkpointed else block(x)
    restore(block)
    result.square().sum().backward()
    return [x.grad, *(parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(
    "build",
    [Block, lambda: Block(nn.RReLU()), lambda: Block(nn.Dropout(0.3)), Sorting, Overwriting, Differentiating],
    ids=["dropout", "RReLU last", "dropout last", "sorting", "in place", "autograd.grad"],
)
def test_the_gradients_are_those_of_plain_training(build):
    block = build().train()
    plain = gradients(copy.deepcopy(block), is_checkpointed=False)
    for _ in range(3):
        assert all(map(torch.equal, gradients(block, is_checkpointed=True), plain))
        block.zero_grad()


def test_a_run_ends_at_its_last_saved_tensor_only_if_that_gives_the_same_bits():
    plain, noisy = Block(), Block(nn.RReLU())
    for block in (plain, noisy):
        assert not second_run.may_end_early(block)
        gradients(block, is_checkpointed=True)
    assert second_run.may_end_early(plain)
    assert not second_run.may_end_early(noisy)


class FilledLater(nn.Module):
    """Fills a tensor after it was saved, as kernels may. The second run finds it with the bits of the first."""

    def forward(self, x):
        result = x * self.noise
        self.noise.data.fill_(2.0)
        return result


def test_a_run_whose_saved_tensor_is_filled_later_never_ends_early():
    block = FilledLater()
    block.noise = torch.zeros(8)
    checkpoint_call(block, block, torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert not second_run.may_end_early(block)


@pytest.mark.parametrize(("last", "may_end_early"), [(nn.Identity(), True), (nn.RReLU(), False)])
def test_a_second_run_on_lossy_inputs_may_differ_and_ends_where_it_gives_its_own_bits(last, may_end_early):
    block, x = Block(last).train(), torch.randn(2, 5, 8, requires_grad=True)
    hold = lambda: lambda: (block, ((x.detach() * 1.01).requires_grad_(),))  # noqa: E731
    result = checkpoint_call(block, block, x, hold=hold, has_same_inputs=False)
    result.sum().backward()
    assert second_run.may_end_early(block) == may_end_early


def test_a_measurement_in_another_thread_changes_nothing():
    call = Block(), True, True
    with ThreadPoolExecutor(1) as thread, second_run.measuring():
        assert second_run.comparison(*call) is None
        assert thread.submit(second_run.comparison, *call).result() is not None


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_a_checkpointed_function_throws_the_same_dice_in_backward(draw):
    def skips(x):
        return x.exp() if draw() < 0.5 else x.sin().exp()

    x = torch.ones(1, requires_grad=True)
    state = RandomStates()
    plain = torch.autograd.grad(sum(skips(x) for _ in range(12)), x)
    state.restore()
    outputs = [checkpoint_call(nn.Identity(), skips, x) for _ in range(12)]
    state = RandomStates()
    assert torch.equal(*torch.autograd.grad(sum(outputs), x), *plain)
    assert not state.have_advanced()


@pytest.mark.parametrize("size", [2, 1001, 2**18, 2**19 + 3])
def test_a_checksum_on_a_gpu_depends_on_each_bit_and_on_the_order(size):
    elements = torch.randint(0, 255, (size,), dtype=torch.uint8)
    elements[0], elements[-1] = 3, 5
    flipped, swapped = elements.clone(), elements.flip(0)
    flipped[size // 2] ^= 1
    signs = elements.clone()
    signs[7::8] ^= 128  # sums of 64-bit words would wrap around
    checksums = [int(weighted_sum(each)) for each in (elements, elements.clone(), flipped, swapped, signs)]
    assert checksums[0] == checksums[1]
    assert len(set(checksums)) == (4 if size > 2 else 3)


def hook(block, args, output):
    return output * 1.5


def hooked(block):
    block.handle = block.up.register_forward_hook(hook)


CHANGES = {
    "attribute": (lambda b: setattr(b, "scale", 2.0), lambda b: setattr(b, "scale", 1.0)),
    "item": (lambda b: b.layers.update(scale=2.0), lambda b: b.layers.update(scale=1.0)),
    "global": (lambda b: SCALE.update({"global": 2.0}), lambda b: SCALE.update({"global": 1.0})),
    "class attribute": (lambda b: setattr(Block, "factor", 2.0), lambda b: setattr(Block, "factor", 1.0)),
    "hook": (hooked, lambda b: b.handle.remove()),
    "dropout rate": (lambda b: setattr(b.drop, "p", 0.5), lambda b: setattr(b.drop, "p", 0.1)),
    "submodule": (lambda b: setattr(b, "last", nn.ReLU()), lambda b: setattr(b, "last", nn.Identity())),
    "weight": (lambda b: b.up.weight.data.mul_(2.0), lambda b: b.up.weight.data.div_(3.0)),
    "mode": (lambda b: b.eval(), lambda b: b.train()),  # found only if the second run is complete, as numbers are equal
}


@pytest.mark.parametrize("num_calls_before", [0, 2])
def test_an_error_in_the_second_run_is_raised_as_it_is(num_calls_before):
    """Memory may run out in backward, and a step is then repeated."""

    def fail(*_):
        raise torch.OutOfMemoryError

    block = Block().train()
    for _ in range(num_calls_before):
        gradients(block, is_checkpointed=True)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(block, True, restore=lambda block: block.drop.register_forward_pre_hook(fail))


@pytest.mark.parametrize(("name", "num_calls_before"), [*product(list(CHANGES)[:-1], [0, 2]), ("mode", 0)])
def test_a_change_before_backward_stops_training(name, num_calls_before):
    block = Block().train()
    for _ in range(num_calls_before):
        gradients(block, is_checkpointed=True)
    with pytest.raises(CheckpointMismatchError, match="changed between forward and backward"):
        gradients(block, True, *CHANGES[name])
