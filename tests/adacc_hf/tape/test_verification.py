"""Rule R7: what replay cannot recompute is found out, on blocks made to deceive it."""

import numpy as np
import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.tape.verification import verify
from adacc_hf.torch_glue.memory import MemoryMeter


@torch.library.custom_op("adacc_test::scale_and_write", mutates_args=())
def scale_and_write(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Doubles x; its schema hides that it counts its calls in `counter`."""
    counter.numpy()[:] += 1
    return x * 2


@torch.library.custom_op("adacc_test::scale_and_degrade", mutates_args=())
def scale_and_degrade(x: torch.Tensor) -> torch.Tensor:
    """Doubles x; its schema hides that it then changes x."""
    doubled = x * 2
    x.detach().numpy()[:] *= 1.5
    return doubled


@torch.library.custom_op("adacc_test::thin_out", mutates_args=())
def thin_out(x: torch.Tensor) -> torch.Tensor:
    """Multiplies with random numbers of torch's generator, untagged."""
    return x * torch.rand(x.shape)


_noise = np.random.default_rng(0)


@torch.library.custom_op("adacc_test::never_twice_alike", mutates_args=())
def never_twice_alike(x: torch.Tensor) -> torch.Tensor:
    """Adds numbers that torch's seed does not reach."""
    return x + torch.from_numpy(_noise.random(tuple(x.shape), dtype=np.float32))


scale_and_write.register_autograd(lambda ctx, gradient: (2 * gradient, None))
scale_and_degrade.register_autograd(lambda ctx, gradient: 2 * gradient)
thin_out.register_autograd(lambda ctx, gradient: gradient)
never_twice_alike.register_autograd(lambda ctx, gradient: gradient)


class FillsEmpty(torch.autograd.Function):
    """Triples its input by writing into an empty tensor where no dispatcher sees it, as raw kernels do."""

    @staticmethod
    def forward(ctx, x):
        result = torch.empty_like(x)
        result.numpy()[:] = x.numpy() * 3
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def add_buffer(block):
    block.register_buffer("count", torch.zeros(8))


def counts_in_hiding(block, hidden):
    return hidden + block.down((scale_and_write(block.up(hidden), block.count) + block.count).tanh())


def degrades_its_input(block, hidden):
    x = block.up(hidden)
    return hidden + block.down(scale_and_degrade(x).tanh()) * x.sigmoid()


def thins_out(block, hidden):
    return hidden + block.down(thin_out(block.up(hidden)).tanh())


def fills_empty(block, hidden):
    return hidden + block.down(FillsEmpty.apply(block.up(hidden)).tanh())


@pytest.mark.parametrize("forward", [counts_in_hiding, degrades_its_input, thins_out])
def test_what_replay_cannot_recompute_is_not_recomputable(toy_model, toy_batch, assert_exact, forward):
    """Rule R7: training under liars stays that of plain training, generators and buffers included."""
    profile = assert_exact(toy_model(forward, setup=add_buffer), toy_batch())
    kind = profile.kinds[0]
    tanh = next(value for value in kind.activations if value.name.endswith("tanh"))
    assert not tanh.recomputable


def test_an_autograd_function_that_fills_memory_unseen_is_one_operator(toy_model, toy_batch, assert_exact):
    profile = assert_exact(toy_model(fills_empty), toy_batch())
    assert profile.kinds[0].untrusted is None
    tanh = next(value for value in profile.kinds[0].activations if value.name.endswith("tanh"))
    assert tanh.recomputable


def test_nondeterminism_that_no_seed_reaches_is_found(toy_model, toy_batch):
    """Rule R7. No two runs are alike here, so there is no plain training to compare with."""

    def forward(block, hidden):
        return hidden + block.down(never_twice_alike(block.up(hidden)).tanh())

    model = toy_model(forward)
    profile = profile_model(model, toy_batch(), AdaccConfig(min_compress_bytes=0))
    tanh = next(value for value in profile.kinds[0].activations if value.name.endswith("tanh"))
    assert not tanh.recomputable


def test_verification_holds_one_result_at_a_time(record_call):
    def forward(block, hidden):
        for _ in range(12):
            hidden = block(hidden).tanh()
        return hidden

    hidden = torch.randn(256, 64, requires_grad=True)
    tape, recorder = record_call(forward, nn.Linear(64, 64), hidden)
    with MemoryMeter.for_device(torch.device("cpu")) as meter, torch.no_grad():
        assert len(verify(tape, recorder.bases)) == 24
    assert meter.peak_bytes < 2 * hidden.untyped_storage().nbytes()
