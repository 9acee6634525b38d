"""Blocks: how they are wrapped in a function, and unwrapped without a trace."""

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from recomputed_models import recompute_all
from torch import nn
from torch.autograd import forward_ad
from transformers import DynamicCache, EncoderDecoderCache, SwinConfig, SwinForImageClassification

from adacc_hf import AdaccConfig, apply_policy, profile_model, remove_policy
from adacc_hf.artifacts.errors import NestedHooksError
from adacc_hf.run.blocks import Installation
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.compat import FLAG, GradientCheckpointingLayer, PreTrainedModel

CONFIG = AdaccConfig(min_compress_bytes=0)
NAMES = [n for n in ("gradient", "activation") if hasattr(PreTrainedModel, f"{n}_checkpointing_enable")]
"""Names of Transformers' checkpointing flags: both, or the first alone before 5.23."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden, scale=1.0):
        return hidden + self.linear(hidden).tanh() * scale


class PlainModel(nn.Module):
    """A model without Transformers."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x):
        hidden = self.inlet(x)
        for layer in self.layers:
            hidden = layer(hidden, scale=2.0)
        return SimpleNamespace(loss=hidden.square().mean())


LAYERS = AdaccConfig(min_compress_bytes=0, block_classes=("Layer",))
LINEARS = AdaccConfig(min_compress_bytes=0, block_classes=("Linear",))


@pytest.fixture
def plain_model(one_thread):
    torch.manual_seed(0)
    return PlainModel()


@pytest.fixture(scope="module")
def recompute_policy(tiny_gpt2, token_batch):
    return uniform_policy(profile_model(tiny_gpt2(), token_batch(), CONFIG), "recompute")


@pytest.fixture
def recomputing(tiny_gpt2, token_batch, recompute_policy):
    """(model, batch, policy that recomputes everything)."""
    return tiny_gpt2(), token_batch(), recompute_policy


def state_of(model):
    """Return all state of a module, hooks and attributes included."""
    return {name: {**module.__dict__} for name, module in model.named_modules()}


@pytest.mark.parametrize("wrap", [lambda cache: cache, lambda cache: EncoderDecoderCache(cache, DynamicCache())])
def test_a_cache_is_not_filled_in_training_and_must_hold_no_keys(recomputing, wrap):
    """A cache that holds keys is refused: a prefix, or what plain training has put into it in an earlier forward."""
    model, batch, policy = recomputing
    cache, prefix = DynamicCache(), DynamicCache()
    for layer in range(2):
        prefix.update(*torch.randn(2, len(batch["input_ids"]), 4, 3, 8), layer)
    with apply_policy(model, policy):
        model(**batch, past_key_values=cache, use_cache=True).loss.backward()
        assert cache.get_seq_length() == 0
        for refused in (cache, wrap(prefix)):
            with pytest.raises(ValueError, match="gets past_key_values that contain keys"):
                model(**batch, past_key_values=refused, use_cache=True)


def test_removal_leaves_no_trace(recomputing, run_steps, assert_same_steps):
    model, batch, policy = recomputing
    before, keys = state_of(model), list(model.state_dict())
    plain = run_steps(model, batch)
    handle = apply_policy(model, policy)
    assert list(model.state_dict()) == keys
    run_steps(model, batch)
    assert list(model.state_dict()) == keys
    handle.remove()
    assert state_of(model) == before
    handle.remove()
    assert state_of(model) == before
    assert_same_steps(run_steps(model, batch), plain)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_layers_inside_a_block_are_not_checkpointed_meanwhile():
    torch.manual_seed(0)
    config = SwinConfig(image_size=16, patch_size=4, embed_dim=8, depths=[1, 2], num_heads=[1, 2], window_size=2)
    model = SwinForImageClassification(config).train()
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    plain_bytes = profile_model(model, batch, CONFIG).plain_stored_bytes
    switch_on = getattr(model, f"{NAMES[-1]}_checkpointing_enable")
    switch_on()
    assert profile_model(model, batch, CONFIG).plain_stored_bytes == plain_bytes
    inner = model.swin.encoder.layers[0].blocks[0]
    installation = Installation(model)
    switch_on()
    assert not inner.gradient_checkpointing
    installation.remove()
    assert inner.gradient_checkpointing


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_a_copy_made_meanwhile_trains_plainly(recomputing, run_steps, assert_same_steps, how):
    model, batch, policy = recomputing
    plain = run_steps(model, batch)
    with apply_policy(model, policy) as handle:
        run_steps(model, batch, num_steps=1)
        calls = [function.num_calls for function in handle.installation.blocks.values()]
        twin = copied(model, how)
        assert_same_steps(run_steps(twin, batch), plain)
        assert [function.num_calls for function in handle.installation.blocks.values()] == calls
        getattr(twin, f"{NAMES[-1]}_checkpointing_enable")()
        getattr(twin, f"{NAMES[-1]}_checkpointing_disable")()
        assert_same_steps(run_steps(model, batch), plain)


def copied(model, how):
    if how == "deepcopy":
        return copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_uncalled_blocks_are_reported(recomputing):
    """A block whose forward was replaced never reaches its function, and is reported."""
    model, batch, policy = recomputing
    with apply_policy(model, policy) as handle:
        block = model.transformer.h[1]
        forward, block.forward = block.forward, lambda hidden, *args, **kwargs: hidden
        model(**batch).loss.backward()
        assert handle.uncalled() == ["transformer.h.1"]
        block.forward = forward
        model(**batch).loss.backward()
        assert handle.uncalled() == []


def test_outer_hooks_are_refused(recomputing):
    model, batch, policy = recomputing
    before = state_of(model)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(NestedHooksError, match="activation offloading"):
        profile_model(model, batch, CONFIG)
    with apply_policy(model, policy), pytest.raises(NestedHooksError, match="an outer checkpoint"):
        torch.utils.checkpoint.checkpoint(lambda: model(**batch).loss, use_reentrant=False)
    assert state_of(model) == before


def test_named_classes_of_a_plain_model(plain_model, run_steps, assert_same_steps):
    batch = {"x": torch.randn(2, 8)}
    before = state_of(plain_model)
    plain = run_steps(plain_model, batch)
    profile = profile_model(plain_model, batch, LAYERS)
    assert [block.name for block in profile.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert len(profile.kinds) == 1
    assert state_of(plain_model) == before
    with apply_policy(plain_model, uniform_policy(profile, "recompute"), LAYERS) as handle:
        assert_same_steps(run_steps(plain_model, batch), plain)
        assert handle.uncalled() == []
        loss = plain_model.eval()(**batch).loss
        replaced = plain_model.layers[0].forward = torch.sin
    assert plain_model.layers[0].__dict__.pop("forward") is replaced
    assert state_of(plain_model.train()) == before
    assert torch.equal(plain_model(**batch).loss, loss)


def test_a_class_with_a_replaced_forward_follows_its_policy(
    tiny_gpt2, token_batch, run_steps, assert_same_steps, monkeypatch
):
    """A patch of the class's forward, as Liger's, may bypass Transformers' checkpointing, but not the policy."""
    model, batch = tiny_gpt2(), token_batch()
    block_class = type(model.transformer.h[0])
    forward = getattr(block_class.forward, "__wrapped__", block_class.forward)
    plain = run_steps(model, batch)
    monkeypatch.setattr(block_class, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs))
    with recompute_all(model, batch, CONFIG) as handle:
        assert_same_steps(run_steps(model, batch), plain)
        assert handle.uncalled() == []


def test_a_layer_of_a_derived_class_follows_its_policy(tiny_gpt2, token_batch, run_steps, assert_same_steps):
    """Transformers wraps the forward of a derived class (as FSDP2's) again, and each wrapper tests the flag."""
    model, batch = tiny_gpt2(), token_batch()
    for block in model.transformer.h:
        block.__class__ = type("Derived", (type(block),), {})
    plain = run_steps(model, batch)
    with recompute_all(model, batch, CONFIG) as handle:
        assert_same_steps(run_steps(model, batch), plain)
        assert not handle.tape_cache.fallbacks
        assert all(executor.known_shapes for executor in handle.plans.strategies.values())


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")
def test_checkpointing_may_be_off_to_generate(tiny_gpt2, token_batch, run_steps, assert_same_steps):
    """TRL asks whether checkpointing is on, switches it off to generate, and on again."""
    model, batch = tiny_gpt2(), token_batch()
    plain = run_steps(model, batch)
    model.gradient_checkpointing_enable()
    before = {name: {**vars(module)} for name, module in model.named_modules()}
    with recompute_all(model, batch, CONFIG) as handle:
        for _ in range(2):
            assert model.is_gradient_checkpointing
            model.gradient_checkpointing_disable()
            with torch.no_grad():
                model(**batch)
            model.gradient_checkpointing_enable()
            assert_same_steps(run_steps(model, batch), plain)
        assert handle.uncalled() == []
    assert state_of(model).keys() == before.keys()
    assert all(block.gradient_checkpointing is True for block in model.transformer.h)


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("is_on", [False, True])
def test_checkpointing_that_is_switched_in_a_run_is_as_switched_after_it(
    tiny_gpt2, token_batch, run_steps, assert_same_steps, is_on
):
    """The blocks follow the policy. Afterwards, checkpointing is as the user has switched it during the run."""
    model, switched, batch = tiny_gpt2(), tiny_gpt2(), token_batch()
    plain = run_steps(model, batch)
    with recompute_all(model, batch, CONFIG) as handle:
        for each in (model, switched):
            each.gradient_checkpointing_enable() if is_on else each.gradient_checkpointing_disable()
        assert model.is_gradient_checkpointing is is_on
        assert_same_steps(run_steps(model, batch), plain)
        assert handle.uncalled() == []
    for module, expected in zip(model.modules(), switched.modules(), strict=True):
        assert module.__dict__.keys() == expected.__dict__.keys()
        assert module.__dict__.get(FLAG) is expected.__dict__.get(FLAG)


# Caches that blocks only read.


class Reader(GradientCheckpointingLayer):
    _can_checkpoint_with_cache = True

    def __init__(self, index):
        super().__init__()
        self.up, self.down, self.layer_idx = nn.Linear(8, 8), nn.Linear(8, 8), index

    def forward(self, hidden, past_key_values=None, scale=1.0):
        if past_key_values is not None:
            keys, values = past_key_values.layers[0].keys[:, 0], past_key_values.layers[0].values[:, 0]
            hidden = hidden + (self.up(hidden) @ keys.transpose(1, 2)).softmax(-1) @ values * scale
        return hidden + self.down(self.up(hidden).tanh())


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.layers = nn.Linear(8, 16), nn.ModuleList(Reader(index) for index in range(2))
        self.length, self.reads, self.by_position, self.trains_cache = 5, True, False, True

    def forward(self, x):
        cache = DynamicCache()
        keys, values = self.encoder(x[:, : self.length]).chunk(2, -1)
        keys = keys if self.trains_cache else keys.detach()
        cache.update(keys[:, None], values[:, None], 0)
        cache_argument = cache if self.reads else None
        hidden = x
        for layer in self.layers:
            hidden = (
                layer(hidden, cache_argument) if self.by_position else layer(hidden, past_key_values=cache_argument)
            )
        return SimpleNamespace(loss=hidden.square().mean())


@pytest.mark.skipif(not hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache"), reason="since 5.23")
@pytest.mark.parametrize(
    "change", [{"length": 3}, {"by_position": True}, {"trains_cache": False}, {"reads": False}], ids=str
)
def test_caches_that_are_only_read_stay(run_steps, assert_same_steps, one_thread, change):
    def build():
        torch.manual_seed(0)
        return Reading().train()

    def steps(model):
        losses = run_steps(model, batch)
        vars(model).update(change)
        return [*losses, *run_steps(model, batch), *run_steps(model, {"x": batch["x"][:1]})]

    batch = {"x": torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))}
    plain, model = steps(build()), build()
    profile = profile_model(model, batch, CONFIG)
    assert all("key-value cache" in kind.untrusted for kind in profile.kinds)
    for policy in (uniform_policy(profile, "recompute"), uniform_policy(profile, "retain")):
        vars(model).update(vars(build()) | {"_modules": model._modules, "_parameters": {}})
        with apply_policy(model, policy):
            assert_same_steps(steps(model), plain)


# Messages.


def checkpointing_model(model, batch):
    model.layers = nn.ModuleList(Wrapper(layer) for layer in model.layers)
    return model


class Wrapper(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return torch.utils.checkpoint.checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


def test_the_models_own_checkpointing_is_named(plain_model):
    model = checkpointing_model(plain_model, None)
    with pytest.raises(NestedHooksError, match=r"own gradient checkpointing.*gradient_checkpointing=False"):
        profile_model(model, {"x": torch.randn(2, 8)}, LAYERS)


def test_a_second_policy_takes_the_place_of_the_first_and_says_so(plain_model, run_steps, assert_same_steps, caplog):
    batch = {"x": torch.randn(2, 8)}
    plain = run_steps(plain_model, batch)
    profile = profile_model(plain_model, batch, LAYERS)
    with apply_policy(plain_model, uniform_policy(profile, "recompute"), LAYERS):
        assert_same_steps(run_steps(plain_model, batch), plain)
        message = "Adacc: this policy replaces the policy or the session that was applied to the model before"
        assert message not in caplog.messages
        second = apply_policy(plain_model, uniform_policy(profile, "retain"), LAYERS)
        assert caplog.messages.count(message) == 1
        assert_same_steps(run_steps(plain_model, batch), plain)
        assert profile_model(plain_model, batch, LAYERS).blocks == profile.blocks
    assert_same_steps(run_steps(plain_model, batch), plain)
    assert all("forward" in vars(layer) for layer in plain_model.layers), "the end of the first ended the second"
    third = apply_policy(plain_model, uniform_policy(profile, "recompute"), LAYERS)
    second.remove()
    assert all("forward" in vars(layer) for layer in plain_model.layers)
    assert_same_steps(run_steps(plain_model, batch), plain)
    third.remove()
    assert all("forward" not in vars(layer) for layer in plain_model.layers)
    assert not any(name.startswith("_adacc") for name in vars(plain_model))


def test_a_policy_is_removed_by_its_model(plain_model, run_steps, assert_same_steps):
    batch = {"x": torch.randn(2, 8)}
    before = dict(vars(plain_model))
    profile = profile_model(plain_model, batch, LAYERS)
    assert not remove_policy(plain_model)
    apply_policy(plain_model, uniform_policy(profile, "recompute"), LAYERS)
    copied = copy.deepcopy(plain_model)
    assert not remove_policy(copied), "a copy has no policy"
    assert pickle.loads(pickle.dumps(vars(plain_model)["_adacc_applied"])).owner is None
    assert remove_policy(plain_model)
    assert not remove_policy(plain_model)
    assert vars(plain_model) == before
    assert all("forward" not in vars(layer) for layer in plain_model.layers)


def test_a_policy_of_a_part_within_another_is_named(plain_model):
    batch = {"x": torch.randn(2, 8)}
    profile = profile_model(plain_model, batch, LAYERS)
    profile_inner = profile_model(plain_model, batch, LINEARS)
    with (
        apply_policy(plain_model, uniform_policy(profile, "recompute"), LAYERS),
        PolicyHandle(plain_model, uniform_policy(profile_inner, "recompute"), ("Linear",)),
        pytest.raises(NestedHooksError, match=r"another policy of adacc_hf.*handle\.replace"),
    ):
        plain_model(**batch)


@pytest.mark.parametrize("transform", ["grad", "vmap", "dual level"])
def test_within_a_transform_blocks_run_plainly(plain_model, caplog, transform):
    batch = {"x": torch.randn(2, 8)}

    def loss(x):
        return plain_model(x).loss

    def run():
        if transform == "vmap":
            return torch.func.vmap(loss)(torch.stack([batch["x"], batch["x"] + 1]))
        if transform == "grad":
            return torch.func.grad(loss)(batch["x"])
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(loss(forward_ad.make_dual(batch["x"], torch.ones(2, 8)))).tangent

    plain = run()
    with recompute_all(plain_model, batch, LAYERS, LAYERS):
        assert torch.equal(run(), plain)
    assert caplog.text.count("run plainly and save no memory") == 3  # once for each block


def test_a_block_that_calls_torch_func_grad_is_refused(toy_model, toy_batch):
    model = toy_model(lambda block, hidden: hidden + torch.func.grad(lambda x: block.up(x).sum())(hidden))
    for _ in range(2):  # hooks stay enabled
        with pytest.raises(NestedHooksError, match=r"block layers\.0 calls torch\.func\.grad"):
            profile_model(model, toy_batch(), CONFIG)


def test_on_device_meta_blocks_run_plainly(plain_model):
    batch = {"x": torch.randn(2, 8)}
    with recompute_all(plain_model, batch, LAYERS, LAYERS):
        plain_model.to("meta")(x=torch.ones(2, 8, device="meta")).loss.backward()
    with pytest.raises(ValueError, match="device='meta', which has no memory: load it"):
        profile_model(plain_model, {"x": torch.ones(2, 8, device="meta")}, LAYERS)
