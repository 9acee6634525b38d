"""Calls under torch's checkpoint whose inputs stay encoded until backward."""

import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.run.checkpointed_call import run_checkpointed

INT8 = get_codec("int8")


class Block(nn.Module):
    """A block with dropout and two inputs that saves more than its inputs."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, hidden, beside=None):
        x = torch.nn.functional.dropout(self.up(hidden).tanh(), 0.3)
        x = self.down(x)
        return hidden + (x if beside is None else x * beside)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


def call_of(block, names, tensors):
    """Return fn, args and kwargs of a call with the tensors by name, or by position where the name is None."""
    args = tuple(tensor for name, tensor in zip(names, tensors, strict=True) if name is None)
    kwargs = {name: tensor for name, tensor in zip(names, tensors, strict=True) if name is not None}
    return partial(block.forward, **kwargs), args, kwargs


def gradients(run, leaves, block, dtype=None):
    """Return gradients of leaves and parameters. The leaves are inputs of an operator before the block."""
    for tensor in [*leaves, *block.parameters()]:
        tensor.grad = None
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        result = run([leaf * 1.5 for leaf in leaves])
    (result.float() ** 2).sum().backward()
    return [tensor.grad for tensor in [*leaves, *block.parameters()]]


class _FromDecoded(torch.autograd.Function):
    """A Function with the value of `exact` and the gradient of `approximate`."""

    @staticmethod
    def forward(ctx, exact, approximate):
        return exact.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


@settings(deadline=None, max_examples=25)
@given(
    coded=st.sets(st.sampled_from([0, 1]), min_size=1),
    names=st.sampled_from([(None, None), (None, "beside"), ("hidden", "beside")]),
    codec=st.sampled_from(["int8", "token_int4"]),
    dtype=st.sampled_from([None, torch.bfloat16]),
    rows=st.integers(1, 5),
)
def test_the_second_forward_is_that_of_the_decoded_inputs(coded, names, codec, dtype, rows):
    torch.manual_seed(0)
    block = Block()
    leaves = [torch.randn(rows, 7, 64, requires_grad=True) for _ in range(2)]
    coder = get_codec(codec)
    places = {place: names[place] or place for place in coded}

    def ours(tensors):
        fn, args, kwargs = call_of(block, names, tensors)
        return run_checkpointed(block, fn, args, kwargs, {(places[i],): (coder, coder) for i in coded})

    def reference(tensors):
        state = torch.get_rng_state()
        decoded = list(tensors)
        for i in coded:
            value = coder.decode(coder.encode(tensors[i].detach()))
            # The decoded value, with the autograd history of the exact one.
            decoded[i] = value + (tensors[i] - tensors[i].detach())
        approximate = block(*decoded)
        torch.set_rng_state(state)
        with torch.no_grad():
            exact = block(*tensors)
        return _FromDecoded.apply(exact, approximate)

    assert all(map(torch.equal, gradients(ours, leaves, block, dtype), gradients(reference, leaves, block, dtype)))


@pytest.mark.parametrize("name", [None, "hidden"])
def test_an_encoded_input_is_let_go(block, name):
    leaf = torch.randn(4, 64, requires_grad=True)
    hidden = leaf * 2
    died = []
    weakref.finalize(hidden.untyped_storage(), died.append, True)
    fn, args, kwargs = call_of(block, (name,), (hidden,))
    result = run_checkpointed(block, fn, args, kwargs, {(name or 0,): (INT8, INT8)})
    del hidden, fn, args, kwargs
    gc.collect()
    assert died
    result.sum().backward()
    assert leaf.grad is not None


def test_a_keyword_beside_tiles_is_encoded(block):
    names, tiling = (None, "beside"), Tiling(modules=("down",), backward_only=("down",), num_tiles=2)
    leaves, coder = [torch.randn(4, 64, requires_grad=True) for _ in range(2)], Counting()

    def in_tiles(tensors):
        fn, args, kwargs = call_of(block, names, tensors)
        return run_checkpointed(block, fn, args, kwargs, {("beside",): (INT8, coder)}, tiling=tiling)

    assert all(gradient is not None for gradient in gradients(in_tiles, leaves, block))
    assert coder.num_encoded == 1


class Counting:
    """A codec that counts its calls of encode."""

    def __init__(self):
        self.num_encoded = 0

    def encode(self, tensor):
        self.num_encoded += 1
        return INT8.encode(tensor)

    def decode(self, payload):
        return INT8.decode(payload)


def plain_gradients(block, leaf, make):
    block.zero_grad()
    leaf.grad = None
    torch.manual_seed(1)
    block(make(leaf)).sum().backward()
    return [leaf.grad, *(parameter.grad for parameter in block.parameters())]


@pytest.mark.parametrize(
    "make",
    [
        lambda leaf: (leaf * 2).t().contiguous().t(),
        lambda leaf: torch.cat([leaf, leaf])[:4],
        lambda leaf: torch.cat([leaf, leaf])[4:],
        lambda leaf: (leaf * 2)[:, :1].expand(4, 64),
    ],
    ids=["transposed", "begin of a larger storage", "end of a larger storage", "expanded"],
)
def test_an_input_that_does_not_fill_its_storage_is_held_as_it_is(block, make):
    leaf, coder = torch.randn(4, 64, requires_grad=True), Counting()
    expected = plain_gradients(block, leaf, make)
    block.zero_grad()
    leaf.grad = None
    torch.manual_seed(1)
    hidden = make(leaf)
    run_checkpointed(block, block.forward, (hidden,), {}, {(0,): (INT8, coder)}).sum().backward()
    assert coder.num_encoded == 0
    assert all(map(torch.equal, [leaf.grad, *(p.grad for p in block.parameters())], expected))


@pytest.mark.parametrize("arguments", [(), (None,), ("text",), (torch.ones(3, dtype=torch.long),)])
def test_a_place_without_a_tensor_for_the_codec_changes_nothing(arguments):
    coder = Counting()
    result = run_checkpointed(nn.Identity(), lambda *args: args, arguments, {}, {(0,): (INT8, coder)})
    assert len(result) == len(arguments)
    assert coder.num_encoded == 0


def test_an_input_that_the_call_changes_is_held_as_it_is(block):
    """The input is held unencoded, because the tensor itself is restored before the second forward."""

    def overwrites(hidden):
        return block(hidden) + hidden.detach().mul_(2)

    leaf, coder = torch.randn(4, 64, requires_grad=True), Counting()
    run_checkpointed(block, overwrites, (leaf * 2,), {}, {(0,): (INT8, coder)})
    assert coder.num_encoded == 0


@pytest.mark.parametrize("wants_gradients", [False, True])
def test_the_second_forward_is_given_what_wants_gradients_as_the_first(block, wants_gradients, capsys):
    """The same inputs require gradients in both, so that autograd saves the same tensors."""

    def says(hidden):
        print(hidden.requires_grad)  # a list would be restored before the second forward
        return block(hidden)

    hidden = torch.randn(4, 64, requires_grad=wants_gradients)
    run_checkpointed(block, says, (hidden,), {}, {(0,): (INT8, INT8)}).sum().backward()
    assert capsys.readouterr().out == f"{wants_gradients}\n" * 2
