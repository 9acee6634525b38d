"""A compact layer equals a plain one in outputs and gradients, but for its weight's gradient, which is in a
subspace."""

import copy
import shutil
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from adacc_hf.compact.layer import InputGroup, derive_seed, make_compact, make_plain, projection

INPUTS, OUTPUTS = 24, 40


def linear(kind, bias=True, dtype=torch.float32, inputs=INPUTS, outputs=OUTPUTS):
    torch.manual_seed(1)
    layer = nn.Linear(inputs, outputs, bias=bias) if kind is nn.Linear else Conv1D(outputs, inputs)
    return layer.to(dtype)


def compact(layer, rank=8, seed=0):
    twin = copy.deepcopy(layer)
    make_compact(twin, rank, InputGroup(seed))
    return twin


def gradients(layer, x, dy, autocast=None):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        y = layer(x)
    y.backward(dy.to(y.dtype))
    return y, x.grad, None if layer.bias is None else layer.bias.grad


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@settings(max_examples=20)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), bias=st.booleans(), rank=st.integers(1, INPUTS))
def test_output_and_gradients_of_input_and_bias_are_those_of_a_plain_layer(kind, autocast, shape, bias, rank):
    layer = linear(kind, bias or kind is Conv1D)
    torch.manual_seed(2)
    x, dy = torch.randn(*shape, INPUTS), torch.randn(*shape, OUTPUTS)
    ours = gradients(compact(layer, rank), x, dy, autocast)
    plain = gradients(layer, x, dy, autocast)
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine.dtype is theirs.dtype and torch.equal(mine, theirs))


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_the_gradient_of_a_core_is_that_of_the_weight_projected(kind):
    layer = linear(kind, dtype=torch.float64)
    ours = compact(layer)
    x, dy = torch.randn(3, 7, INPUTS, dtype=torch.float64), torch.randn(3, 7, OUTPUTS, dtype=torch.float64)
    gradients(layer, x, dy)
    gradients(ours, x, dy)
    of_weight = layer.weight.grad if kind is nn.Linear else layer.weight.grad.t()
    matrix = ours.group.projection(INPUTS, 8, torch.float64, x.device)
    # Sums of 21 products of the order of 1, in float64.
    torch.testing.assert_close(ours.core.grad, of_weight @ matrix, atol=1e-12, rtol=1e-12)
    assert ours.weight.grad is None


@pytest.mark.parametrize("rank", [32, 64, 128, 256])
def test_one_draw_is_unbiased_and_as_noisy_as_it_has_to_be(rank):
    n, rows = 256, 64
    gradient = torch.randn(rows, n, generator=torch.Generator().manual_seed(0))
    errors, sizes, mean, draws = [], [], torch.zeros(rows, n), 60
    for number in range(draws):
        seed = torch.tensor([derive_seed("test", number), 0])
        matrix = projection(seed, n, rank, torch.float32, torch.device("cpu"))
        small = gradient @ matrix
        back = small @ matrix.t()
        mean += back / draws
        errors.append(float((back - gradient).square().sum() / gradient.square().sum()))
        sizes.append(float(small.square().sum() / gradient.square().sum()))
    noise = (n + 1) / rank
    # 60 draws of 64 rows: the mean of 3840 numbers whose deviation is about their size.
    assert sum(errors) / draws == pytest.approx(noise, rel=0.03, abs=1e-5)
    assert sum(sizes) / draws == pytest.approx(1.0, rel=0.03)
    unbiased = float((mean - gradient).square().sum() / gradient.square().sum())
    assert unbiased == pytest.approx(noise / draws, rel=0.2, abs=1e-5)


def test_periods_seeds_and_groups_draw_other_subspaces_and_no_generator_is_touched():
    def draw(seed, period):
        group = InputGroup(seed)
        group.period = period
        return group.projection(16, 4, torch.float32, torch.device("cpu"))

    before = torch.get_rng_state()
    seeds = (derive_seed(0, "a"), derive_seed(1, "a"), derive_seed(0, "b"))
    matrices = [draw(seed, period) for seed in seeds for period in (0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(matrices[0], draw(derive_seed(0, "a"), 0))
    # Independent vectors of 64 numbers do not correlate by a half.
    flat = torch.stack([one.flatten() for one in matrices])
    assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 0.5


class Saved:
    """Storages that a forward saves, parameters excluded."""

    def __init__(self, *layers):
        self._own = {p.untyped_storage().data_ptr() for layer in layers for p in layer.parameters()}
        self.storages = {}

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __exit__(self, *exception):
        self._hooks.__exit__(*exception)

    @property
    def nbytes(self):
        return sum(self.storages.values())


def test_layers_that_read_one_input_save_one_projection_of_it():
    tokens, rank, group = 50, 6, InputGroup(0)
    layers = [linear(nn.Linear) for _ in range(3)]
    for layer in layers:
        make_compact(layer, rank, group)
    x, other = torch.randn(tokens, INPUTS, requires_grad=True), torch.randn(tokens, INPUTS, requires_grad=True)
    with Saved(*layers) as saved:
        outputs = [layer(x) for layer in layers]
    assert saved.nbytes == 4 * tokens * rank
    with Saved(*layers) as saved:
        outputs += [layers[0](x), layers[1](other)]
    assert saved.nbytes == 2 * 4 * tokens * rank


def test_what_was_changed_in_place_is_projected_anew():
    layers, group = [linear(nn.Linear) for _ in range(2)], InputGroup(0)
    for layer in layers:
        make_compact(layer, 6, group)
    x = torch.randn(5, INPUTS)
    first = layers[0](x)
    x.mul_(2.0)
    layers[1](x).sum().backward()
    alone = compact(linear(nn.Linear), 6)
    alone(x).sum().backward()
    assert torch.equal(layers[1].core.grad, alone.core.grad)
    del first


def test_nothing_outlives_the_input():
    layer = compact(linear(nn.Linear))
    x = torch.randn(5, INPUTS)
    projections = []

    def free(tensor):
        """Keep no saved tensor alive, so that only the group holds the projection."""
        if tensor.shape == (5, 8):
            projections.append(weakref.ref(tensor))

    with torch.autograd.graph.saved_tensors_hooks(free, lambda packed: packed):
        y = layer(x)
    (projection_of_x,) = projections
    assert projection_of_x() is not None, "for the other layers of the group"
    del x
    assert projection_of_x() is None
    del y


def test_a_core_is_in_no_state_dict_and_a_layer_is_plain_again():
    layer = linear(nn.Linear)
    names, weight, before = list(layer.state_dict()), layer.weight, dict(vars(layer))
    make_compact(layer, 8, InputGroup(0))
    assert list(layer.state_dict()) == names
    assert layer.load_state_dict(layer.state_dict()) == ([], [])
    assert not layer.weight.requires_grad
    make_plain(layer)
    assert type(layer) is nn.Linear
    assert vars(layer).keys() == before.keys()
    assert layer.weight is weight
    assert weight.requires_grad
    assert list(dict(layer.named_parameters())) == ["weight", "bias"]


def test_without_gradients_it_is_a_plain_layer():
    layer = linear(nn.Linear)
    x = torch.randn(5, INPUTS)
    with torch.no_grad():
        assert torch.equal(compact(layer)(x), layer(x))


def test_an_output_may_be_changed_in_place():
    layer = compact(linear(nn.Linear))
    layer(torch.randn(5, INPUTS)).relu_().sum().backward()
    assert layer.core.grad is not None


# Dynamo instantiates the stand-in for a function's context, and Inductor scripts helpers of its own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with a C++ compiler")
def test_a_layer_that_inductor_compiled_has_the_same_gradients():
    layer = compact(linear(nn.Linear))
    x = torch.randn(5, INPUTS)
    compiled = torch.compile(copy.deepcopy(layer), backend="inductor", fullgraph=True)
    for one in (layer, compiled):
        one(x).square().sum().backward()
    # Sums of 5 products of the order of 1, in float32, in another order.
    torch.testing.assert_close(compiled.core.grad, layer.core.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(compiled.bias.grad, layer.bias.grad, atol=1e-5, rtol=1e-5)
