"""A micro-batch that is profiled while it trains."""

import gc
import weakref

import pytest
import torch
from live_step_builders import LOSSLESS, TABLE, are_equal, grads_of, train

from adacc_hf import profile_model
from adacc_hf.price.batch import Batch, TrainingStep
from adacc_hf.price.live_step import LiveStep
from adacc_hf.price.measurement import Measurement
from adacc_hf.run.blocks import Installation
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.torch_glue.memory import measure_step

LAYOUT = ("static_bytes", "outside_peak_bytes", "loss_peak_bytes", "tail_peak_bytes", "outside_live_bytes")


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral", "bert", "vit", "albert", "switch_transformers"])
def test_it_trains_bit_for_bit_as_without_a_profile(name, autocast, one_thread):
    """The step's loss, gradients and random numbers are those of plain training. Nothing is left on the model."""
    plain, profiled = TABLE[name].build().train(), TABLE[name].build().train()
    batch = TABLE[name].make_batch(0)
    torch.manual_seed(1)
    loss, _ = train(plain, batch, autocast=autocast)
    drawn = torch.rand(4)
    torch.manual_seed(1)
    own_loss, profile = train(profiled, batch, LOSSLESS, autocast, block_classes=TABLE[name].block_classes)
    assert torch.equal(drawn, torch.rand(4))
    assert torch.equal(loss, own_loss)
    assert are_equal(grads_of(plain), grads_of(profiled))
    assert [set(vars(m)) for m in plain.modules()] == [set(vars(m)) for m in profiled.modules()]
    assert len(profile.blocks) >= 2


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert"])
def test_the_profile_is_that_of_extra_runs(name, autocast, one_thread, without_onednn):
    """A profile from a step that trains has the bytes of `profile_model`, which runs the model by itself."""
    batch = TABLE[name].make_batch(0)
    _, live = train(TABLE[name].build().train(), batch, LOSSLESS, autocast=autocast)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        extra = profile_model(TABLE[name].build().train(), batch, LOSSLESS)
        measured = measure_step(TABLE[name].build().train(), batch)
    assert uniform_policy(live, "retain").predicted_peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    assert [block.name for block in live.blocks] == [block.name for block in extra.blocks]
    assert [kind.digest for kind in live.kinds] == [kind.digest for kind in extra.kinds]
    assert [getattr(live, field) for field in LAYOUT] == [getattr(extra, field) for field in LAYOUT]
    assert [kind.backward for kind in live.kinds] == [kind.backward for kind in extra.kinds]
    for action in ("retain", "recompute"):
        policies = [uniform_policy(profile, action) for profile in (live, extra)]
        assert policies[0].predicted_peak_bytes == policies[1].predicted_peak_bytes
        # The loss itself, and numbers that its division keeps, count as stored here.
        assert policies[0].predicted_stored_bytes == pytest.approx(policies[1].predicted_stored_bytes, abs=16)


def test_an_error_in_the_step_leaves_the_model_as_it_was(tiny_gpt2, token_batch):
    model = tiny_gpt2()
    installation = Installation(model)
    strategies = {name: call.strategy for name, call in installation.calls.items()}
    live = LiveStep(installation, LOSSLESS, Measurement(), TapeCache())
    live.begin(Batch(token_batch()), TrainingStep())
    with pytest.raises(RuntimeError, match="tensor"):
        model(token_batch()["input_ids"].float())
    live.cancel()
    assert {name: call.strategy for name, call in installation.calls.items()} == strategies
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    installation.remove()
    loss, _ = train(model, token_batch())
    assert torch.isfinite(loss)


def test_the_batch_is_freed_with_the_step(tiny_gpt2, token_batch):
    """A recorded batch is freed by reference counts: a step would otherwise have less memory by its size."""
    model, batch = tiny_gpt2(), {name: ids.clone() for name, ids in token_batch().items()}
    gc.collect()
    gc.disable()
    try:
        train(model, batch, LOSSLESS)
        references = [weakref.ref(tensor) for tensor in batch.values()]
        del batch
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def count_in_buffer(block, hidden):
    block.state.add_(1)
    return hidden + block.up(hidden).tanh() / block.state


def scale_by_last_call(block, hidden):
    values, scale = block.up(hidden), block.state.max()
    with torch.no_grad():
        block.state.copy_(values.abs().amax((0, 1)))
    return hidden + values / scale


def normalize_batch(block, hidden):
    """The schema of batch norms does not declare that they write to their statistics."""
    return hidden + block.norm(block.up(hidden))


def draw_from_own_generator(block, hidden):
    return hidden + block.up(hidden) * torch.empty_like(hidden).bernoulli_(0.5, generator=block.generator)


@pytest.mark.parametrize("is_parameter", [False, True], ids=["buffer", "parameter"])
@pytest.mark.parametrize("forward", [count_in_buffer, scale_by_last_call, normalize_batch, draw_from_own_generator])
def test_what_a_block_writes_is_written_once(forward, is_parameter, toy_model, toy_batch):
    """Operators and graphs that run again to be measured write to no buffer, parameter or generator of the model."""

    def setup(block):
        block.generator, state = torch.Generator().manual_seed(0), torch.ones(8)
        block.norm = torch.nn.BatchNorm1d(6)
        block.register_buffer("state", state) if not is_parameter else block.register_parameter(
            "state", torch.nn.Parameter(state, requires_grad=False)
        )

    plain, profiled = toy_model(forward, setup=setup), toy_model(forward, setup=setup)
    loss, _ = train(plain, toy_batch())
    own_loss, _ = train(profiled, toy_batch(), LOSSLESS)
    assert torch.equal(loss, own_loss)
    assert are_equal(grads_of(plain), grads_of(profiled))
    for block, own_block in zip(plain.layers, profiled.layers, strict=True):
        assert are_equal(block.state_dict().values(), own_block.state_dict().values())
        assert torch.equal(block.generator.get_state(), own_block.generator.get_state())


def test_gradients_of_earlier_micro_batches_are_counted(tiny_gpt2, token_batch, without_onednn):
    model = tiny_gpt2()
    train(model, token_batch())
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    _, profile = train(model, token_batch(), LOSSLESS, num_micro=2)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert profile.static_bytes >= parameters + gradients + 2 * sum(t.nbytes for t in {*token_batch().values()})
