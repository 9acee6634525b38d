"""Policy handles: rules R8, R9, R10 and R12, and the refusal of policies made for another model."""

import logging
import random
from collections import Counter
from functools import partial

import pytest
import torch
from recomputed_models import recompute_all
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import CheckpointMismatchError, PolicyMismatchError, TapeMismatchError
from adacc_hf.solve.simple_policies import checkpoint_policy, random_policy, uniform_policy
from adacc_hf.tape.execution_plan import ExecutionPlan
from adacc_hf.tape.recorder import Recorder
from adacc_hf.torch_glue.compat import no_packed_sequences

CONFIG = AdaccConfig(min_compress_bytes=0)
ACTIONS = ("retain", "recompute", "compress")


@pytest.fixture
def batch(token_batch):
    return token_batch()


@pytest.fixture(params=["retain", "recompute", "random"])
def policy(request, gpt2_profile):
    if request.param == "random":
        return random_policy(gpt2_profile, 7, ACTIONS, lossless=True)
    return uniform_policy(gpt2_profile, request.param)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal(ours, plain):
    assert ours.keys() == plain.keys()
    assert not [name for name in ours if not torch.equal(ours[name], plain[name])]


# R8: changing shapes and operators


def test_a_new_shape_is_recorded_twice(gpt2, batch, token_batch, policy, run_steps, assert_same_steps, recorded_blocks):
    other = token_batch(3, 7)
    plain = [run_steps(gpt2, batch), run_steps(gpt2, other)]
    recorded_blocks.clear()
    with apply_policy(gpt2, policy):
        for _ in range(2):
            assert_same_steps(run_steps(gpt2, batch), plain[0])
            assert_same_steps(run_steps(gpt2, other), plain[1])
    # The second call of a shape checks the record of the first; a block that retains everything needs no tape.
    expected = ["transformer.h.0"] if policy.is_plain else ["transformer.h.0", "transformer.h.1"] * 4
    assert sorted(recorded_blocks) == sorted(expected)


def test_other_operators_recompute_and_are_said_once_with_what_to_do(
    gpt2, token_batch, recomputing, run_steps, assert_same_steps, caplog
):
    """A batch of one makes views where other batches copy."""
    one = token_batch(1, 12)
    plain = run_steps(gpt2, one)
    with apply_policy(gpt2, recomputing), caplog.at_level(logging.INFO):
        run_steps(gpt2, token_batch(), num_steps=1)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert_same_steps(run_steps(gpt2, one), plain)
        for batch in (token_batch(1, 1), token_batch(2, 1)):
            run_steps(gpt2, batch, num_steps=1)
    warnings = [record for record in caplog.records if "run other operators" in record.message]
    assert [record.levelno for record in warnings] == [logging.WARNING, *[logging.INFO] * (len(warnings) - 1)]
    assert len(warnings) > 1
    message = "for inputs of shape (1, 12, 32), block transformer.h.0 and others of its kind run other operators"
    assert message in warnings[0].message
    assert (
        "with the least memory for the values that differ; to avoid this, set dataloader_drop_last=True or pad"
        in warnings[0].message
    )


def unseen(values):
    """Return `values[0]`. No guard covers a change of the value; only the check of autograd's saved tensors notices."""
    return torch.compiler.assume_constant_result(lambda: values[0])


def test_operators_that_vary_at_one_shape_are_refused(toy_model, toy_batch):
    depth = [1]
    number = unseen(depth)

    def forward(block, hidden):
        for _ in range(number()):
            hidden = hidden + block.down(block.up(hidden).tanh())
        return hidden

    model, batch = toy_model(forward), toy_batch()
    with recompute_all(model, batch, CONFIG):
        for _ in range(2):  # the first call is recorded, the second is checked against the record
            model(**batch).loss.backward()
        depth[0] = 2
        message = r"layers\.0: saved tensor 5 is .*no slot of this number; the block's operators vary"
        with pytest.raises(TapeMismatchError, match=message):
            model(**batch)
        depth[0] = 0
        with pytest.raises(TapeMismatchError, match=r"autograd saved 0 tensors, but the tape has 5; .*block_classes"):
            model(**batch)
        depth[0] = 1
        model(**batch).loss.backward()


@pytest.mark.parametrize(
    ("other", "shape"),
    [
        pytest.param(lambda both: both.transpose(0, 1).contiguous().transpose(0, 1)[..., :8], 8, id="stride"),
        pytest.param(lambda both: both.double()[..., :8], 8, id="dtype"),
        pytest.param(lambda both: both[..., :4].clone(), 4, id="shape"),
    ],
)
def test_a_saved_tensor_that_differs_is_refused(toy_model, toy_batch, other, shape):
    """Replay would create a tensor of the shape and with the strides on the tape (rule R8), so others are refused."""
    is_other = [False]
    number = unseen(is_other)

    def forward(block, hidden):
        both = torch.cat([block.up(hidden)] * 2, -1)
        part = other(both) if number() else both[..., :8]
        square = (part * part).to(hidden.dtype)
        return hidden + block.down(nn.functional.pad(square, (0, 8 - square.shape[-1])))

    model, batch = toy_model(forward), toy_batch()
    with recompute_all(model, batch, CONFIG):
        for _ in range(2):
            model(**batch)
        is_other[0] = True
        message = rf"saved tensor 2 is \(2, 6, {shape}\) .*but the tape has \(2, 6, 8\)"
        with pytest.raises(TapeMismatchError, match=message):
            model(**batch)


# R9: uses of the graph other than one forward and one backward


def test_evaluation_and_no_grad_are_plain(gpt2, batch, policy):
    with torch.no_grad():
        torch.manual_seed(1)
        training = gpt2(**batch).loss
    evaluation = gpt2.eval()(**batch).loss
    with apply_policy(gpt2.train(), policy) as handle:
        torch.manual_seed(1)
        with torch.no_grad():
            assert torch.equal(gpt2(**batch).loss, training)
        assert torch.equal(gpt2.eval()(**batch).loss, evaluation)
        assert handle.uncalled() == ["transformer.h.0", "transformer.h.1"]
    gpt2.train()


def backward_twice(model, batch):
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    loss.backward()


def double_backward(model, batch):
    loss = model(**batch).loss
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in first).backward()


def gradient_of_a_part(model, batch):
    loss = model(**batch).loss
    block = model.transformer.h[1]
    part = torch.autograd.grad(loss, [block.mlp.c_fc.weight, block.ln_2.weight], retain_graph=True)
    loss.backward()
    return {"fc": part[0], "norm": part[1]}


def two_forwards_first(model, batch):
    first = model(**batch).loss
    second = model(**batch).loss
    first.backward()
    second.backward()


def second_forward_backward_first(model, batch):
    first, second = model(**batch).loss, model(**batch).loss
    second.backward()
    first.backward()


def one_backward_for_two(model, batch):
    (model(**batch).loss + 2 * model(**batch).loss).backward()


def accumulation(model, batch):
    for _ in range(3):
        model(**batch).loss.backward()


def unused_forward(model, batch):
    model(**batch)
    model(**batch).loss.backward()


USES = [backward_twice, double_backward, gradient_of_a_part, two_forwards_first, second_forward_backward_first]
USES += [one_backward_for_two, accumulation, unused_forward]


@pytest.mark.parametrize("use", USES)
def test_every_use_of_the_graph_is_exact(tiny_gpt2, batch, use):
    """Every use of the graph is bit-equal, as first, second and third step, with plain steps in between."""
    model = tiny_gpt2("eager")
    profile = profile_model(model, batch, CONFIG)

    def three_times():
        results = []
        for seed in range(6):
            torch.manual_seed(seed)
            model.zero_grad(set_to_none=True)
            parts = (use if seed % 2 == 0 else accumulation)(model, batch) or {}
            results.append({**parts, **gradients(model)})
        return results

    plain = three_times()
    for policy in (uniform_policy(profile, "recompute"), random_policy(profile, 3, ACTIONS, lossless=True)):
        with apply_policy(model, policy):
            for ours, expected in zip(three_times(), plain, strict=True):
                assert_equal(ours, expected)


def test_the_order_of_backward_is_that_of_other_sizes(tiny_gpt2, token_batch, monkeypatch):
    def fail(*_):
        raise AssertionError("out of order")

    model = tiny_gpt2()
    profile = profile_model(model, token_batch(tokens=12), CONFIG)
    monkeypatch.setattr(ExecutionPlan, "program_out_of_order", fail)
    recompute = uniform_policy(profile, "recompute")
    with apply_policy(model, recompute) as handle:
        for tokens in (8, 8, 10):
            model(**token_batch(tokens=tokens)).loss.backward()
            handle.replace(recompute)  # its strategies have not run a backward of that length


def test_a_freed_graph_is_refused_as_in_plain_training(gpt2, batch, policy):
    with apply_policy(gpt2, policy):
        for _ in range(2):
            loss = gpt2(**batch).loss
            loss.backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()


# R10: no synchronization


def test_a_steady_step_enters_no_dispatch_mode(gpt2, batch, gpt2_profile, run_steps, monkeypatch):
    """A steady step enters no dispatch mode in forward or backward. The recorded steps before it do."""
    entered = []
    enter = TorchDispatchMode.__enter__
    monkeypatch.setattr(TorchDispatchMode, "__enter__", lambda mode: entered.append(type(mode)) or enter(mode))
    with apply_policy(gpt2, random_policy(gpt2_profile, 11, ACTIONS)):
        for expected in ([Recorder], [], []):
            run_steps(gpt2, batch, num_steps=2)
            assert entered == expected
            entered.clear()


class DoubledTanh(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.ops.aten.tanh.default else result


@pytest.mark.parametrize("make_policy", [partial(uniform_policy, action="recompute"), checkpoint_policy])
def test_operators_that_a_dispatch_mode_changes_in_forward_only_are_noticed(
    gpt2, batch, gpt2_profile, run_steps, make_policy
):
    with apply_policy(gpt2, make_policy(gpt2_profile)):
        run_steps(gpt2, batch, num_steps=6)
        with DoubledTanh():
            loss = gpt2(**batch).loss
        with pytest.raises((TapeMismatchError, CheckpointMismatchError), match=r"other (bits|numbers)"):
            loss.backward()


# R12: tensors read from outside the call


def test_what_comes_from_elsewhere_is_not_recomputable(toy_model, toy_batch, run_steps, assert_same_steps):
    """Values from outside the call are not recomputable (rule R12), because replay cannot notice that they changed."""
    tables = [torch.rand(8)]

    def forward(block, hidden):
        return hidden + block.down((block.up(hidden) * tables[0]).tanh()) * block.up(hidden).sigmoid()

    model, batch = toy_model(forward), toy_batch()
    profile = profile_model(model, batch, CONFIG)
    recomputable = {value.name: value.recomputable for value in profile.kinds[0].activations}
    assert recomputable["block:tanh"] is False
    assert recomputable["block:sigmoid"] is True

    def two_tables():
        results = []
        for number in (1.0, 2.0):
            tables[0] = torch.full((8,), number)
            results += run_steps(model, batch)
        return results

    plain = two_tables()
    with apply_policy(model, uniform_policy(profile, "recompute")):
        assert_same_steps(two_tables(), plain)


def test_a_policy_for_other_trainable_weights_is_refused(gpt2, batch, recomputing):
    """Weights frozen before the first step change the set of saved tensors, and the policy is refused."""
    gpt2.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    with (
        apply_policy(gpt2, recomputing),
        pytest.raises(PolicyMismatchError, match=r"transformer\.h\.0 .* was made for"),
    ):
        gpt2(**batch)


# Policies of another model


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(
            {"layers": 3}, "is for 2 blocks, but GPT2LMHeadModel has 3; it has no plan for transformer.h.2", id="3"
        ),
        pytest.param(
            {"layers": 1}, "is for 2 blocks, but GPT2LMHeadModel has 1; the model has no transformer.h.1", id="1"
        ),
        pytest.param({"width": 48}, r"block transformer\.h\.0 .* has tape", id="width"),
        pytest.param({"attention": "eager"}, r"block transformer\.h\.0 .* its attention", id="attention"),
        pytest.param({"resid_pdrop": 0.0}, r"block transformer\.h\.0 .* dropout", id="dropout"),
        pytest.param({"activation_function": "relu"}, r"block transformer\.h\.0 .* has tape", id="activation"),
    ],
)
def test_a_policy_of_another_model_is_refused(tiny_gpt2, batch, recomputing, config, message):
    model = tiny_gpt2(**config)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(PolicyMismatchError, match=message), apply_policy(model, recomputing):
        model(**batch)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_a_policy_of_another_precision_is_refused(gpt2, batch, recomputing):
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with apply_policy(gpt2, recomputing), autocast, pytest.raises(PolicyMismatchError, match="precision"):
        gpt2(**batch)


def test_a_policy_can_be_replaced_while_training(
    gpt2, batch, gpt2_profile, run_steps, assert_same_steps, recorded_blocks
):
    """Tapes are reused by the next policy, so that no call is recorded again."""
    plain = run_steps(gpt2, batch)
    with apply_policy(gpt2, uniform_policy(gpt2_profile, "recompute")) as handle:
        assert_same_steps(run_steps(gpt2, batch), plain)
        recorded_blocks.clear()
        for seed in random.Random(0).sample(range(100), 4):
            handle.replace(random_policy(gpt2_profile, seed, ACTIONS, lossless=True))
            assert_same_steps(run_steps(gpt2, batch), plain)
    assert not recorded_blocks


def test_one_autocast_around_several_steps_serves_new_shapes(tiny_gpt2, batch, token_batch):
    """One autocast context around several steps caches casts of parameters. A new shape recorded inside is exact."""
    model, other = tiny_gpt2(), token_batch(3, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        policy = uniform_policy(profile_model(model, batch, CONFIG), "recompute")

    def two_shapes():
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = [model(**batch).loss, model(**other).loss]
        for loss in losses:
            loss.backward()
        return gradients(model)

    plain = two_shapes()
    with apply_policy(model, policy):
        for _ in range(3):
            assert_equal(two_shapes(), plain)


aten = torch.ops.aten
WAITS = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.is_nonzero.default)
NEW_SIZES = [(3, 19), (5, 35), (3, 57)]


class Waiting(TorchDispatchMode):
    """A mode that counts the operators that read a tensor's data."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in WAITS:
            self.operators[str(func)] += 1
        return func(*args, **(kwargs or {}))


def waits(model, batch) -> Counter[str]:
    with Waiting() as waiting:
        model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    return waiting.operators


@pytest.mark.parametrize("action", ["recompute", "compress"])
def test_a_new_size_waits_for_nothing(tiny_gpt2, token_batch, action):
    model = tiny_gpt2("sdpa", layers=2, n_positions=64)
    profile, *_ = [profile_model(model, token_batch(*size), CONFIG) for size in ((8, 64), (8, 32), (2, 17), (3, 48))]
    policy = uniform_policy(profile, action)
    with no_packed_sequences():  # Transformers synchronizes to detect packing, in plain training too
        plain = {size: waits(model, token_batch(*size)) for size in NEW_SIZES}
        with apply_policy(model, policy, CONFIG):
            extra_waits = [waits(model, token_batch(*size)) - plain[size] for size in NEW_SIZES]
    assert not any(extra_waits)  # on a CPU, checksums need no operator
