"""Validated calls: exact where they differ from the tape, with no more memory than any other call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.run.call import Recording
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.run.validated_call import ValidatedCall
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.solve.solver import least_policy
from adacc_hf.tape.tape_cache import profiled_tapes
from adacc_hf.torch_glue.memory import MemoryMeter, garbage_collection_disabled

CONFIG = AdaccConfig(min_compress_bytes=0)
ACTIONS = ("retain", "compress", "recompute")

OPERATORS = {
    "up": lambda block, x, other: (block.up(x), other),
    "down": lambda block, x, other: (block.down(x), other),
    "tanh": lambda block, x, other: (x.tanh(), other),
    "swish": lambda block, x, other: (x * x.sigmoid(), other),
    "double": lambda block, x, other: (x * 2.0, other),
    "triple": lambda block, x, other: (x * 3.0, other),
    "softmax": lambda block, x, other: (x.softmax(-1), other),
    "dropout": lambda block, x, other: (F.dropout(x, 0.3), other),
    "turned": lambda block, x, other: (x.transpose(0, 1).contiguous().transpose(0, 1), other),
    "hold": lambda block, x, other: (x, x),
    "times": lambda block, x, other: (x * other, other),
    "relu_": lambda block, x, other: (x, F.relu_(other)),
}
"""Operators on x, a block's hidden tensor, and `held`, a tensor that may be saved long after it was computed."""

some_operators = st.lists(st.sampled_from(sorted(OPERATORS)), max_size=6)


class Programs:
    """Programs of a model's blocks: `usual`, but for one block's call in one step. No guard covers the difference."""

    def __init__(self, usual, other, block, step):
        self.usual, self.other = usual, other
        self.where = (block, step)
        self.step = 0
        self._names = torch.compiler.assume_constant_result(lambda number: self._names_of(number))

    def _names_of(self, number):
        return ",".join(self.other if (number, self.step) == self.where else self.usual)

    def forward(self, block, hidden):
        x = other = block.up(hidden)
        for name in self._names(block.number).split(","):
            if name:
                x, other = OPERATORS[name](block, x, other)
        return hidden + x.tanh()

    def model_of(self, toy_model, num_blocks):
        """Return a model whose blocks run these programs."""
        numbers = iter(range(num_blocks))
        return toy_model(self.forward, num_blocks, setup=lambda block: setattr(block, "number", next(numbers)))

    def run_steps(self, run_steps, model, batch, num_steps):
        """Call `run_steps` with the steps counted from 0."""

        def count(*_):
            self.step += 1

        self.step = -1
        hook = model.register_forward_pre_hook(count)
        try:
            return run_steps(model, batch, num_steps=num_steps)
        finally:
            hook.remove()


def what_waits_is_changed(other, seed):
    """Change `held`, which the tape saves last, and from which the result of tanh may be recomputed."""
    usual = ["double", "tanh", "times"]
    return example(usual=usual, other=other, prefix=2, block=0, step=1, seed=seed, knows_profile=True)


@pytest.mark.timeout(900)  # each example is traced, profiled and trained
@settings(max_examples=24)
@what_waits_is_changed(["relu_"], 0)
@what_waits_is_changed(["relu_"], 1)
@what_waits_is_changed(["relu_"], 2)
# A product with dropout's mask, stored as bits, and one with a sigmoid.
@example(usual=["dropout"], other=["swish"], prefix=0, block=1, step=0, seed=0, knows_profile=False)
@what_waits_is_changed(["triple", "relu_"], 0)
@what_waits_is_changed(["triple", "relu_"], 1)
@what_waits_is_changed(["triple", "relu_"], 2)
@given(
    usual=some_operators,
    other=some_operators,
    prefix=st.integers(0, 6),
    block=st.integers(0, 2),
    step=st.integers(0, 1),
    seed=st.integers(0, 5),
    knows_profile=st.booleans(),
)
def test_a_call_that_leaves_its_tape_is_exact(
    toy_model, toy_batch, run_steps, assert_same_steps, usual, other, prefix, block, step, seed, knows_profile
):
    """A call that differs from its tape from any operator on is exact.

    The tape comes from the profile, from another block, or from the block's first call.
    """
    programs = Programs(usual, [*usual[:prefix], *other], block, step)
    model, batch = programs.model_of(toy_model, 3), toy_batch()
    try:
        plain = programs.run_steps(run_steps, model, batch, 4)
    except RuntimeError as error:
        assume("modified by an inplace operation" not in str(error))
        raise
    programs.where = None
    policy = random_policy(profile_model(model, batch, CONFIG), seed, ACTIONS, lossless=True)
    if not knows_profile:
        assume((block, step) != (0, 0))  # without a record, the first call would be that of another model
        profiled_tapes(model).__init__()
    programs.where = (block, step)
    with apply_policy(model, policy):
        assert_same_steps(programs.run_steps(run_steps, model, batch, 4), plain)


def peaks(model, batch, num_steps=4):
    """Return the peak live bytes of each step."""
    peak_bytes = []
    for _ in range(num_steps):
        model.zero_grad(set_to_none=True)
        with garbage_collection_disabled(), MemoryMeter.for_device(torch.device("cpu")) as meter:
            model(**batch).loss.backward()
        peak_bytes.append(meter.peak_bytes)
    return peak_bytes


# A recorder draws no random numbers. It compares the generator's state, of 5,056 bytes, before and after operators that
# may draw; torch's Python side allocates the rest for a short time.
RECORDERS_OWN = 3 * 5056


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("of", ["least", 0, 1])
def test_first_steps_take_no_more_than_others(tiny_gpt2, token_batch, attention, of):
    model, batch = tiny_gpt2(attention), token_batch(8, 16)
    profile = profile_model(model, batch, CONFIG)
    policy = least_policy(profile, CONFIG) if of == "least" else random_policy(profile, of, ACTIONS, lossless=True)
    with apply_policy(model, policy):
        *first, steady = peaks(model, batch)
    assert max(first) <= steady + RECORDERS_OWN
    profiled_tapes(model).__init__()
    with apply_policy(model, policy):
        alone, second, *_ = peaks(model, batch)
    assert alone > first[0] + RECORDERS_OWN  # so that the first assertion can fail
    assert second <= steady + RECORDERS_OWN


def test_a_run_that_resumes_knows_the_order_of_its_profile(tiny_gpt2, token_batch):
    """A resumed run knows the order of backward from its profile.

    Its first block is recorded and verified while nothing else is stored, and no backward comes in another order.
    """
    model, batch = tiny_gpt2("eager", layers=8), token_batch(8, 16)
    profile = profile_model(model, batch, CONFIG)
    profiled_tapes(model).__init__()
    policy = random_policy(profile, 0, ACTIONS, lossless=True)
    with PolicyHandle(model, policy):
        unknown, _, steady, _ = peaks(model, batch)
    with PolicyHandle(model, policy, profile=profile):
        resumed, *_ = peaks(model, batch)
    assert resumed <= steady + RECORDERS_OWN < unknown


def test_blocks_whose_weights_share_a_storage_are_told_apart(tiny_gpt2, token_batch):
    """Blocks with weights in one storage, as under DeepSpeed, have different tapes: each views another part."""
    model, batch = tiny_gpt2("eager", layers=4), token_batch(8, 16)
    flat = torch.cat([p.detach().reshape(-1) for p in model.transformer.h.parameters()])
    views = flat.split([p.numel() for p in model.transformer.h.parameters()])
    for parameter, view in zip(model.transformer.h.parameters(), views, strict=True):
        parameter.data = view.view_as(parameter)
    profile = profile_model(model, batch, CONFIG)
    policy = uniform_policy(profile, "recompute")
    with apply_policy(model, policy):
        *first, steady = peaks(model, batch)
    assert max(first) <= steady + RECORDERS_OWN
    profiled_tapes(model).__init__()
    with apply_policy(model, policy):
        alone, second, *_ = peaks(model, batch)
    plain = uniform_policy(profile, "retain").predicted_peak_bytes - profile.static_bytes
    assert second <= steady + RECORDERS_OWN < alone < plain


def test_layers_with_numbers_of_their_own_run_as_when_profiled(toy_model, toy_batch):
    """Layers with numbers of their own, such as differential attention's scales, have one kind and a tape each."""
    scales = iter((0.5, 0.6, 0.7, 0.8))
    model = toy_model(
        lambda block, hidden: hidden + block.down((block.up(hidden) * block.scale).tanh()),
        num_blocks=4,
        setup=lambda block: setattr(block, "scale", next(scales)),
    )
    batch = toy_batch(64)
    policy = uniform_policy(profile_model(model, batch, CONFIG), "recompute")
    with apply_policy(model, policy) as handle:
        *first, steady = peaks(model, batch)
    assert not any(strategy.entries.differs_from_record for strategy in handle.plans.strategies.values())
    assert max(first) <= steady + RECORDERS_OWN


def test_one_surprise_is_enough(toy_model, toy_batch, run_steps, assert_same_steps, monkeypatch):
    """After one mismatch, that block retains all saved tensors. Other blocks are recorded and follow their plans."""
    names = ["tanh", "swish"]
    programs = Programs(names, names, None, None)
    model, batch = programs.model_of(toy_model, 4), toy_batch()
    model.inlet.register_forward_hook(lambda module, args, output: output * 1.0)
    for block in model.layers:
        block.number = 0  # one traced path for all blocks, whose inputs are no views
    policy = uniform_policy(profile_model(model, batch, CONFIG), "recompute")
    programs.usual = ["tanh", "swish", "double"]  # for all blocks: the model's path has changed
    plain = run_steps(model, batch, num_steps=1)
    calls = []
    for of in (Recording, ValidatedCall):
        run = of.run
        run_and_record = lambda self, *args, run=run: (run(self, *args), calls.append((self.name, self)))[0]  # noqa: E731
        monkeypatch.setattr(of, "run", run_and_record)
    with apply_policy(model, policy) as handle:
        assert_same_steps(run_steps(model, batch, num_steps=1), plain)
    surprised = [name for name, strategy in handle.plans.strategies.items() if strategy.entries.differs_from_record]
    assert surprised == ["layers.0"]
    (first, validated), *others = calls
    assert first == "layers.0"
    assert validated.divergence is not None
    assert [(name, type(call)) for name, call in others] == [(f"layers.{place}", Recording) for place in (1, 2, 3)]
