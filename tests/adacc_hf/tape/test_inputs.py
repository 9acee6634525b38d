"""Tensors that a call reads: arguments, and tensors attached to modules and parameters, which replay looks up again."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import TapeMismatchError
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.tape.inputs import argument_tensors, attached_tensors, find_attached, find_external
from adacc_hf.tape.tape import Source
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=0)


def scale_of(number):
    return torch.linspace(0.5, 1.5, 8) * number


def give_scales(block):
    block.state = SimpleNamespace(scale=scale_of(1))
    block.by_name = {"default": [scale_of(2)]}
    block.up.weight.scale = scale_of(3)


def scaled(block, hidden):
    x = block.up(hidden) * block.state.scale * block.up.weight.scale
    return hidden + block.down((x * block.by_name["default"][0].unsqueeze(0)).tanh())


@pytest.fixture
def model(toy_model):
    return toy_model(scaled, setup=give_scales)


def test_all_of_them_are_found_again(model):
    block = model.layers[0]
    attached = {str(source): (source, tensor) for source, tensor in attached_tensors(block)}
    assert list(attached) == ["attached up.weight.scale", "module .state.scale", "module .by_name.default.0"]
    for source, tensor in attached.values():
        owner = block.up.weight if source.place == "attached" else block
        assert torch.equal(find_attached(owner, source.path[1:]), tensor)
    assert find_attached(block, ("state", "offset")) is None
    assert find_attached(block, ("by_name", "default", 1)) is None
    assert find_attached(block, ("state",)) is None


def test_what_depends_on_them_is_replayed(model, toy_batch, assert_exact):
    profile = assert_exact(model, toy_batch(), num_policies=3)
    assert all(value.recomputable for value in profile.kinds[0].activations if value.producer is not None)


def replace_scales(block):
    block.state.scale = scale_of(7)
    block.by_name["default"] = [scale_of(5)]


def move_scale(block):
    """Put the scale at another offset of a storage, as a quantized layer does after an adapter was merged."""
    block.state = SimpleNamespace(scale=torch.cat([scale_of(2), scale_of(3)])[3:11])


@pytest.mark.parametrize("change", [replace_scales, move_scale])
def test_others_in_their_place_are_those_of_the_call(model, toy_batch, run_steps, assert_same_steps, change):
    """Replay reads a replaced tensor of the same form. A tensor of another form is not replayed from."""
    batch = toy_batch()
    profile = profile_model(model, batch, CONFIG)
    with apply_policy(model, uniform_policy(profile, "recompute"), CONFIG):
        run_steps(model, batch)
        for block in model.layers:
            change(block)
        ours = run_steps(model, batch)
    assert_same_steps(ours, run_steps(model, batch))


def test_what_went_elsewhere_during_the_recorded_call_is_not_replayed_from(toy_model, toy_batch, assert_exact):
    """8-bit layers move their scales off the weight in their first call."""

    def setup(block):
        block.up.weight.scale, block.state = scale_of(3), SimpleNamespace(scale=None)

    def forward(block, hidden, comes_back):
        if block.state.scale is None:
            block.state.scale, block.up.weight.scale = block.up.weight.scale, None
        scale = block.state.scale
        if comes_back:
            block.state.scale, block.up.weight.scale = None, scale.clone()
        return hidden + block.down((block.up(hidden) * scale).tanh())

    for comes_back in (False, True):
        model = toy_model(partial(forward, comes_back=comes_back), setup=setup)
        batch = toy_batch()
        assert_exact(model, batch, num_policies=2)


def test_another_one_in_its_place_within_a_call_is_refused(toy_model, toy_batch):
    table, states = [scale_of(1)], []

    @torch.compiler.assume_constant_result  # no guard covers the function
    def put():
        for state in states:
            state.scale = table[0]
        return 1.0

    def setup(block):
        give_scales(block)
        states.append(block.state)

    model, batch = toy_model(lambda block, hidden: scaled(block, hidden * put()), setup=setup), toy_batch()
    model(**batch)
    profile = profile_model(model, batch, CONFIG)
    with apply_policy(model, uniform_policy(profile, "recompute"), CONFIG):
        for _ in range(3):
            model(**batch).loss.backward()
        table[0] = scale_of(2)
        with pytest.raises(TapeMismatchError, match=r"replaced the tensor at module \.state\.scale within a call"):
            model(**batch)


class KeepsItsInput(torch.autograd.Function):
    """x * 2, whose node holds x in an attribute, as bitsandbytes' 8-bit product does on a CPU."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 + 0 * ctx.x


@pytest.mark.parametrize("policy", ["retain", "recompute", 0, 1, 2])
def test_what_an_autograd_function_holds_is_not_recomputed(toy_model, toy_batch, run_steps, policy):
    """Tensors that an autograd Function holds are not recomputed, because recomputing them frees no bytes."""

    def forward(block, hidden):
        x = block.up(hidden).tanh()
        return hidden + block.down(KeepsItsInput.apply(x).sigmoid())

    model, batch = toy_model(forward, num_blocks=3), toy_batch(16)
    profile = profile_model(model, batch, CONFIG)
    named = {value.name: value for value in profile.kinds[-1].activations}
    assert not named["block:tanh"].recomputable
    assert named["block:sigmoid"].recomputable
    applied_policy = uniform_policy(profile, policy) if isinstance(policy, str) else random_policy(profile, policy)
    with apply_policy(model, applied_policy, CONFIG):
        run_steps(model, batch, num_steps=2)
        step_memory = measure_step(model, batch)
    assert step_memory.stored_bytes == applied_policy.predicted_stored_bytes
    assert step_memory.peak_bytes == pytest.approx(applied_policy.predicted_peak_bytes, abs=640)  # small tensors


@pytest.mark.filterwarnings("ignore:Sparse")  # torch warns that its sparse tensors may change
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_arguments_are_left_to_torchs_checkpoint(toy_model, toy_batch, assert_exact, layout):
    """Blocks with sparse arguments, such as a graph's adjacency, run under torch's checkpoint."""
    adjacency = torch.eye(6).to_sparse(layout=layout)

    def forward(block, hidden, adjacency):
        return hidden + block.down(torch.stack([adjacency @ x for x in block.up(hidden)]).tanh())

    model = toy_model(forward, kwargs_of=lambda x: {"adjacency": adjacency})
    profile = assert_exact(model, toy_batch(), num_policies=1)
    assert all("sparse" in kind.untrusted for kind in profile.kinds)


def test_argument_tensors_are_found_in_containers():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    paths_and_tensors = list(argument_tensors((a, [1, (b,)]), {"k": {"m": c}, "n": None}))
    assert [path for path, _ in paths_and_tensors] == [(0,), (1, 1, 0), ("k", "m")]
    assert [tensor.numel() for _, tensor in paths_and_tensors] == [1, 2, 3]


class GatheringTable(dict):
    """Table of parameters whose `[]` communicates with other ranks, as that of DeepSpeed's ZeRO 3 does."""

    def __getitem__(self, name):
        raise AssertionError(f"a look-up has gathered {name}")


def test_a_look_up_gathers_no_parameter():
    block = torch.nn.Linear(2, 2)
    weight = block.weight
    weight.scale = torch.ones(1)
    block._parameters = GatheringTable(block._parameters)
    assert find_external(Source("parameter", ("weight",)), block, (), {}) is weight
    assert torch.equal(find_external(Source("attached", ("weight", "scale")), block, (), {}), weight.scale)
