"""Sizes that were never recorded: what is not as a family says is found out before it makes a wrong gradient.

Rules R7 and R8 where a tape's numbers are expressions.
"""

import gc
import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model
from adacc_hf.artifacts.errors import SavedOtherwiseError
from adacc_hf.artifacts.profile_sizes import Polynomial
from adacc_hf.run.size_check import SizeCheck
from adacc_hf.tape.family import AGREED, SeenSizes
from adacc_hf.tape.library import library_of_profiles

CONFIG = AdaccConfig(min_compress_bytes=0)
ACTIONS = ("retain", "recompute", "compress")
NOT_COMPARED = 4
"""New sizes that came before, so that the next one, the fifth, is none of those at which replay is compared."""


def seen_by(library):
    return [(block, outline, seen) for block, each in library._seen.items() for outline, seen in each.items()]


def families_of(library):
    return {group.family for _, _, seen in seen_by(library) for group in seen._groups.values()} - {None}


def text(tokens, samples=4):
    return {"x": torch.randn(samples, tokens, 8, generator=torch.Generator().manual_seed(tokens))}


class Begun:
    """A model under a policy, at the point where a size may come that was never recorded."""

    def __init__(self, model, batch, policy="recompute"):
        self.model = model
        profile = profile_model(model, batch, CONFIG)
        self.policy = (
            Policy.uniform(profile, policy)
            if isinstance(policy, str)
            else Policy.random(profile, policy, ACTIONS, lossless=True)
        )
        library = library_of_profiles(model)
        if not families_of(library):  # no text, of which it records parts
            with apply_policy(model, self.policy) as handle:
                library = handle.library
                for others in (text(11, 2), text(21, 3)):
                    model(**others).loss.backward()
            model.zero_grad(set_to_none=True)
        found = seen_by(library)
        self._records = [
            (block, outline, [record for group in seen._groups.values() for record in group.records])
            for block, outline, seen in found
        ]

    def apply(self, num_new=NOT_COMPARED):
        """(handle, its only family), as if nothing had been found out by an earlier handle."""
        handle = apply_policy(self.model, self.policy)
        library = handle.library
        library._families.clear()
        for block, outline, records in self._records:
            library._seen[block][outline] = SeenSizes()
            for record in records:
                library._seen[block][outline].add(record, library._family)
        (family,) = families_of(library)
        family._num_new = num_new
        return handle, family


# A wrong expression


def added_one(polynomial):
    return Polynomial((*polynomial.terms, (1, 0)), polynomial.divisor)


def added_size(polynomial):
    return Polynomial((*polynomial.terms, (1, 1)), polynomial.divisor)


def what_counts(tape):
    """The numbers of a tape that anything is made from: not how many bytes a parameter's storage has."""
    made = [(value.nbytes, value.ref) for value in tape.values if value.source is None]
    never_run = "native_dropout_backward"
    return made, tape.slots, [op.arguments() for op in tape.operators if op.target._opname != never_run]


@pytest.fixture(scope="module", params=[("sdpa", "recompute"), ("eager", "recompute"), ("eager", 1)], ids=str)
def gpt2(request, tiny_gpt2, token_batch):
    attention, policy = request.param
    return Begun(tiny_gpt2(attention, layers=1), token_batch(4, 40), policy)


@pytest.mark.parametrize("change", [added_one, added_size])
def test_no_wrong_coefficient_makes_a_wrong_gradient(gpt2, token_batch, run_steps, assert_same_steps, change, caplog):
    """Of any number of a tape: it is noticed before anything is made from it, and the call is recorded instead."""
    batch = token_batch(3, 33)
    plain = run_steps(gpt2.model, batch, num_steps=1)
    handle, family = gpt2.apply()
    handle.remove()
    unnoticed = []
    for place in range(len(family._expressions._distinct)):
        handle, family = gpt2.apply()
        strategy = handle.plans.strategies["transformer.h.0"]
        with handle:
            right = what_counts(tape_at(family, strategy, gpt2.model, batch))
            family.forget_sizes()
            family._num_new = NOT_COMPARED
            family._expressions._distinct[place] = change(family._expressions._distinct[place])
            wrong = what_counts(tape_at(family, strategy, gpt2.model, batch))
            family.forget_sizes()
            family._num_new = NOT_COMPARED
            caplog.clear()
            assert_same_steps(run_steps(gpt2.model, batch, num_steps=1), plain)
            was_noticed = any("runs other operators at some sizes" in record.message for record in caplog.records)
            if right != wrong and not was_noticed:
                unnoticed.append(family._expressions._distinct[place])
            assert families_of(handle.library) == (set() if was_noticed else {family})
    assert not unnoticed


def tape_at(family, strategy, model, batch):
    """What `family` says of the block's call in a step on `batch`."""
    found = []
    library = strategy.library
    family_at = library.family_at
    library.family_at = lambda *args: found.append(family_at(*args)) or found[-1]
    before = strategy._unproven_call
    strategy._unproven_call = lambda key, entry, block, fn, args, kwargs: fn(*args)
    try:
        model(**batch)
    finally:
        library.family_at = family_at
        strategy._unproven_call = before
        strategy._sized.clear()
    (_, sizes) = found[-1]
    return family.tape_at(sizes, None)


def test_a_right_family_is_not_doubted(gpt2, token_batch, run_steps, assert_same_steps, caplog):
    handle, family = gpt2.apply()
    with handle:
        for samples, tokens in ((3, 33), (2, 29), (4, 12), (3, 39)):
            batch = token_batch(samples, tokens)
            handle.follow(None)
            plain = run_steps(gpt2.model, batch)
            handle.follow(handle.plans)
            assert_same_steps(run_steps(gpt2.model, batch), plain)
        assert families_of(handle.library) == {family}
    assert not caplog.records


def test_one_block_of_a_family_is_checked_for_all(tiny_gpt2, token_batch, run_steps, monkeypatch):
    checked = []
    finish = SizeCheck.finish
    monkeypatch.setattr(SizeCheck, "finish", lambda check: checked.append(check._name) or finish(check))
    begun = Begun(tiny_gpt2(layers=3), token_batch(4, 40))
    handle, _ = begun.apply()
    with handle:
        run_steps(begun.model, token_batch(3, 33))
        assert checked == ["transformer.h.0"]
        run_steps(begun.model, token_batch(3, 31))
        assert checked == ["transformer.h.0"] * 2
        run_steps(begun.model, token_batch(3, 60))  # beyond: each block may do otherwise there
        assert checked[2:] == [f"transformer.h.{place}" for place in range(3)]


def test_once_enough_sizes_have_agreed_few_more_are_checked(tiny_gpt2, token_batch, run_steps, monkeypatch):
    """The last size before that, none, the 32nd, none, and each block at a size beyond the recorded ones."""
    checked = []
    finish = SizeCheck.finish
    monkeypatch.setattr(SizeCheck, "finish", lambda check: checked.append(check._name) or finish(check))
    begun = Begun(tiny_gpt2(layers=3), token_batch(4, 40))
    handle, family = begun.apply(num_new=AGREED - 1)
    with handle:
        for tokens, expected in ((33, 1), (31, 1), (29, 1)):
            run_steps(begun.model, token_batch(3, tokens))
            assert len(checked) == expected
        family._num_new = 31
        for tokens, expected in ((27, 2), (25, 2), (60, 5)):
            run_steps(begun.model, token_batch(3, tokens))
            assert len(checked) == expected


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_casts_and_dropout_and_constants_are_no_other_operators(
    toy_model, run_steps, assert_same_steps, autocast, caplog
):
    """What a tape has otherwise than it ran: casts that autocast keeps, dropout's result, numbers out of Python."""

    def forward(block, hidden):
        scale = torch.tensor(hidden.shape[1])
        dropped = nn.functional.dropout(block.up(hidden), 0.5) * scale
        return hidden + block.down(dropped.tanh()) + block.down(hidden).exp()

    model = toy_model(forward)
    plain = run_steps(model, text(29), autocast=autocast)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
        begun = Begun(model, text(40))
    handle, family = begun.apply()
    with handle:
        assert_same_steps(run_steps(model, text(29), autocast=autocast), plain)
        assert families_of(handle.library) == {family}
    assert not caplog.records


# Operators that differ at one size


def at_thirteen(usually, then):
    """A block's forward that runs `then` at 13 tokens. That is between sizes that a profile of 40 tokens records."""
    return lambda block, hidden: (then if hidden.shape[1] == 13 else usually)(block, hidden)


def roll(block, hidden, by):
    return hidden + block.down(block.up(hidden).tanh().roll(by, 1).exp())


OTHERWISE = {
    "another operator": (
        lambda block, hidden: hidden + block.down(block.up(hidden).sin().exp()),
        lambda block, hidden: hidden + block.down(block.up(hidden).cos().exp()),
    ),
    "another number": (lambda block, hidden: roll(block, hidden, 2), lambda block, hidden: roll(block, hidden, 3)),
    "one more": (
        lambda block, hidden: hidden + block.down(block.up(hidden).tanh().exp()),
        lambda block, hidden: hidden + block.down(block.up(hidden).neg().tanh().exp()),
    ),
    "one less": (
        lambda block, hidden: hidden + block.down(block.up(hidden).neg().tanh().exp()),
        lambda block, hidden: hidden + block.down(block.up(hidden).tanh().exp()),
    ),
    "another view": (
        lambda block, hidden: hidden + block.down((block.up(hidden).tanh().flip(1) * 2).exp()),
        lambda block, hidden: hidden + block.down((block.up(hidden).tanh().flip(2) * 2).exp()),
    ),
    "other slots": (
        lambda block, hidden: hidden + block.down(nn.functional.dropout(hidden, 0.5).exp()),
        lambda block, hidden: hidden + block.down(nn.functional.dropout(hidden, 0.5).exp().tanh()),
    ),
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_other_operators_in_the_midst_of_a_range_are_noticed(toy_model, run_steps, assert_same_steps, how, caplog):
    """Though autograd saves what looks the same."""
    model = toy_model(at_thirteen(*OTHERWISE[how]))
    plain = [run_steps(model, text(tokens)) for tokens in (12, 13, 14)]
    handle, _ = Begun(model, text(40)).apply()
    with handle, caplog.at_level(logging.WARNING):
        assert_same_steps(run_steps(model, text(12)), plain[0])
        assert not caplog.records
        assert_same_steps(run_steps(model, text(13)), plain[1])
        assert "block layers.0 runs other operators at some sizes" in caplog.records[0].message
        assert_same_steps(run_steps(model, text(14)), plain[2])
        assert not families_of(handle.library)
        strategies = handle.plans.strategies.values()
        assert not [entry for each in strategies for entry in each._sized.values() if entry.is_current]


def test_a_mistake_that_a_block_forgives_is_noticed(toy_model, run_steps, assert_same_steps):
    """It may catch the error that is raised inside it."""

    def forward(block, hidden):
        try:
            return hidden + (block.up(hidden).tanh() if hidden.shape[1] != 13 else block.up(hidden).sin()).exp()
        except RuntimeError:
            return hidden

    model = toy_model(forward)
    plain = run_steps(model, text(13))
    handle, _ = Begun(model, text(40)).apply()
    with handle:
        assert_same_steps(run_steps(model, text(13)), plain)


# A call that is run once more


def setup_special(block):
    """The second block of a model saves another tensor at 13 tokens; only the first one is checked by operators."""
    block.register_buffer("calls", torch.zeros(()))
    block.is_special = False


def special(before):
    def forward(block, hidden):
        dropped = nn.functional.dropout(block.up(hidden), 0.5)
        if block.is_special and hidden.shape[1] == 13:
            before(block)
            return hidden + block.down(dropped[:, :6].exp()).sum()
        return hidden + block.down(dropped.exp())

    return forward


def test_a_call_that_saves_otherwise_is_run_once_more(toy_model, run_steps, assert_same_steps, caplog):
    """With the same random numbers; of the first attempt nothing is left."""
    model = toy_model(special(lambda _: None), setup=setup_special)
    begun = Begun(model, text(40))
    model.layers[1].is_special = True
    plain = run_steps(model, text(13))
    handle, _ = begun.apply()
    with handle:
        assert_same_steps(run_steps(model, text(13)), plain)
        assert "block layers.1 runs other operators at some sizes" in caplog.records[0].message
        assert handle.plans.strategies["layers.1"].tapes
        assert_same_steps(run_steps(model, text(13)), plain)
        assert_same_steps(run_steps(model, text(12)), run_plainly(handle, model, text(12), run_steps))


def run_plainly(handle, model, batch, run_steps):
    handle.follow(None)
    try:
        return run_steps(model, batch)
    finally:
        handle.follow(handle.plans)


def test_what_the_first_attempt_made_is_gone_when_it_is_run_again(toy_model, monkeypatch):
    model = toy_model(special(lambda _: None), setup=setup_special)
    begun = Begun(model, text(40))
    model.layers[1].is_special = True
    handle, _ = begun.apply()
    sizes = []

    def count(strategy, *args):
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and not o.is_meta]
        sizes.append(sum(o.shape[:2] == (4, 13) for o in tensors))
        return type(strategy)._first_call(strategy, *args)

    with handle:
        model(**text(12)).loss.backward()
        strategy = handle.plans.strategies["layers.1"]
        monkeypatch.setattr(strategy, "_first_call", lambda *args: count(strategy, *args), raising=False)
        model(**text(13)).loss.backward()
    (alive,) = sizes
    handle, _ = begun.apply()
    with handle:
        strategy = handle.plans.strategies["layers.1"]
        monkeypatch.setattr(strategy, "_sized_entry", lambda *_: None, raising=False)
        monkeypatch.setattr(strategy, "_first_call", lambda *args: count(strategy, *args), raising=False)
        model(**text(12)).loss.backward()
        sizes.clear()
        model(**text(13)).loss.backward()
    assert sizes == [alive]  # as many as where there was no first attempt


def test_a_call_that_has_changed_state_is_not_run_again(toy_model):
    model = toy_model(special(lambda block: block.calls.add_(1)), setup=setup_special)
    begun = Begun(model, text(40))
    model.layers[1].is_special = True
    handle, _ = begun.apply()
    with handle, pytest.raises(SavedOtherwiseError, match=r"block layers\.1"):
        model(**text(13))


def test_what_would_change_state_is_stopped_before(toy_model, run_steps, assert_same_steps):
    """In the block whose operators are checked."""

    def forward(block, hidden):
        if hidden.shape[1] == 13:
            block.calls.add_(1)
            hidden = hidden * block.calls
        return hidden + block.down(block.up(hidden).exp())

    model = toy_model(forward, setup=setup_special)
    plain = run_steps(model, text(13))
    handle, _ = Begun(model, text(40)).apply()
    with handle:
        assert_same_steps(run_steps(model, text(13)), plain)


@pytest.mark.parametrize("then", [torch.exp, lambda hidden: hidden[:, :6].exp().sum()], ids=["alike", "otherwise"])
def test_a_block_that_always_changes_state_is_recorded_on_the_way(
    toy_model, run_steps, assert_same_steps, recorded, then
):
    """No call of it can be run twice."""

    def forward(block, hidden):
        block.calls.add_(1)
        inner = block.up(hidden).tanh() * block.calls
        return hidden + (then(inner) if hidden.shape[1] == 13 else inner.exp())

    model = toy_model(forward, setup=setup_special)
    begun = Begun(model, text(40))
    plain = [run_steps(model, text(tokens)) for tokens in (12, 13)]
    handle, family = begun.apply()
    recorded.clear()
    with handle:
        for tokens, expected in zip((12, 13), plain, strict=True):
            assert_same_steps(run_steps(model, text(tokens)), expected)
        assert (families_of(handle.library) == {family}) == (then is torch.exp)
    assert {"layers.0", "layers.1"} == set(recorded)


# Results that differ from call to call


NUM_CALLS = [0]


@pytest.fixture(scope="module")
def unsteady():
    """An operator whose result at 13 tokens is another one at each call."""

    @torch.library.custom_op("adacc_test::unsteady", mutates_args=())
    def unsteady(x: torch.Tensor) -> torch.Tensor:
        NUM_CALLS[0] += x.shape[1] == 13
        return x * (1 + NUM_CALLS[0])

    def backward(context, gradient):
        (factor,) = context.saved_tensors
        return gradient * factor

    unsteady.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output / inputs[0])
    )
    return unsteady


def test_a_kernel_that_differs_at_one_size_is_retained_at_all(
    toy_model, run_steps, assert_same_steps, unsteady, caplog
):
    """If that size is one of those at which replay is compared."""

    def forward(block, hidden):
        return hidden + block.down(unsteady(block.up(hidden)).sin())

    model = toy_model(forward)
    NUM_CALLS[0] = 0
    begun = Begun(model, text(40))
    plain = run_steps(model, text(15))
    handle, family = begun.apply(num_new=0)
    value = next(value.index for value in family.base.values if value.name.endswith("unsteady"))
    assert value in family.base.recomputable
    with handle:
        model(**text(13)).loss.backward()  # the first new size
        model.zero_grad(set_to_none=True)
        assert "replay did not recompute block:unsteady of block layers.0 bit for bit" in caplog.records[0].message
        assert families_of(handle.library) == {family}
        assert value not in family.base.recomputable
        NUM_CALLS[0] = 0
        assert_same_steps(run_steps(model, text(15)), plain)
        for strategy in handle.plans.strategies.values():
            for entry in (*strategy.entries.values(), *strategy._sized.values()):
                assert value in entry.compiled.store.retained


@pytest.fixture(scope="module")
def leaving_unwritten():
    """An operator with a second result that is another one at each call, as what a kernel leaves unwritten is."""

    @torch.library.custom_op("adacc_test::leaving_unwritten", mutates_args=())
    def leaving_unwritten(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        NUM_CALLS[0] += 1
        return 2 * x, x.new_full((3,), NUM_CALLS[0])

    leaving_unwritten.register_autograd(
        lambda ctx, gradient, _: 2 * gradient + 0 * ctx.saved_tensors[0].sum(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
    )
    return leaving_unwritten


def test_what_no_replay_makes_is_not_compared(toy_model, leaving_unwritten, caplog):
    """Without dropout cuDNN's attention saves a seed that it did not write."""

    def forward(block, hidden):
        return hidden + block.down(leaving_unwritten(block.up(hidden))[0].sin())

    begun = Begun(toy_model(forward), text(40))
    handle, family = begun.apply(num_new=0)
    made = {value.name.rpartition(":")[2]: value.index for value in family.base.values if "unwritten" in value.name}
    assert made
    with handle:
        begun.model(**text(13)).loss.backward()  # the first new size, at which replay is compared
        assert not [record for record in caplog.records if "replay did not recompute" in record.message]
        assert families_of(handle.library) == {family}


@pytest.mark.parametrize("draws_otherwise", [False, True])
def test_masks_are_drawn_again_at_a_new_size_and_compared(
    toy_model, run_steps, assert_same_steps, monkeypatch, caplog, draws_otherwise
):
    """Rule R7; a mask that comes out otherwise is retained at all sizes."""
    model = toy_model(lambda block, hidden: hidden + block.down(nn.functional.dropout(block.up(hidden), 0.5).exp()))
    begun = Begun(model, text(40))
    plain = run_steps(model, text(13))
    handle, _ = begun.apply(num_new=0)
    if draws_otherwise:
        monkeypatch.setattr("adacc_hf.run.size_check.drawing_from", lambda state, device: nullcontext())
    with handle:
        assert_same_steps(run_steps(model, text(13)), plain)
    told = [record.message for record in caplog.records if "did not recompute" in record.message]
    assert [("div" in message or "bernoulli" in message) for message in told] == [True] * draws_otherwise
