"""Rule R1 in the settings that people train in: under random lossless policies, training equals plain training."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=0)


def autocast(dtype):
    return torch.autocast("cpu", dtype=dtype) if dtype else nullcontext()


@pytest.fixture(scope="module")
def tiny_llama(tiny_llama):
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return partial(tiny_llama, attention_dropout=0.1, **tokens)


@pytest.fixture(scope="module")
def padded_batch():
    """`padded_batch(tokens, seed=0)`: two sentences, the second three tokens shorter, with mask and labels."""

    def build(tokens, seed=0):
        ids = torch.randint(3, 61, (2, tokens), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        ids[1, -3:], mask[1, -3:] = 0, 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    return build


@pytest.fixture(scope="module")
def assert_same_training():
    """`assert_same_training(build, batch, loop, num_policies=2, precision=None)`: the loop runs alike under policies.
    `loop(model)` yields dicts of tensors. Policies are made from a profile of `batch` under autocast to `precision`."""

    def note(model, loop):
        torch.manual_seed(7)
        return [{name: tensor.clone() for name, tensor in step.items()} for step in loop(model)]

    def check(build, batch, loop, num_policies=2, precision=None):
        plain = note(build(), loop)
        with autocast(precision):
            profile = profile_model(build(), batch, CONFIG)
        actions = ("retain", "recompute", "compress")
        policies = [random_policy(profile, seed, actions, lossless=True) for seed in range(num_policies)]
        for policy in [uniform_policy(profile, "recompute"), *policies]:
            model = build()
            with apply_policy(model, policy, CONFIG):
                ours = note(model, loop)
            assert len(ours) == len(plain) > 0
            for number, (left, right) in enumerate(zip(ours, plain, strict=True)):
                assert left.keys() == right.keys()
                different = [name for name in left if not same_bits(left[name], right[name])]
                assert not different, f"step {number}: {different}"
        return profile

    return check


def same_bits(left, right):
    """Return True if two tensors are equal bit for bit, NaN included."""
    if left.shape != right.shape or left.dtype is not right.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)))


def state_of(model, loss):
    """Return the results of a step: loss, gradients and weights."""
    gradients = {f"{name} (gradient)": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **dict(model.named_parameters())}


def training(batches, precision=None, scaler=None):
    """Return a loop of SGD steps with gradient clipping."""

    def loop(model):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        scale = torch.amp.GradScaler("cpu", init_scale=scaler) if scaler else None
        for batch in batches:
            with autocast(precision):
                loss = model(**batch).loss
            (scale.scale(loss) if scale else loss).backward()
            if scale:
                scale.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            yield state_of(model, loss)
            if scale:
                scale.step(optimizer)
                scale.update()
            else:
                optimizer.step()
            optimizer.zero_grad()

    return loop


@pytest.mark.parametrize(("family", "attention"), [("gpt2", "sdpa"), ("gpt2", "eager"), ("llama", "sdpa")])
@pytest.mark.parametrize("precision", ["fp32", "pure-fp64", "pure-bf16", "autocast-bf16", "fp16-scaler"])
def test_precisions(request, family, attention, precision, padded_batch, assert_same_training):
    model = request.getfixturevalue(f"tiny_{family}")
    dtype = {"autocast-bf16": torch.bfloat16, "fp16-scaler": torch.float16}.get(precision)
    weights = {"pure-fp64": torch.float64, "pure-bf16": torch.bfloat16}.get(precision)
    batches = [padded_batch(12, seed) for seed in range(3)]

    def build():
        return model(attention).to(weights)

    loop = training(batches, dtype, scaler=1024.0 if precision == "fp16-scaler" else None)
    assert_same_training(build, padded_batch(12, 9), loop, precision=dtype)


ROTARY = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_tables_that_change_with_the_length(tiny_llama, padded_batch, assert_same_training, kind):
    """The model rebuilds its rotary tables for a text longer than its maximum and restores them afterwards."""
    rotary = {"rope_type": kind, "rope_theta": 10000.0, **ROTARY[kind]}
    batches = [padded_batch(tokens, tokens) for tokens in (12, 24, 12, 30, 12)]

    def build():
        return tiny_llama(rope_parameters=rotary, max_position_embeddings=16 if kind == "dynamic" else 32)

    assert_same_training(build, padded_batch(12), training(batches), num_policies=1)


def test_two_models_of_one_class_that_train_each_other(tiny_llama, padded_batch, assert_same_training):
    """Two models with a policy each train exactly if one backward runs through both, as in mutual learning."""
    policy = uniform_policy(profile_model(tiny_llama(), padded_batch(12), CONFIG), "recompute")
    runs = []

    def loop(model):
        other = tiny_llama()
        runs.append(model)
        with nullcontext() if len(runs) == 1 else apply_policy(other, policy, CONFIG):  # the first run is the plain one
            for seed in range(3):
                ours, theirs = (each(**padded_batch(12, seed)) for each in (model, other))
                loss = ours.loss + theirs.loss + (ours.logits - theirs.logits).square().mean()
                loss.backward()
                yield {**state_of(model, loss), **{f"other {name}": p.grad for name, p in other.named_parameters()}}
                model.zero_grad()
                other.zero_grad()

    assert_same_training(tiny_llama, padded_batch(12), loop)


PARTS = {"attention": "h.1.attn", "matrix": "h.0.mlp.c_fc", "block": "h.0", "inlet and block": "wte h.0 wpe"}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("first", ["frozen", "free"])
def test_weights_frozen_and_freed_in_mid_training(tiny_gpt2, padded_batch, assert_same_training, part, first):
    """Freezing changes the tensors that autograd saves. Profiled in the first state, trained in both, twice."""

    def freeze(model, frozen):
        for path in PARTS[part].split():
            model.transformer.get_submodule(path).requires_grad_(not frozen)
        return model

    def loop(model):
        for step in range(4):
            freeze(model, frozen=(first == "frozen") == (step % 2 == 0))
            yield from training([padded_batch(12, 3 * step + seed) for seed in range(3)])(model)

    assert_same_training(lambda: freeze(tiny_gpt2(), first == "frozen"), padded_batch(12), loop, num_policies=1)


def to_4_bits(block):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for name in ("q_proj", "o_proj"):
        plain = getattr(block.self_attn, name)
        layer = bitsandbytes.nn.Linear4bit(plain.in_features, plain.out_features, bias=False)
        layer.weight = bitsandbytes.nn.Params4bit(plain.weight.data, requires_grad=False, module=layer)
        setattr(block.self_attn, name, layer.to("cpu"))


def to_int8(block):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(block.mlp, quantization.Int8WeightOnlyConfig())


@pytest.mark.filterwarnings("ignore")  # bitsandbytes, torchao and peft warn of machines and versions
@pytest.mark.parametrize("quantize", [to_4_bits, to_int8])
def test_adapters_on_a_quantized_model(tiny_llama, padded_batch, assert_same_training, quantize):
    """Products save the dequantized weight, which is recomputed from its codes and scales."""
    peft = pytest.importorskip("peft")

    def build():
        model = tiny_llama(attention_dropout=0.0)
        for block in model.model.layers:
            quantize(block)
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["v_proj", "o_proj"], r=4)).train()

    def loop(model):
        for step in training([padded_batch(12, seed) for seed in range(2)])(model):
            yield {name: tensor for name, tensor in step.items() if type(tensor) in (torch.Tensor, torch.nn.Parameter)}

    profile = assert_same_training(build, padded_batch(12), loop, num_policies=1)
    stored_names = [v.name for v in profile.kinds[0].activations if v.producer is not None and not v.recomputable]
    assert not stored_names


@pytest.mark.filterwarnings("ignore")
def test_float8_training_of_torchao(tiny_llama, padded_batch, assert_same_training):
    """torchao's float8 tensors wrap other tensors and take few operators, so torch's checkpoint runs the blocks."""
    float8 = pytest.importorskip("torchao.float8")

    def build():
        model, config = tiny_llama().to(torch.bfloat16), float8.Float8LinearConfig(emulate=True)
        float8.convert_to_float8_training(model.model.layers, config=config)
        return model

    profile = assert_same_training(build, padded_batch(16), training([padded_batch(16, seed) for seed in range(2)]), 1)
    assert all("consist of others" in kind.untrusted for kind in profile.kinds)


def test_layerdrop(padded_batch, assert_same_training):
    """Profiled with all layers, trained with a random subset, which is empty in some steps."""
    from transformers import BartConfig, BartForConditionalGeneration

    settings = {"layers": 2, "attention_heads": 2, "ffn_dim": 24, "layerdrop": 0.5}

    def build():
        torch.manual_seed(0)
        sizes = {f"{part}_{name}": number for part in ("encoder", "decoder") for name, number in settings.items()}
        tokens = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = BartConfig(d_model=16, max_position_embeddings=32, use_cache=False, **sizes, **tokens)
        return BartForConditionalGeneration(config).train()

    model = build()
    profile = assert_same_training(build, padded_batch(12), training([padded_batch(12, seed) for seed in range(6)]), 1)
    assert len(profile.blocks) == 4
    assert model.model.encoder.layerdrop == model.config.decoder_layerdrop == 0.5
    policy = uniform_policy(profile_model(model, padded_batch(12), CONFIG), "recompute")
    assert model.model.encoder.layerdrop == model.config.decoder_layerdrop == 0.5
    stored = []
    with apply_policy(model, policy, CONFIG) as handle:
        for seed in range(8):
            torch.manual_seed(seed)
            stored.append(measure_step(model, padded_batch(12)).stored_bytes)
            model.zero_grad(set_to_none=True)
        assert handle.uncalled() == []
    assert len(set(stored)) > 1
    assert max(stored) <= policy.predicted_stored_bytes


class UserError(Exception):
    """An exception that a user's code raises in the middle of a step."""


def raise_user_error(*_):
    raise UserError


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception(tiny_gpt2, padded_batch, assert_same_training, where):
    def loop(model):
        inner = model.transformer.h[1].mlp.c_fc
        for step, state in enumerate(training([padded_batch(12, seed) for seed in range(3)])(model)):
            yield state
            register = inner.register_forward_hook if where == "forward" else inner.register_full_backward_hook
            hook = register(raise_user_error)
            with pytest.raises(UserError):
                model(**padded_batch(12, 5 + step)).loss.backward()
            hook.remove()

    assert_same_training(tiny_gpt2, padded_batch(12), loop)


class TestWhatBlocksDo:
    """Behaviour of other models' blocks that GPT-2's and LLaMA's blocks lack."""

    def test_a_mask_in_another_layout_is_decoded_into_it(self, toy_model, toy_batch, assert_exact):
        """Dropout on a transposed square: mask and payload have the same shape and different strides (WavLM)."""

        def forward(block, hidden):
            dropped = torch.nn.functional.dropout(block.up(hidden).transpose(0, 1), 0.5)
            return hidden + block.down(dropped.transpose(0, 1).contiguous())

        assert_exact(toy_model(forward), toy_batch(6))

    def test_a_parameter_of_the_model_given_to_blocks_stores_nothing(self, toy_model, toy_batch):
        """DeBERTa-v2 passes its relative embeddings to every block. A policy stores no bytes for them."""
        model = toy_model(lambda block, hidden, table: hidden + block.down(block.up(hidden) * table))
        model.table = torch.nn.Parameter(torch.randn(8))
        model.kwargs_of = lambda x: {"table": model.table}
        profile = profile_model(model, toy_batch(), CONFIG)
        assert [shared.nbytes for shared in profile.shared] == [0]
        assert not any(value.activation for kind in profile.kinds for value in kind.values if "table" in value.name)
        for action in ("retain", "recompute", "compress"):
            policy = uniform_policy(profile, action)
            with apply_policy(model, policy, CONFIG):
                assert measure_step(model, toy_batch()).stored_bytes == policy.predicted_stored_bytes

    def test_blocks_may_be_called_in_another_order_than_they_stand(self, toy_model, toy_batch, assert_exact, run_steps):
        """Blocks may be called in another order than they are registered, like CLIP's vision and text towers."""
        model = calling(toy_model(lambda block, hidden: block.down(block.up(hidden).tanh()), num_blocks=3), [2, 0, 1])
        profile = assert_exact(model, toy_batch())
        assert [block.name for block in profile.blocks] == ["layers.2", "layers.0", "layers.1"]
        policy = uniform_policy(profile, "recompute")
        with apply_policy(model, policy, CONFIG):
            run_steps(model, toy_batch())  # the recorded step, and the step that learns the order of backward
            assert measure_step(model, toy_batch()).peak_bytes == policy.predicted_peak_bytes

    def test_a_custom_operator_is_replayed(self, toy_model, toy_batch, assert_exact, custom_square):
        profile = assert_exact(toy_model(lambda b, h: h + b.down(custom_square(b.up(h)) * 0.5)), toy_batch())
        square_operators = [op for op in profile.kinds[0].operators if "square" in op.name]
        assert square_operators
        assert all(op.replayable for op in square_operators)


def calling(model, order):
    """Return `model` with its blocks called in `order`, a list of block indices."""

    class Ordered(type(model)):
        def forward(self, x):
            hidden = self.inlet(x)
            for index in order:
                hidden = self.layers[index](hidden)
            return SimpleNamespace(loss=self.head(hidden).square().mean())

    model.__class__ = Ordered
    return model


@pytest.fixture(scope="module")
def custom_square():
    """A user's operator with its own backward, registered by torch.library."""

    @torch.library.custom_op("adacc_test::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    def backward(context, gradient):
        (x,) = context.saved_tensors
        return 2 * gradient * x

    square.register_fake(torch.empty_like)
    square.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return square
