"""Validation: a call that differs from its tape is noticed before it makes a wrong gradient (rules R7 and R8).

Calls are validated at sizes that were not recorded, at the first calls of a recorded shape, and at every call of an
untraced block.
"""

import logging

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import SavedTensorMismatchError
from adacc_hf.artifacts.polynomials import Polynomial
from adacc_hf.run import validation
from adacc_hf.run.entries import DIVERGED
from adacc_hf.run.validated_call import ValidatedCall
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.tape.symbolic_tape import AGREED, SizeClassRecords
from adacc_hf.tape.tape_cache import profiled_tapes
from adacc_hf.torch_glue.rng_state import draw_from_state

CONFIG = AdaccConfig(min_compress_bytes=0)
ACTIONS = ("retain", "recompute", "compress")
NOT_COMPARED = 4
"""Number of new sizes before the tested one, so that the tested one, the fifth, is not a size at which replay is
compared."""


def class_records_of(library):
    return [
        (block, outline, class_records)
        for block, each in library.records.items()
        for outline, class_records in each.items()
    ]


def families_of(library):
    return {class_records.symbolic_tape for _, _, class_records in class_records_of(library)} - {None}


def text(tokens, samples=4):
    return {"x": torch.randn(samples, tokens, 8, generator=torch.Generator().manual_seed(tokens))}


@pytest.fixture
def toy_model(toy_model):
    """The shared `toy_model`, with all blocks given inputs of one dtype that are no views, because guards tell these
    apart."""

    def build(*args, **kwargs):
        model = toy_model(*args, **kwargs)
        model.inlet.register_forward_hook(lambda module, args, output: output.float() * 1.0)
        return model

    return build


class PreparedModel:
    """A model under a policy, with a symbolic tape, ready to run at a size that was not recorded."""

    def __init__(self, model, batch, policy="recompute", autocast=None):
        self.model = model
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
            self._start(model, batch, policy)

    def _start(self, model, batch, policy):
        profile = profile_model(model, batch, CONFIG)
        self.policy = (
            uniform_policy(profile, policy)
            if isinstance(policy, str)
            else random_policy(profile, policy, ACTIONS, lossless=True)
        )
        library = profiled_tapes(model)
        if not families_of(library):  # not a text model, whose profile would record parts of the batch
            with apply_policy(model, self.policy) as handle:
                library = handle.tape_cache
                for others in (text(11, 2), text(21, 3)):
                    model(**others).loss.backward()
            model.zero_grad(set_to_none=True)
        self._records = [
            (block, outline, list(class_records.records)) for block, outline, class_records in class_records_of(library)
        ]

    def apply(self, num_new=NOT_COMPARED):
        """Return (handle, its only symbolic tape), in the state before any handle validated a call."""
        handle = apply_policy(self.model, self.policy)
        library = handle.tape_cache
        library.symbolic_tapes.clear()
        for block, outline, records in self._records:
            library.records[block][outline] = SizeClassRecords()
            for record in records:
                library.records[block][outline].add(record, library._symbolic_tape_of)
        (family,) = families_of(library)
        family.num_new = num_new
        return handle, family


# A wrong polynomial


def added_one(polynomial):
    return Polynomial((*polynomial.terms, (1, 0)), polynomial.divisor)


def added_size(polynomial):
    return Polynomial((*polynomial.terms, (1, 1)), polynomial.divisor)


def what_counts(tape):
    """Return the numbers of a tape that replay uses. The byte counts of parameters' storages are left out."""
    input_sizes = [(value.nbytes, value.ref) for value in tape.values if value.source is None]
    never_run = "native_dropout_backward"
    return (
        input_sizes,
        tape.slots,
        [repr((op.args, op.kwargs)) for op in tape.operators if op.target._opname != never_run],
    )


@pytest.fixture(scope="module", params=[("sdpa", "recompute"), ("eager", "recompute"), ("eager", 1)], ids=str)
def gpt2(request, tiny_gpt2, token_batch):
    attention, policy = request.param
    return PreparedModel(tiny_gpt2(attention, layers=1), token_batch(4, 40), policy)


@pytest.mark.parametrize("change", [added_one, added_size])
def test_no_wrong_coefficient_makes_a_wrong_gradient(gpt2, token_batch, run_steps, assert_same_steps, change, caplog):
    """A wrong coefficient anywhere on the symbolic tape is noticed before replay uses it, and the call is recorded."""
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
            family.num_new = NOT_COMPARED
            family._expressions._distinct[place] = change(family._expressions._distinct[place])
            wrong = what_counts(tape_at(family, strategy, gpt2.model, batch))
            family.forget_sizes()
            family.num_new = NOT_COMPARED
            caplog.clear()
            assert_same_steps(run_steps(gpt2.model, batch, num_steps=1), plain)
            was_noticed = any("runs other operators at some sizes" in record.message for record in caplog.records)
            if right != wrong and not was_noticed:
                unnoticed.append(family._expressions._distinct[place])
            assert families_of(handle.tape_cache) == (set() if was_noticed else {family})
    assert not unnoticed


def tape_at(family, strategy, model, batch):
    """Return the tape that `family` evaluates for the block's call in a step on `batch`."""
    call_sizes = []

    def run_as(key, block, fn, args, kwargs):
        call_sizes.append(strategy.tape_cache._sizes_of(key))
        return fn(*args)

    strategy._run_as = run_as
    try:
        model(**batch)
    finally:
        del strategy._run_as
    return family.tape_at(call_sizes[-1], None)


def test_a_right_family_is_not_doubted(gpt2, token_batch, run_steps, assert_same_steps, caplog):
    handle, family = gpt2.apply()
    with handle:
        for samples, tokens in ((3, 33), (2, 29), (4, 12), (3, 39)):
            batch = token_batch(samples, tokens)
            handle.follow(None)
            plain = run_steps(gpt2.model, batch)
            handle.follow(handle.plans)
            assert_same_steps(run_steps(gpt2.model, batch), plain)
        assert families_of(handle.tape_cache) == {family}
    assert not caplog.records


@pytest.fixture
def validated_blocks(monkeypatch):
    """Names of the blocks whose calls were validated."""
    names = []
    run = ValidatedCall.run
    monkeypatch.setattr(ValidatedCall, "run", lambda call, *args: names.append(call.name) or run(call, *args))
    return names


def test_one_block_of_a_family_is_checked_for_all(tiny_gpt2, token_batch, run_steps, validated_blocks):
    prepared = PreparedModel(tiny_gpt2(layers=3), token_batch(4, 40))
    handle, _ = prepared.apply()
    validated_blocks.clear()
    with handle:
        for number, tokens in enumerate((33, 31, 60), start=1):
            run_steps(prepared.model, token_batch(3, tokens))
            assert validated_blocks == ["transformer.h.0"] * number


def test_once_enough_sizes_have_agreed_few_more_are_checked(tiny_gpt2, token_batch, run_steps, validated_blocks):
    """Validated sizes: the last one before enough agreed, the 32nd, and one beyond the recorded range, but none within
    it."""
    prepared = PreparedModel(tiny_gpt2(layers=3), token_batch(4, 40))
    handle, family = prepared.apply(num_new=AGREED - 1)
    validated_blocks.clear()
    with handle:
        for tokens, expected in ((33, 1), (31, 1), (29, 1)):
            run_steps(prepared.model, token_batch(3, tokens), num_steps=2)
            assert len(validated_blocks) == expected
        family.num_new = 31
        for tokens, expected in ((27, 2), (25, 2), (60, 3), (50, 3)):
            run_steps(prepared.model, token_batch(3, tokens), num_steps=2)
            assert len(validated_blocks) == expected


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_casts_and_dropout_and_constants_are_no_other_operators(
    toy_model, run_steps, assert_same_steps, autocast, caplog
):
    """The tape's casts cached by autocast, its dropout outputs and its Python constants cause no mismatch in
    validation."""

    def forward(block, hidden):
        scale = torch.tensor(hidden.shape[1])
        dropped = nn.functional.dropout(block.up(hidden), 0.5) * scale
        return hidden + block.down(dropped.tanh()) + block.down(hidden).exp()

    model = toy_model(forward)
    plain = run_steps(model, text(29), autocast=autocast)
    handle, family = PreparedModel(model, text(40), autocast=autocast).apply()
    with handle:
        assert_same_steps(run_steps(model, text(29), autocast=autocast), plain)
        assert families_of(handle.tape_cache) == {family}
    assert not caplog.records


# Operators that differ without failing a guard


def down(block, hidden):
    """Return a value that differs if replay starts from a wrong `hidden`."""
    return block.down((hidden * 1.5).tanh().exp())


class SavesOne(torch.autograd.Function):
    """x + y, which saves the one of the two that `index` selects."""

    @staticmethod
    def forward(ctx, x, y, index):
        ctx.save_for_backward((x, y)[index])
        return x + y

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        return gradient * saved, gradient, None


def without_autocast(hidden):
    with torch.autocast("cpu", enabled=False):
        return hidden.float().matmul(torch.eye(8))


def ab(block, hidden):
    return block.up(hidden).tanh(), block.up(hidden).sigmoid()


OTHERWISE = {
    "operator": (lambda b, h: down(b, b.up(h).sin()), lambda b, h: down(b, b.up(h).cos())),
    "number": (lambda b, h: down(b, b.up(h).tanh().roll(2, 1)), lambda b, h: down(b, b.up(h).tanh().roll(3, 1))),
    "factor": (lambda b, h: down(b, b.up(h) * 2.0), lambda b, h: down(b, b.up(h) * 3.0)),
    "type of a number": (lambda b, h: down(b, b.up(h) * 2.0), lambda b, h: down(b, b.up(h) * 2)),
    "one more": (lambda b, h: down(b, b.up(h).tanh()), lambda b, h: down(b, b.up(h).neg().tanh())),
    "one less": (lambda b, h: down(b, b.up(h).neg().tanh()), lambda b, h: down(b, b.up(h).tanh())),
    "none": (lambda b, h: down(b, b.up(h)), lambda b, h: b.up(h)),
    "one at the end": (lambda b, h: down(b, b.up(h)), lambda b, h: down(b, b.up(h)).neg()),
    "view": (lambda b, h: down(b, b.up(h).tanh().flip(1) * 2), lambda b, h: down(b, b.up(h).tanh().flip(2) * 2)),
    "view of equal geometry": (
        lambda b, h: down(b, b.square @ b.up(h).flatten(0, 1)[:8] * 2).sum(0),
        lambda b, h: down(b, b.square.t() @ b.up(h).flatten(0, 1)[:8] * 2).sum(0),
    ),
    "inputs swapped": (
        lambda b, h: down(b, torch.sub(*ab(b, h))),
        lambda b, h: down(b, torch.sub(*reversed(ab(b, h)))),
    ),
    "earlier value": (
        lambda b, h: (lambda x: down(b, x.tanh() * x.sin()))(b.up(h)),
        lambda b, h: (lambda x: down(b, x.tanh() * x.sin().mul(0).add(1)))(b.up(h)),
    ),
    "result of another operator": (
        lambda b, h: (lambda one, other: down(b, one.exp() + other))(*ab(b, h)),
        lambda b, h: (lambda one, other: down(b, other.exp() + one))(*ab(b, h)),
    ),
    "parameter": (lambda b, h: down(b, b.up(h).tanh()), lambda b, h: down(b, b.over(h).tanh())),
    "parameter that only replay reads": (
        lambda b, h: down(b, (h.detach() + b.up.bias).tanh()),
        lambda b, h: down(b, (h.detach() + b.over.bias).tanh()),
    ),
    "buffer": (lambda b, h: down(b, b.up(h) * b.one), lambda b, h: down(b, b.up(h) * b.two)),
    "argument": (
        lambda b, h, first, second: down(b, b.up(h) * first),
        lambda b, h, first, second: down(b, b.up(h) * second),
    ),
    "saved tensor": (
        lambda b, h: down(b, SavesOne.apply(*ab(b, h), 0)),
        lambda b, h: down(b, SavesOne.apply(*ab(b, h), 1)),
    ),
    "saved tensors": (lambda b, h: down(b, b.up(h).exp()), lambda b, h: down(b, b.up(h).exp()).exp().log()),
    "mutation": (
        lambda b, h: down(b, (b.up(h).tanh() * 2).relu() * 1),
        lambda b, h: down(b, (b.up(h).tanh() * 2).relu_() * 1),
    ),
    "mutated tensor": (
        lambda b, h: (lambda one, other: down(b, one.mul_(2) + other))(*(each * 1 for each in ab(b, h))),
        lambda b, h: (lambda one, other: down(b, one + other.mul_(2)))(*(each * 1 for each in ab(b, h))),
    ),
    "mutated state": (lambda b, h: down(b, b.up(h) * b.one), lambda b, h: down(b, b.up(h) * b.one.add_(1))),
    "dropout's rate": (
        lambda b, h: down(b, nn.functional.dropout(b.up(h), 0.5)),
        lambda b, h: down(b, nn.functional.dropout(b.up(h), 0.4)),
    ),
    "dropout's input": (
        lambda b, h: (lambda one, other: down(b, nn.functional.dropout(one, 0.5) * other))(*ab(b, h)),
        lambda b, h: (lambda one, other: down(b, nn.functional.dropout(other, 0.5) * one))(*ab(b, h)),
    ),
    "no dropout": (
        lambda b, h: down(b, nn.functional.dropout(b.up(h), 0.5)),
        lambda b, h: down(b, nn.functional.dropout(b.up(h), 0.5, training=False)),
    ),
    "noise": (lambda b, h: down(b, b.up(h) + torch.rand(8)), lambda b, h: down(b, b.up(h) + torch.randn(8))),
    "constant": (
        lambda b, h: down(b, b.up(h) * torch.tensor(2.0)),
        lambda b, h: down(b, b.up(h) * torch.tensor(3.0)),
    ),
}
"""The program that a block usually runs, and another one that passes the same guards."""
FROM_ELSEWHERE = {
    "list of constants": (
        lambda b, h: down(b, b.up(h) * torch.tensor([2.0] * 8)),
        lambda b, h: down(b, b.up(h) * torch.tensor([3.0] * 8)),
    ),
    "global tensor": (lambda b, h: down(b, b.up(h) * HALF), lambda b, h: down(b, b.up(h) * FLAT)),
}
"""Programs that read other outside tensors, from which no value is replayed (rule R12): no call leaves its tape for
them."""
HALF, FLAT = torch.linspace(0.1, 1, 8), torch.linspace(1, 0.1, 8)
AUTOCAST = {
    "no cast": (lambda b, h: b.up(h).matmul(torch.eye(8)), lambda b, h: without_autocast(b.up(h))),
    "another cast": (lambda b, h: b.up(h).to(torch.float32), lambda b, h: b.up(h).to(torch.float64)),
    "cast of another parameter": (lambda b, h: b.up(h), lambda b, h: b.over(h)),
}


def setup(block):
    block.over = nn.Linear(8, 8)
    block.register_buffer("one", torch.linspace(0.5, 1.5, 8))
    block.register_buffer("two", torch.linspace(1.5, 0.5, 8))
    block.register_buffer("square", torch.linspace(-1, 1, 64).view(8, 8))


class Switch:
    """Blocks that run `usually`, or `then` while the switch is on. With a number, only that block runs `then`."""

    def __init__(self, usually, then, number=None, is_untraced=False):
        self.is_on = False
        self.programs = usually, then
        self.number = number

        @torch.compiler.assume_constant_result
        def is_on():
            return self.is_on

        self.choice = is_on
        self.opaque = torch.compiler.disable(lambda hidden: hidden * 1.0) if is_untraced else (lambda hidden: hidden)

    def forward(self, block, hidden, **kwargs):
        is_other = self.choice() and self.number in (None, block.number)
        program = self.programs[1] if is_other else self.programs[0]
        return hidden + program(block, self.opaque(hidden), **kwargs).float()

    def model(self, toy_model, num_blocks=2):
        numbers = iter(range(num_blocks))

        def give(block):
            setup(block)
            block.number = next(numbers)

        takes_arguments = "first" in self.programs[0].__code__.co_varnames
        arguments = {"first": torch.linspace(0.5, 1, 8), "second": torch.linspace(1, 0.5, 8)}
        return toy_model(self.forward, num_blocks, setup=give, kwargs_of=lambda _: arguments if takes_arguments else {})


CASES = [(how, None) for how in OTHERWISE] + [(how, torch.bfloat16) for how in AUTOCAST]


@pytest.fixture(params=CASES, ids=lambda case: case[0])
def case(request):
    how, autocast = request.param
    return (AUTOCAST if autocast else OTHERWISE)[how], autocast


def recompute_policy(model, batch, autocast):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
        return uniform_policy(profile_model(model, batch, CONFIG), "recompute")


def test_other_operators_at_the_second_call_are_noticed(toy_model, run_steps, assert_same_steps, case):
    """Different operators at the second call are noticed before any replay, and later calls have their own records."""
    programs, autocast = case
    switch = Switch(*programs)
    model, batch = switch.model(toy_model), text(12)
    plain = {}
    for switch.is_on in (False, True):
        plain[switch.is_on] = run_steps(model, batch, autocast=autocast)
    switch.is_on = False
    policy = recompute_policy(model, batch, autocast)
    with apply_policy(model, policy) as handle:
        # The second call differs from the tape; the next ones are recorded again and validated.
        for switch.is_on in (False, True, True, True):
            assert_same_steps(run_steps(model, batch, 1, autocast), plain[switch.is_on][:1])
        assert handle.tape_cache.fallbacks.counts[DIVERGED] == 2  # one call of each block
        assert_same_steps(run_steps(model, batch, autocast=autocast), plain[True])
        assert handle.tape_cache.fallbacks.counts[DIVERGED] == 2


def test_other_operators_of_an_untraced_block_are_noticed_at_any_call(toy_model, run_steps, assert_same_steps, case):
    programs, autocast = case
    switch = Switch(*programs, is_untraced=True)
    model, batch = switch.model(toy_model), text(12)
    plain = {}
    for switch.is_on in (False, True):
        plain[switch.is_on] = run_steps(model, batch, 1, autocast)
    switch.is_on = False
    policy = recompute_policy(model, batch, autocast)
    with apply_policy(model, policy) as handle:
        for switch.is_on in [False] * 5 + [True, False, True, True, False, True] + [False] * 3:
            assert_same_steps(run_steps(model, batch, 1, autocast), plain[switch.is_on])
        strategies = handle.plans.strategies.values()
        assert all("torch.compiler.disable" in strategy.known_shapes.untraced for strategy in strategies)
        assert handle.tape_cache.fallbacks.counts[DIVERGED] > 2


def test_other_operators_at_a_new_size_are_noticed(toy_model, run_steps, assert_same_steps, case, caplog):
    programs, autocast = case
    switch = Switch(*programs)
    model = switch.model(toy_model)
    plain = []
    for tokens, switch.is_on in ((12, False), (13, True), (14, False)):
        plain.append(run_steps(model, text(tokens), 1, autocast))
    switch.is_on = False
    handle, _ = PreparedModel(model, text(40), autocast=autocast).apply()
    with handle, caplog.at_level(logging.WARNING):
        assert_same_steps(run_steps(model, text(12), 1, autocast), plain[0])
        assert not caplog.records
        switch.is_on = True
        assert_same_steps(run_steps(model, text(13), 1, autocast), plain[1])
        assert "block layers.0 runs other operators at some sizes" in caplog.records[0].message
        switch.is_on = False
        assert_same_steps(run_steps(model, text(14), 1, autocast), plain[2])
        assert not families_of(handle.tape_cache)
        strategies = handle.plans.strategies.values()
        assert not [entry for each in strategies for entry in each.entries.sized.values() if entry.is_current]


@pytest.mark.parametrize("what", FROM_ELSEWHERE)
@pytest.mark.parametrize("is_untraced", [False, True])
def test_tensors_from_elsewhere_may_be_others(toy_model, run_steps, assert_same_steps, what, is_untraced):
    switch = Switch(*FROM_ELSEWHERE[what], is_untraced=is_untraced)
    model, batch = switch.model(toy_model), text(12)
    plain = {}
    for switch.is_on in (False, True):
        plain[switch.is_on] = run_steps(model, batch, 1)
    switch.is_on = False
    policy = recompute_policy(model, batch, None)
    with apply_policy(model, policy) as handle:
        for switch.is_on in (False, True, True, False, False, True, False):
            assert_same_steps(run_steps(model, batch, 1), plain[switch.is_on])
        assert handle.tape_cache.fallbacks.counts[DIVERGED] == 0


def test_the_block_that_no_call_is_compared_of_is_refused(toy_model, run_steps):
    """A change without a guard, in a block whose calls are not compared, raises when autograd saves other tensors."""
    switch = Switch(*OTHERWISE["saved tensors"], number=1)
    model = switch.model(toy_model)
    handle, _ = PreparedModel(model, text(40)).apply()
    with handle:
        switch.is_on = True
        message = r"block layers\.1: .*the block's operators vary at one shape"
        with pytest.raises(SavedTensorMismatchError, match=message):
            run_steps(model, text(13))
        switch.is_on = False
        run_steps(model, text(13))


def test_what_a_guard_sees_is_another_program(toy_model, run_steps, assert_same_steps, caplog):
    """A change that a guard covers leads to another path with its own record, at the same sizes and in any block."""

    def forward(block, hidden):
        is_special = block.is_special and hidden.shape[1] == 13
        return hidden + OTHERWISE["saved tensors"][is_special](block, hidden)

    model = toy_model(forward, setup=lambda block: setattr(block, "is_special", False))
    prepared = PreparedModel(model, text(40))
    model.layers[1].is_special = True
    plain = [run_steps(model, text(tokens)) for tokens in (12, 13, 14)]
    handle, family = prepared.apply()
    with handle:
        for tokens, expected in [*zip((12, 13, 14), plain, strict=True)] * 2:
            assert_same_steps(run_steps(model, text(tokens)), expected)
        assert family in families_of(handle.tape_cache)
        assert handle.tape_cache.fallbacks.counts[DIVERGED] == 0
    assert not [record for record in caplog.records if "at some sizes" in record.message]


@pytest.mark.parametrize("then", [torch.exp, lambda hidden: hidden[:, :6].exp().sum()], ids=["alike", "otherwise"])
def test_a_block_that_changes_state_runs_once(toy_model, run_steps, assert_same_steps, then):
    """A block whose call changes state runs once, with and without a mismatch."""

    def usually(block, hidden, then=torch.exp):
        block.one.add_(1)
        inner = block.up(hidden).tanh() * block.one
        return then(inner)

    switch = Switch(usually, lambda block, hidden: usually(block, hidden, then))
    model = switch.model(toy_model)
    prepared = PreparedModel(model, text(40))
    plain = []
    for tokens, switch.is_on in ((12, False), (13, True)):
        plain.append(run_steps(model, text(tokens)))
    handle, family = prepared.apply()
    with handle:
        for tokens, expected in zip((12, 13), plain, strict=True):
            switch.is_on = tokens == 13
            assert_same_steps(run_steps(model, text(tokens)), expected)
        assert (families_of(handle.tape_cache) == {family}) == (then is torch.exp)


# Results that differ from call to call


NUM_CALLS = [0]


@pytest.fixture(scope="module")
def unsteady():
    """An operator whose result at 13 tokens changes with each call."""

    @torch.library.custom_op("adacc_test::unsteady", mutates_args=())
    def unsteady(x: torch.Tensor) -> torch.Tensor:
        NUM_CALLS[0] += x.shape[1] == 13
        return x * (1 + NUM_CALLS[0])

    def backward(context, gradient):
        (factor,) = context.saved_tensors
        return gradient * factor

    unsteady.register_fake(torch.empty_like)
    unsteady.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output / inputs[0])
    )
    return unsteady


def test_a_kernel_that_differs_at_one_size_is_retained_at_all(
    toy_model, run_steps, assert_same_steps, unsteady, caplog
):
    """A value that replay does not reproduce at one compared size is retained at all sizes."""

    def forward(block, hidden):
        return hidden + block.down(unsteady(block.up(hidden)).sin())

    model = toy_model(forward)
    NUM_CALLS[0] = 0
    prepared = PreparedModel(model, text(40))
    plain = run_steps(model, text(15))
    handle, family = prepared.apply(num_new=0)
    value = next(value.index for value in family.base.values if value.name.endswith("unsteady"))
    assert value in family.base.recomputable
    with handle:
        model(**text(13)).loss.backward()  # the first new size
        model.zero_grad(set_to_none=True)
        assert "replay did not recompute block:unsteady of block layers.0 bit for bit" in caplog.records[0].message
        assert families_of(handle.tape_cache) == {family}
        assert value not in family.base.recomputable
        NUM_CALLS[0] = 0
        assert_same_steps(run_steps(model, text(15)), plain)
        for strategy in handle.plans.strategies.values():
            for entry in (*strategy.entries.recorded.values(), *strategy.entries.sized.values()):
                assert value in entry.execution_plan.store.retained


@pytest.fixture(scope="module")
def leaving_unwritten():
    """An operator with a second result that changes with each call, like memory that a kernel leaves unwritten."""

    @torch.library.custom_op("adacc_test::leaving_unwritten", mutates_args=())
    def leaving_unwritten(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        NUM_CALLS[0] += 1
        return 2 * x, x.new_full((3,), NUM_CALLS[0])

    leaving_unwritten.register_fake(lambda x: (torch.empty_like(x), x.new_empty(3)))
    leaving_unwritten.register_autograd(
        lambda ctx, gradient, _: 2 * gradient + 0 * ctx.saved_tensors[0].sum(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
    )
    return leaving_unwritten


def test_what_no_replay_makes_is_not_compared(toy_model, leaving_unwritten, caplog):
    """Values that no replay computes are not compared. Example: cuDNN's attention without dropout saves an unwritten
    seed."""

    def forward(block, hidden):
        return hidden + block.down(leaving_unwritten(block.up(hidden))[0].sin())

    prepared = PreparedModel(toy_model(forward), text(40))
    handle, family = prepared.apply(num_new=0)
    unwritten_values = {
        value.name.rpartition(":")[2]: value.index for value in family.base.values if "unwritten" in value.name
    }
    assert unwritten_values
    with handle:
        prepared.model(**text(13)).loss.backward()  # the first new size, at which replay is compared
        assert not [record for record in caplog.records if "replay did not recompute" in record.message]
        assert families_of(handle.tape_cache) == {family}


@pytest.mark.parametrize("draws_otherwise", [False, True])
def test_masks_are_drawn_again_at_a_new_size_and_compared(
    toy_model, run_steps, assert_same_steps, monkeypatch, caplog, draws_otherwise
):
    """Masks are redrawn and compared at a new size (rule R7). A mask that differs is retained at all sizes."""
    model = toy_model(lambda block, hidden: hidden + block.down(nn.functional.dropout(block.up(hidden), 0.5).exp()))
    prepared = PreparedModel(model, text(40))
    plain = run_steps(model, text(13))
    handle, _ = prepared.apply(num_new=0)
    if draws_otherwise:
        other = torch.Generator().manual_seed(99).get_state()
        monkeypatch.setattr(validation, "draw_from_state", lambda state, device: draw_from_state(other, device))
    with handle:
        assert_same_steps(run_steps(model, text(13)), plain)
    messages = [record.message for record in caplog.records if "did not recompute" in record.message]
    assert [("div" in message or "bernoulli" in message) for message in messages] == [True] * draws_otherwise


# The validator itself
