"""Calls: the tensors that autograd gets back, the bytes that a call stores, and when they are freed (R2, R3 and
R11)."""

import gc
from collections import Counter

import pytest
import torch
from recomputed_models import recompute_all
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import TapeMismatchError
from adacc_hf.run.blocks import Installation
from adacc_hf.run.call import Call
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.tape.tape_cache import profiled_tapes
from adacc_hf.torch_glue.meters import MemoryMeter

CONFIG = AdaccConfig(min_compress_bytes=0)
ACTIONS = ("retain", "recompute", "compress")


def look_of(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


class NoteSaved:
    """A strategy that trains plainly and records the tensors that autograd saves, by block and slot."""

    def __init__(self, name, notes):
        self.name = name
        self.notes = notes

    def run(self, block, fn, args, kwargs):
        count = iter(range(10**6))

        def pack(tensor):
            self.notes[self.name, next(count)] = (look_of(tensor), tensor.detach().clone())
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return fn(*args)


def plainly_saved(model, batch):
    notes = {}
    installation = Installation(model)
    for name, call in installation.calls.items():
        call.strategy = NoteSaved(name, notes)
    torch.manual_seed(0)
    model(**batch).loss.backward()
    installation.remove()
    return notes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_what_is_given_back_looks_like_what_was_saved(tiny_gpt2, token_batch, monkeypatch, attention, autocast):
    """An unpacked tensor has the dtype, size, stride, offset and bits of the saved one (rule R2)."""
    model, batch = tiny_gpt2(attention), token_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        saved = plainly_saved(model, batch)
        profile = profile_model(model, batch, CONFIG)
    unpacked = {}
    unpack = Call.unpack

    def note(call, packed):
        tensor = unpack(call, packed)
        unpacked[call.block, packed[0]] = (look_of(tensor), tensor.clone())
        return tensor

    monkeypatch.setattr(Call, "unpack", note)
    for policy in (uniform_policy(profile, "recompute"), random_policy(profile, 2, ACTIONS, lossless=True)):
        with apply_policy(model, policy):
            for _ in range(3):
                unpacked.clear()
                torch.manual_seed(0)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    loss = model(**batch).loss
                loss.backward()
                assert unpacked.keys() == saved.keys()
                assert not [slot for slot in saved if unpacked[slot][0] != saved[slot][0]]
                assert not [slot for slot in saved if not torch.equal(unpacked[slot][1], saved[slot][1])]


class CountingCodec:
    def __init__(self, codec, value, counts):
        self.codec = codec
        self.value = value
        self.counts = counts

    def encode(self, tensor):
        self.counts["encode", self.value] = self.counts.get(("encode", self.value), 0) + 1
        return self.codec.encode(tensor)

    def decode(self, payload):
        self.counts["decode", self.value] = self.counts.get(("decode", self.value), 0) + 1
        return self.codec.decode(payload)


def attends_thrice(block, hidden):
    """Read `x` in three layers, so that autograd saves it three times, once per layer."""
    x = hidden.tanh()
    return block.down(block.up(x) * torch.nn.functional.linear(x, block.down.weight)) + block.up(x)


def decodes_of(schedule):
    """Return how often backward decodes each value: once for each fetch of a value that is not live."""
    decodes, at_hand = Counter(), set()
    for program in schedule.programs:
        for part in (*program.steps, program):
            decodes.update(set(part.loads) - at_hand)
            at_hand = at_hand.union(part.loads).difference(part.frees)
    return decodes


def test_one_storage_is_encoded_once(toy_model, toy_batch):
    """A storage is encoded once, however many operators save it (rule R3)."""
    model, batch = toy_model(attends_thrice), toy_batch()
    profile = profile_model(model, batch, CONFIG)
    kind = profile.kinds[0]
    shared = next(value.index for value in kind.activations if value.name.endswith("tanh"))
    assert kind.slots.count(shared) == 4  # tanh saves its result, and each layer its input
    counts = {}
    with apply_policy(model, uniform_policy(profile, "compress")) as handle:
        model(**batch).loss.backward()
        strategy = handle.plans.strategies["layers.0"]
        (entry,) = strategy.entries.recorded.values()
        strategy.wrap_codec = lambda value, codec: CountingCodec(codec, value, counts)
        model(**batch).loss.backward()
        strategy.wrap_codec = None
        before, schedule = dict(counts), entry.execution_plan.schedule
        model(**batch).loss.backward()
    assert counts == before
    encoded = {value for moment, value in counts if moment == "encode"}
    assert encoded == {value.index for value in kind.activations if value.saved}
    assert {count for (moment, _), count in counts.items() if moment == "encode"} == {1}
    # Decoded as often as in the schedule: again only for a slot that unpacks much later.
    decoded = decodes_of(schedule)
    assert {value: count for (moment, value), count in counts.items() if moment == "decode"} == decoded
    assert all(count <= kind.slots.count(value) for value, count in decoded.items())
    assert decoded[shared] == 2  # its own slot, two layers' in a row, and the third's before


@pytest.fixture(scope="module")
def gpt2_profile(tiny_gpt2, token_batch):
    return profile_model(tiny_gpt2("eager"), token_batch(), CONFIG)


@pytest.fixture(params=["compress", "random"])
def any_policy(request, gpt2_profile):
    if request.param == "random":
        return random_policy(gpt2_profile, 4, ACTIONS)
    return uniform_policy(gpt2_profile, request.param)


def test_nothing_outlives_a_graph_that_is_dropped(tiny_gpt2, token_batch, any_policy):
    """Stored bytes are freed with the loss or the graph, without garbage collection (rule R11)."""
    model, batch = tiny_gpt2("eager"), token_batch()
    gc.collect()
    gc.disable()
    try:
        with apply_policy(model, any_policy):
            model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
            with MemoryMeter.for_device(torch.device("cpu")) as meter:
                loss = model(**batch).loss
                meter.mark(("forward",))
                del loss
                meter.mark(("dropped",))
                model(**batch).loss.backward()
                model.zero_grad(set_to_none=True)
                meter.mark(("backward",))
    finally:
        gc.enable()
    live = {point.label[0]: point.live_bytes for point in meter.points}
    assert live["forward"] > 0
    assert live["dropped"] == 0
    assert live["backward"] == 0


@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_a_parameter_changed_before_backward_is_refused(tiny_gpt2, token_batch, any_policy, num_steps_before):
    """A parameter changed before backward is refused (rule R11) in the recorded, the second and the third step."""
    model, batch = tiny_gpt2("eager"), token_batch()
    with apply_policy(model, any_policy):
        for _ in range(num_steps_before):
            model(**batch).loss.backward()
        loss = model(**batch).loss
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight.add_(1.0)
        with pytest.raises(RuntimeError, match=r"changed in place after the forward|modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("num_steps_before", [0, 1])
@pytest.mark.parametrize("action", ["retain", "recompute"])
def test_an_activation_changed_before_backward(toy_model, toy_batch, run_steps, action, num_steps_before):
    """An activation changed before backward is refused if retained, and recomputed from its old value if recomputed."""
    watched_blocks, inputs = [], []

    def forward(block, hidden):
        x = block.up(hidden).tanh()
        if block in watched_blocks:
            inputs[:] = [x]
        return hidden + block.down(x)

    model, batch = toy_model(forward), toy_batch()
    profile = profile_model(model, batch, CONFIG)
    plain = run_steps(model, batch, num_steps=1)[0]
    policy = uniform_policy(profile, action)
    with apply_policy(model, policy):
        for _ in range(num_steps_before):
            model(**batch).loss.backward()
        model.zero_grad()
        watched_blocks.append(
            model.layers[1]
        )  # not while profiling: values that the test holds would not be recomputed
        loss = model(**batch).loss
        with torch.no_grad():
            inputs[0].zero_()
        if action == "retain":
            with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
            gradient = model.layers[0].up.weight.grad
            assert torch.equal(gradient, plain["layers.0.up.weight"])


@pytest.mark.parametrize("action", ["retain", "recompute"])
def test_an_activation_changed_within_a_recorded_call_is_refused(toy_model, toy_batch, action):
    """The change is refused by name, as in plain autograd, once the plan takes over."""
    changing = []

    def forward(block, hidden):
        x = block.up(hidden).tanh()
        result = hidden.exp() + block.down(x)  # the first value is recomputed, the other is not
        if block in changing:
            x.zero_()
        return result

    model = toy_model(forward)
    policy = uniform_policy(profile_model(model, toy_batch(batch=4), CONFIG), action)
    with apply_policy(model, policy):
        model(**toy_batch(batch=4)).loss.backward()
        changing.append(model.layers[1])
        model(**toy_batch(batch=6))  # checked against the record of the other block
        loss = model(**toy_batch(batch=6)).loss  # recorded
        with pytest.raises(RuntimeError, match=r"changed in place after the forward|modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("num_calls", [1, 4])
def test_what_no_guard_sees_ends_the_run_in_a_checked_call(toy_model, toy_batch, num_calls):
    """A shape's second call is checked, and each call of a function that is allowed in the graph."""
    scale = [1.0]
    number = torch.compiler.assume_constant_result(lambda: scale[0])
    scaled = torch.compiler.allow_in_graph(lambda x: x * scale[0])

    def forward(block, hidden):
        x = block.up(hidden) * number() if num_calls == 1 else scaled(block.up(hidden))
        return hidden + block.down(x.tanh().exp())

    model, batch = toy_model(forward), toy_batch()
    with recompute_all(model, batch, CONFIG):
        for _ in range(num_calls):
            model(**batch).loss.backward()
        scale[0] = 2.0
        loss = model(**batch).loss
        with pytest.raises(TapeMismatchError, match=r"recomputes saved tensor \d+ \(block:exp\) with other bits"):
            loss.backward()


def test_the_recorded_call_is_checked(toy_model, toy_batch):
    model = toy_model(lambda block, hidden: hidden + block.down(block.up(hidden).tanh().exp()))
    model.register_forward_hook(lambda *_: model.layers[1].up.weight.numpy(force=True).fill(2))
    with pytest.raises(TapeMismatchError, match="with other bits than the forward"):
        profile_model(model, toy_batch(), CONFIG)


def changes_a_list(block, hidden, features):
    x = (block.up(hidden) + features[0] * 0.5).tanh()
    features.insert(0, x.detach().cos())
    return hidden + block.down(x)


def replaces_the_data_of_a_buffer(block, hidden, features):
    x = block.up(hidden)
    y = (x + block.mean).tanh()
    block.mean.data = 0.9 * block.mean + 0.1 * x.detach().mean((0, 1))
    return hidden + block.down(y)


def give_state(block):
    block.register_buffer("mean", torch.ones(8))
    block.shift = nn.Parameter(torch.ones(8), requires_grad=False)


@pytest.mark.parametrize("forward", [changes_a_list, replaces_the_data_of_a_buffer])
def test_what_a_call_was_given_is_replayed_from(toy_model, toy_batch, run_steps, assert_same_steps, forward):
    """Replay reads the call's own arguments, in the first call, whose plan is made afterwards, and in later calls."""

    def build():
        return toy_model(forward, setup=give_state, kwargs_of=lambda x: {"features": [x.sin()]})

    batch = toy_batch()
    plain = run_steps(build(), batch)
    profile = profile_model(build(), batch, CONFIG)
    assert any(value.recomputable for value in profile.kinds[0].activations)
    model = build()
    assert not profiled_tapes(model).tapes  # so that the first call is recorded alone
    with apply_policy(model, uniform_policy(profile, "recompute"), CONFIG):
        assert_same_steps(run_steps(model, batch), plain)
