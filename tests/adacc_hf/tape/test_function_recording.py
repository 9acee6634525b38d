"""Recording of an autograd.Function as one operator, and Functions that cannot be run again (rule R7)."""

import logging
from typing import ClassVar

import numpy as np
import pytest
import torch
from function_builders import Scale, ScaleInPlace, in_a_closure, names_of, read_unseen, tanh_of, through, write_unseen
from tape_builders import Block, text
from torch.autograd.function import FunctionCtx, FunctionMeta

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.run.call import Recording
from adacc_hf.tape.tape_cache import TapeCache

CONFIG = AdaccConfig(min_compress_bytes=0)


class ScaleMarked(Scale):
    """x * factor, written into x and declared to autograd."""

    @staticmethod
    def forward(ctx, x, factor=3.0):
        write_unseen(x, read_unseen(x) * factor)
        ctx.factor = factor
        ctx.mark_dirty(x)
        return x


class OfOperators(torch.autograd.Function):
    """tanh, by torch operators alone."""

    @staticmethod
    def forward(ctx, x):
        half = x * 0.5
        out = half.tanh()
        ctx.save_for_backward(half, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        half, out = ctx.saved_tensors
        return gradient * (1 - out * out) * 0.5 + half * 0


class WritesBoth(torch.autograd.Function):
    """2q and 3k, written into both, as by a kernel for rotary embeddings."""

    factors = 2.0, 3.0

    @classmethod
    def forward(cls, ctx, *tensors):
        for tensor, factor in zip(tensors, cls.factors, strict=True):
            if factor != 1.0:
                write_unseen(tensor, read_unseen(tensor) * factor)
        return tensors

    @classmethod
    def backward(cls, ctx, *gradients):
        return tuple(gradient * factor for gradient, factor in zip(gradients, cls.factors, strict=True))


class WritesOne(WritesBoth):
    factors = 2.0, 1.0


class WritesNone(WritesBoth):
    """Copies, by torch operators."""

    @staticmethod
    def forward(ctx, q, k):
        return q * 2.0, k * 3.0


@pytest.mark.parametrize("function", [WritesBoth, WritesOne, WritesNone])
def test_a_function_is_recorded_alike_with_checksums_and_with_all_results(function):
    """Checksums and new versions are the recorder's own work, and no operators of the block."""
    block, x = Block(lambda layer, x: torch.mul(*function.apply(layer(x), x + 1.0)).tanh()), text(2, 3)
    recordings = [Recording("block", block, (x,), {}, keeps_results=keeps) for keeps in (True, False)]
    for recording in recordings:
        recording.run(block)
    complete, released = (recording.recorder.tape() for recording in recordings)
    assert complete.digest == released.digest
    assert released.untrusted is None
    assert not released.operators[-1].is_function


class Counting(Scale):
    """A Function that counts its calls. No output depends on the count."""

    calls = 0

    @staticmethod
    def forward(ctx, x, factor=3.0):
        Counting.calls += 1
        return Scale.forward(ctx, x, factor)


TABLE = torch.full((8,), 3.0)


class Looking(Scale):
    """A Function whose factors are in a global tensor."""

    @staticmethod
    def forward(ctx, x, factor=3.0):
        out = torch.empty_like(x)
        write_unseen(out, read_unseen(x) * read_unseen(TABLE))
        ctx.factor = factor
        return out


KEPT = {}


class Keeping(Scale):
    """A Function that returns the same tensor each time, with new contents."""

    @staticmethod
    def forward(ctx, x, factor=3.0):
        out = KEPT.setdefault(tuple(x.shape), torch.empty_like(x))
        write_unseen(out, read_unseen(x) * factor)
        ctx.factor = factor
        return out


class Drawing(Scale):
    """A Function that draws from torch's default generator."""

    @staticmethod
    def forward(ctx, x, factor=3.0):
        torch.rand(())
        return Scale.forward(ctx, x, factor)


class NeverAlike(Scale):
    """A Function that draws from its own generator."""

    noise = np.random.default_rng(0)

    @staticmethod
    def forward(ctx, x, factor=3.0):
        out = torch.empty_like(x)
        write_unseen(out, read_unseen(x) + NeverAlike.noise.random(x.shape))
        ctx.factor = factor
        return out


class Raising(Scale):
    """A Function that cannot run twice, because it removes its factor from a list."""

    factors: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx, x, factor=3.0):
        if not Raising.factors:
            raise LookupError("no factor is left")
        return Scale.forward(ctx, x, Raising.factors.pop())


def test_a_function_of_operators_keeps_them(toy_model, toy_batch, assert_exact):
    """Replay of a Function of torch operators runs only the operators that a saved tensor needs."""
    profile = assert_exact(toy_model(through(OfOperators.apply)), toy_batch())
    assert not any("OfOperators" in name for name in names_of(profile))
    assert all(value.recomputable for value in profile.kinds[0].activations if value.producer is not None)


def without_gradients(function):
    def apply(x):
        with torch.no_grad():
            return function(x)

    return apply


def test_a_function_without_gradients_is_an_operator_too(toy_model, toy_batch, assert_exact):
    profile = assert_exact(toy_model(through(without_gradients(Scale.apply))), toy_batch())
    assert tanh_of(profile).recomputable


def of_the_blocks_input(block, hidden):
    x = (hidden * 0.5).tanh()  # replay would read hidden after the write
    return x + block.down(ScaleInPlace.apply(hidden).sigmoid())


def saved_before(block, hidden):
    x = block.up(hidden).tanh()  # saves x
    return hidden + block.down(ScaleInPlace.apply(x.detach()).sigmoid()) + x


class Three:
    """A factor that is no number."""

    __array_ufunc__ = None

    def __rmul__(self, other):
        return other * 3.0


IN_PLACE, OTHER_BITS = "writes into its arguments", "gives different bits"


REFUSED = {
    "in place, of the block's input": pytest.param(
        of_the_blocks_input, "ScaleInPlace", IN_PLACE, marks=pytest.mark.gate
    ),
    "in place, told": (through(ScaleMarked.apply), "ScaleMarked", "marks arguments as dirty"),
    "in place, of what was saved": (saved_before, "ScaleInPlace", IN_PLACE),
    "counting": (through(Counting.apply), "Counting", "changes calls"),
    "a global table": (through(Looking.apply), "Looking", "can reach tensors"),
    "a table in a closure": (through(in_a_closure(Scale).apply), "Closure", "can reach tensors"),
    "a tensor that stays": (through(Keeping.apply), "Keeping", "returns the same storage when it runs again"),
    "an object as an argument": (through(Scale.apply, Three()), "Scale", "has an argument of type"),
    "random": (through(Drawing.apply), "Drawing", "draws random numbers"),
    "other bits": (through(NeverAlike.apply), "NeverAlike", OTHER_BITS),
}


@pytest.mark.parametrize(("forward", "name", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_again_is_stored_and_named(toy_model, toy_batch, assert_exact, caplog, forward, name, why):
    """Training is exact, unless the Function itself gives other bits each time."""
    model, batch = toy_model(forward), toy_batch()
    with caplog.at_level(logging.WARNING):
        profile = profile_model(model, batch, CONFIG) if why == OTHER_BITS else assert_exact(model, batch, 3)
    assert not tanh_of(profile).recomputable
    (message,) = [record.getMessage() for record in caplog.records if "autograd.Function" in record.getMessage()]
    assert f".{name} " in message
    assert f"the Function {why}" in message


def test_a_function_that_does_not_run_twice_is_stored(record_call, caplog):
    Raising.factors[:] = [3.0]
    library = TapeCache()
    x = torch.randn(2, 8, requires_grad=True)
    _, recorder = record_call(lambda block, x: Raising.apply(block(x)).tanh(), torch.nn.Linear(8, 8), x)
    with caplog.at_level(logging.WARNING):
        tape = library.verified_tape(recorder)
    assert "cannot be run again (LookupError: no factor is left)" in caplog.text
    assert not any(tape.values[value].name.endswith("tanh") for value in tape.recomputable)


class DeclaringDtype(Scale):
    """A Function that declares the dtype of the gradient that its backward gets."""

    @staticmethod
    def forward(ctx, x, factor=3.0):
        ctx.set_output_grad_dtype(torch.float32)
        return Scale.forward(ctx, x, factor)


@pytest.mark.skipif(not hasattr(FunctionCtx, "set_output_grad_dtype"), reason="new in torch 2.14")
def test_a_function_may_declare_the_dtype_of_its_gradient(toy_model, toy_batch, assert_exact):
    profile = assert_exact(toy_model(through(DeclaringDtype.apply)), toy_batch())
    assert tanh_of(profile).recomputable


class SavingInside(Scale):
    """A Function that enables gradients, so that an operator inside it saves a tensor."""

    @staticmethod
    def forward(ctx, x, factor=3.0):
        with torch.enable_grad():
            x.detach().requires_grad_().sigmoid()
        return Scale.forward(ctx, x, factor)


def test_tensors_saved_inside_a_function_are_slots_of_it(record_call):
    """Slots of a Function are marked: those of its context, and those of operators inside it, but no later ones."""
    _, recorder = record_call(
        lambda block, x: OfOperators.apply(SavingInside.apply(block(x))).tanh(),
        torch.nn.Linear(8, 8),
        torch.randn(2, 8),
    )
    tape = recorder.tape()
    names = [tape.values[tape.slots[slot].value].name for slot in range(len(tape.slots))]
    marked = [names[slot] for slot in sorted(tape.function_slots)]
    assert [name.rpartition(":")[2] for name in marked] == ["sigmoid", "mul", "tanh"], names
    assert len(names) == len(marked) + 2  # the linear layer's input, and the result of the last tanh


def test_torch_is_left_as_it_was(toy_model, toy_batch):
    before = dict(vars(FunctionMeta))
    profile_model(toy_model(through(Scale.apply)), toy_batch(), CONFIG)
    assert dict(vars(FunctionMeta)) == before
