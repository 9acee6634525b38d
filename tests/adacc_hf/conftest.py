"""Shared fixtures: hand-made profiles for the solver, the simulator and the records; tiny models; recorded-call
counts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import strategies as st

from adacc_hf.artifacts.plans import checkpoint_plan
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, BlockAction, Choice, Plan
from adacc_hf.artifacts.profile import (
    BackwardEvent,
    BlockProfile,
    CodecOption,
    ForwardEvent,
    Head,
    KindProfile,
    Operator,
    Profile,
    Shared,
    Value,
)
from adacc_hf.price.codec_gradient_error import GradientErrors
from adacc_hf.price.measurement import Measurement
from adacc_hf.run.call import Recording
from adacc_hf.run.validated_call import ValidatedCall
from adacc_hf.solve.simple_policies import random_policy, uniform_policy


@pytest.fixture
def recorded_blocks(monkeypatch):
    """Names of the blocks whose calls were recorded, alone or while validated against a tape."""
    names = []
    for of in (Recording, ValidatedCall):
        run = of.run
        monkeypatch.setattr(of, "run", lambda self, *call, run=run: names.append(self.name) or run(self, *call))
    return names


@dataclass
class TapeBuilder:
    """A builder of a `KindProfile`, operator by operator. Backward visits the slots of the last operator first."""

    values: list[dict] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    nodes: list[list[int]] = field(default_factory=list)
    """Indices of the values that each autograd node saves."""

    def value(self, name, nbytes, producer=None, **fields):
        self.values.append({"name": name, "nbytes": nbytes, "producer": producer, "codecs": (), **fields})
        return len(self.values) - 1

    def operator(self, name, inputs, outputs, ms, save=(), replayable=True):
        """Add an operator and return the indices of its outputs.

        `outputs` holds (name, nbytes) pairs. `save` holds indices of the values that the operator's autograd node
        saves; a negative number is a position in `outputs`.
        """
        index = len(self.operators)
        output_indices = [self.value(label, nbytes, index) for label, nbytes in outputs]
        for value in output_indices:
            self.values[value]["recomputable"] = replayable
        self.operators.append(
            Operator(
                index=index,
                name=name,
                module="",
                inputs=tuple(inputs),
                outputs=tuple(output_indices),
                ms=ms,
                replayable=replayable,
            )
        )
        self.nodes.append([output_indices[v] if v < 0 else v for v in save])
        return output_indices

    def kind(self, digest="tape", extra_bytes=0, forward_extra_bytes=0):
        saved = {value for node in self.nodes for value in node}
        values = tuple(self._record(index, fields, index in saved) for index, fields in enumerate(self.values))
        slots, backward = [], []
        for node in self.nodes:
            first = len(slots)
            slots += node
            events = [(slot, release) for release in (False, True) for slot in range(first, len(slots))]
            backward = [
                BackwardEvent(slot=slot, release=release, entry_bytes=extra_bytes // 2, extra_bytes=extra_bytes)
                for slot, release in events
            ] + backward
        return KindProfile(
            digest=digest,
            block_class="Block",
            values=values,
            operators=tuple(self.operators),
            slots=tuple(slots),
            backward=tuple(backward),
            forward=self._forward(forward_extra_bytes),
            forward_ms=sum(operator.ms for operator in self.operators),
        )

    def _forward(self, extra_bytes):
        """Return the forward's events: the first save of each value, and its death with the last operator that reads
        it."""
        events = [ForwardEvent(value=-1, death=False, extra_bytes=extra_bytes)]
        first = {value: i for i, node in reversed(list(enumerate(self.nodes))) for value in node}
        last = {value: i for i, op in enumerate(self.operators) for value in (*op.outputs, *op.inputs)}
        for i in range(len(self.operators)):
            for death, times in ((False, first), (True, last)):
                values = [
                    value for value in first if times.get(value) == i and self.values[value]["producer"] is not None
                ]
                events += [ForwardEvent(value=value, death=death, extra_bytes=extra_bytes) for value in values]
        return tuple(events)

    @staticmethod
    def _record(index, fields, saved):
        shared = fields.get("shared")
        return Value(
            **{
                "index": index,
                "shape": (fields["nbytes"],),
                "encoded_shape": (fields["nbytes"],),
                "dtype": "uint8",
                "saved": saved,
                "activation": shared is None and (saved or fields["producer"] is None),
                "shared": None,
                "recomputable": False,
                "role": "other",
                "place": (index,) if fields["producer"] is None and fields.get("role") != "generator" else (),
                **fields,
            }
        )


def codec(name, nbytes, encode_ms, decode_ms, error=0.1):
    return CodecOption(
        codec=name,
        options=(("group_size", 64),),
        nbytes=nbytes,
        encode_ms=encode_ms,
        decode_ms=decode_ms,
        error=error,
        lossless=error == 0.0,
    )


def make_profile(kinds, layout, shared=(), **memory):
    """Return a profile whose i-th block is of kind `layout[i]`."""
    gradient_bytes = memory.pop("gradient_bytes", 0)
    base = memory.setdefault("static_bytes", 1000)
    forward_base = memory.pop("forward_base_bytes", base + 100)
    return Profile(
        **{
            "model_class": "Toy",
            "kinds": tuple(kinds),
            "blocks": tuple(
                BlockProfile(
                    name=f"h.{i}",
                    kind=kind,
                    forward_base_bytes=forward_base,
                    backward_base_bytes=base + gradient_bytes * (len(layout) - i),
                )
                for i, kind in enumerate(layout)
            ),
            "shared": tuple(shared),
            "outside_stored_bytes": 100,
            "outside_peak_bytes": base + 300,
            "loss_peak_bytes": base + 250,
            "tail_peak_bytes": base + 200,
            "available_bytes": 1 << 40,
            "step_ms": 100.0,
            "device": "cpu",
            **memory,
        }
    )


def with_chunked_head(profile, saved_bytes, ms=5.0):
    """Return `profile` with a second, chunked head whose peak is `saved_bytes` lower and that takes `ms` longer."""
    head = Head(
        name="chunked",
        ms=20.0 + ms,
        outside_stored_bytes=profile.outside_stored_bytes,
        outside_peak_bytes=profile.outside_peak_bytes - saved_bytes,
        loss_peak_bytes=profile.loss_peak_bytes - saved_bytes,
        tail_peak_bytes=profile.tail_peak_bytes,
        backward_base_bytes=tuple(block.backward_base_bytes for block in profile.blocks),
    )
    return replace(profile, head_ms=20.0, other_heads=(head,))


def gpt2_kind(batch, tokens, width, heads, attention, bytes_per_element):
    """Return a GPT-2 block in training, priced like a device of 100 TFLOP/s and 1 TB/s."""
    tape = TapeBuilder()
    hidden = batch * tokens * width * bytes_per_element
    rows = batch * tokens * 4
    scores = batch * heads * tokens * tokens * bytes_per_element

    def copy_ms(nbytes):
        return 0.005 + nbytes / 1e9

    def matmul_ms(columns_in, columns_out):
        return 0.005 + 2 * batch * tokens * columns_in * columns_out / 1e11

    def int4(value, name="outlier_int4", cost=2.0, error=0.08):
        nbytes = tape.values[value]["nbytes"]
        tape.values[value]["codecs"] = (
            codec(name, nbytes * 9 // 32, cost * copy_ms(nbytes), copy_ms(nbytes), error),
            codec("int8", nbytes * 17 // 32, copy_ms(nbytes), copy_ms(nbytes), error / 6),
        )

    def bits(value):
        nbytes = tape.values[value]["nbytes"]
        tape.values[value]["codecs"] = (codec("bitmask", nbytes // 8, copy_ms(nbytes), copy_ms(nbytes), 0.0),)

    def dropout(source, nbytes, name):
        (mask,) = tape.operator(
            "rand_mask", [source], [(f"{name}.mask", nbytes // bytes_per_element)], 0.02, replayable=False
        )
        bits(mask)
        (out,) = tape.operator("mul_mask", [source, mask], [(name, nbytes)], copy_ms(nbytes), save=[mask])
        return out

    def linear(source, columns_in, columns_out, name):
        out_bytes = batch * tokens * columns_out * bytes_per_element
        (out,) = tape.operator(
            "addmm", [source], [(name, out_bytes)], matmul_ms(columns_in, columns_out), save=[source]
        )
        int4(source)
        return out

    def norm(source, name):
        outputs = [(name, hidden), (f"{name}.mean", rows), (f"{name}.rstd", rows)]
        out, _, _ = tape.operator("native_layer_norm", [source], outputs, copy_ms(hidden), save=[source, -2, -1])
        int4(source)
        return out

    def pointwise(name, sources, save=()):
        size = 4 * hidden
        (out,) = tape.operator(name, sources, [(name, size)], copy_ms(size), save=save)
        return out

    start = tape.value("hidden_states", hidden)
    qkv = linear(norm(start, "ln_1"), width, 3 * width, "c_attn")
    if attention == "sdpa":
        outputs = [("sdpa", hidden), ("logsumexp", rows * heads), ("seed", 16)]
        ms = 4 * batch * tokens * tokens * width / 1e11
        out, _, _ = tape.operator("flash", [qkv], outputs, ms, save=[qkv, -3, -2, -1], replayable=False)
        int4(out)
    else:
        (weights,) = tape.operator(
            "bmm", [qkv], [("scores", scores)], 2 * batch * tokens * tokens * width / 1e11, save=[qkv]
        )
        mask = tape.value("attention_mask", tokens * tokens, shared=0)
        (masked,) = tape.operator("where", [weights, mask], [("masked", scores)], copy_ms(scores), save=[mask])
        (soft,) = tape.operator("softmax", [masked], [("softmax", scores)], copy_ms(scores), save=[-1])
        int4(soft, "asymmetric_int4")
        dropped = dropout(soft, scores, "attn_dropout")
        int4(dropped, "asymmetric_int4")
        ms = 2 * batch * tokens * tokens * width / 1e11
        (out,) = tape.operator("bmm", [dropped, qkv], [("context", hidden)], ms, save=[dropped])
    int4(qkv, "channel_int4")
    (merged,) = tape.operator("clone", [out], [("merged", hidden)], copy_ms(hidden))
    first = dropout(linear(merged, width, width, "attn.c_proj"), hidden, "resid_dropout")
    (middle,) = tape.operator("add", [start, first], [("residual", hidden)], copy_ms(hidden))
    up = linear(norm(middle, "ln_2"), width, 4 * width, "c_fc")
    cube = pointwise("pow", [up], save=[up])
    inner = pointwise("add", [up, pointwise("mul", [cube])])
    tanh = pointwise("tanh", [pointwise("mul", [inner])], save=[-1])
    half = pointwise("half", [up])
    shifted = pointwise("add_one", [tanh])
    gelu = pointwise("gelu", [half, shifted], save=[half, shifted])
    for value in (up, tanh, half, shifted):
        int4(value)
    second = dropout(linear(gelu, 4 * width, width, "mlp.c_proj"), hidden, "mlp_dropout")
    tape.operator("add", [middle, second], [("out", hidden)], copy_ms(hidden))
    return tape.kind(digest=f"gpt2-{attention}", extra_bytes=8 * hidden, forward_extra_bytes=9 * hidden)


@pytest.fixture(scope="session")
def gpt2_like_profile():
    """A factory of profiles like a GPT-2's: `gpt2_like_profile(num_blocks=12, attention="sdpa")`."""

    def build(num_blocks=12, attention="sdpa", batch=8, tokens=1024, width=768, bytes_per_element=2):
        kind = gpt2_kind(batch, tokens, width, width // 64, attention, bytes_per_element)
        hidden = batch * tokens * width * bytes_per_element
        parameters = 4 * (num_blocks * 12 * width * width + 51200 * width)
        static = 3 * parameters
        logits = batch * tokens * 51200 * 4
        return make_profile(
            [kind],
            [0] * num_blocks,
            shared=[Shared(name="attention_mask", nbytes=tokens * tokens, saved=True)] if attention == "eager" else [],
            static_bytes=static,
            gradient_bytes=4 * 12 * width * width,
            outside_stored_bytes=2 * hidden,
            forward_base_bytes=static + 3 * hidden,
            outside_peak_bytes=static + 2 * hidden + 2 * logits,
            loss_peak_bytes=static + 2 * hidden + 2 * logits,
            tail_peak_bytes=static + parameters,
            available_bytes=80 << 30,
        )

    return build


@pytest.fixture(scope="session")
def tape_builder():
    """The class that builds a kind operator by operator."""
    return TapeBuilder


@pytest.fixture(scope="session")
def make_codec():
    """`make_codec(name, nbytes, encode_ms, decode_ms, error)`: a priced codec."""
    return codec


@pytest.fixture(scope="session")
def profile_of():
    """`profile_of(kinds, layout, shared=(), **memory)`: a profile whose i-th block is of kind `layout[i]`."""
    return make_profile


@pytest.fixture(scope="session")
def add_chunked_head():
    """`add_chunked_head(profile, saved_bytes, ms=5.0)`: the profile with a chunked head as another option."""
    return with_chunked_head


@st.composite
def random_kinds(draw, digest="tape"):
    """Draw a small kind with at most about 2000 plans. Times are multiples of 1/8, so that sums are exact."""
    tape = TapeBuilder()
    sizes = st.integers(1, 40).map(lambda n: 4 * n)
    eighths = st.integers(0, 24).map(lambda n: n / 8)
    values = [tape.value("input", draw(sizes)), tape.value("rotary", draw(sizes), shared=0)]
    values.append(tape.value("mask", draw(sizes), shared=1))
    for j in range(draw(st.integers(1, 5))):
        inputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True))
        outputs = [(f"v{j}.{i}", draw(sizes)) for i in range(draw(st.integers(1, 2)))]
        candidates = [*inputs, *range(-len(outputs), 0)]
        save = draw(st.lists(st.sampled_from(candidates), max_size=2, unique=True))
        save = [value for value in save if tape.values[value].get("shared") != 1 or value < 0]
        if draw(st.integers(0, 3)) == 0:
            inputs.append(tape.value("generator", draw(sizes), role="generator", activation=False))
        values += tape.operator(f"op{j}", inputs, outputs, draw(eighths), save, replayable=draw(st.integers(0, 5)) > 0)
    saved = sorted({value for node in tape.nodes for value in node})
    for value in draw(st.lists(st.sampled_from(saved), max_size=3, unique=True)) if saved else []:
        nbytes = tape.values[value]["nbytes"]
        tape.values[value]["codecs"] = tuple(
            codec(name, draw(st.integers(1, nbytes)), draw(eighths), draw(eighths), error)
            for name, error in (("int8", 0.01), ("int4", 0.1))[: draw(st.integers(1, 2))]
        )
    for value in draw(st.lists(st.sampled_from(saved), max_size=2, unique=True)) if saved else []:
        tape.values[value]["replay_error"] = 1.0
    return tape.kind(digest, extra_bytes=draw(sizes), forward_extra_bytes=draw(sizes))


@st.composite
def random_profiles(draw, num_kinds=1, max_blocks=1):
    """Draw profiles with up to `max_blocks` blocks of each of `num_kinds` kinds.

    Only the first shared tensor is saved, and some kinds read the second one in replay.
    """
    held_places, given_places = st.sampled_from([(), (1,)]), st.sampled_from([(0,), (0, 1)])
    actions = st.sampled_from([(BlockAction.PLAIN,), tuple(BlockAction)[:2]])
    kinds = [
        replace(
            draw(random_kinds(f"tape{i}")),
            held=draw(held_places),
            given=draw(given_places),
            block_actions=draw(actions),
        )
        for i in range(num_kinds)
    ]
    layout = [i for i in range(num_kinds) for _ in range(draw(st.integers(1, max_blocks)))]
    shared = [Shared(name="rotary", nbytes=12, saved=True), Shared(name="mask", nbytes=20, saved=False)]
    return make_profile(
        kinds,
        draw(st.permutations(layout)),
        shared,
        gradient_bytes=draw(st.integers(0, 50)),
        outside_live_bytes=draw(st.integers(0, 20)) if any(kind.held for kind in kinds) else 0,
    )


def every_plan_of(kind):
    menus = [[RETAIN, RECOMPUTE, *(Choice.compress(option) for option in v.codecs)] for v in kind.activations]
    for menu in itertools.product(*menus):
        choices = {value.index: choice for value, choice in zip(kind.activations, menu, strict=True)}
        lossy = [v.index for v in kind.activations for o in v.codecs if o.error and choices[v.index].codec == o.codec]
        if not any(choices[value] == RECOMPUTE for value in kind.exactness_dependents_of(lossy)):
            yield Plan(kind=kind.digest, choices=tuple(choices.items()))
    if BlockAction.CHECKPOINT not in kind.block_actions or not kind.slots:
        return
    menus = [[None, *(o for o in v.codecs if o.lossless or kind.allows_lossy_inputs)] for v in kind.inputs]
    for menu in itertools.product(*menus):
        options = zip(kind.inputs, menu, strict=True)
        yield checkpoint_plan(kind, {v.index: Choice.compress(o) for v, o in options if o is not None})


@pytest.fixture(scope="session")
def every_plan():
    """`every_plan(kind)`: all plans in which replay recomputes no value from coded values that it must not read.

    The simulator rejects some of them as infeasible.
    """
    return every_plan_of


@pytest.fixture(scope="session")
def profiles():
    """`profiles(num_kinds=1, max_blocks=1)`: a hypothesis strategy of small profiles."""
    return random_profiles


@pytest.fixture(scope="session")
def tiny_gpt2(one_thread):
    """`tiny_gpt2(attention="sdpa", layers=2, width=32, **config)`: a GPT-2 in train mode, with the same weights at each
    call.

    The model has no cache, as in Trainer and under gradient checkpointing. A cache copies keys and values, and the
    copies' layout changes sums by a rounding error.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    def build(attention="sdpa", layers=2, width=32, **config):
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 61,
            "n_positions": 64,
            "n_head": 2,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": False,
        }
        settings = GPT2Config(n_layer=layers, n_embd=width, attn_implementation=attention, **{**sizes, **config})
        return GPT2LMHeadModel(settings).train()

    return build


@pytest.fixture(scope="session")
def tiny_llama(one_thread):
    """`tiny_llama(attention="sdpa", layers=2, **config)`: a LLaMA with grouped queries, in train mode, without a
    cache."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(attention="sdpa", layers=2, **config):
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "use_cache": False,
        }
        settings = LlamaConfig(num_hidden_layers=layers, attn_implementation=attention, **{**sizes, **config})
        return LlamaForCausalLM(settings).train()

    return build


@pytest.fixture(scope="session")
def token_batch():
    """`token_batch(batch=2, tokens=12, vocabulary=61)`: random tokens that are also the labels."""
    import torch

    def build(batch=2, tokens=12, vocabulary=61):
        ids = torch.randint(0, vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(batch * tokens))
        return {"input_ids": ids, "labels": ids}

    return build


@pytest.fixture(scope="session")
def toy_model(one_thread):
    """`toy_model(forward, num_blocks=2, setup=None)`: a model whose blocks run `forward(block, hidden, **kwargs)`.

    A block has linear layers `up` (8 -> 8) and `down` (8 -> 8); `setup(block)` may add more. The model takes `x` of
    [batch, 6, 8] and passes the result of `kwargs_of(x)` to each block as keyword arguments.
    """
    from types import SimpleNamespace

    import torch
    from torch import nn
    from transformers.modeling_layers import GradientCheckpointingLayer

    class ToyModel(nn.Module):
        def __init__(self, blocks, kwargs_of):
            super().__init__()
            self.inlet = nn.Linear(8, 8)
            self.layers = nn.ModuleList(blocks)
            self.head = nn.Linear(8, 8)
            self.kwargs_of = kwargs_of

        def forward(self, x):
            hidden = self.inlet(x)
            kwargs = self.kwargs_of(x)
            for layer in self.layers:
                hidden = layer(hidden, **kwargs)
            return SimpleNamespace(loss=self.head(hidden).square().mean(), hidden=hidden)

    def build(forward, num_blocks=2, setup=None, kwargs_of=lambda x: {}):
        class ToyBlock(GradientCheckpointingLayer):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
                if setup is not None:
                    setup(self)

            def forward(self, hidden, **kwargs):
                return forward(self, hidden, **kwargs)

        torch.manual_seed(0)
        return ToyModel([ToyBlock() for _ in range(num_blocks)], kwargs_of).train()

    return build


@pytest.fixture(scope="session")
def toy_batch():
    """`toy_batch(batch=2)`: the `x` of [batch, 6, 8] that `toy_model` takes."""
    import torch

    def build(batch=2):
        return {"x": torch.randn(batch, 6, 8, generator=torch.Generator().manual_seed(batch))}

    return build


@pytest.fixture
def half_precision(monkeypatch):
    """Name of a codec registered by the tests only, for inputs of Linear layers: it stores 16 of a float's 32 bits."""
    from math import prod

    import torch

    from adacc_hf.kernels import codecs

    codecs.list_codecs()
    monkeypatch.setattr(codecs, "_registry", dict(codecs._registry))

    @codecs.register
    class HalfPrecision(codecs.Codec):
        name = "half_precision"
        suits = frozenset({"linear"})

        def supports(self, shape, dtype):
            return dtype is torch.float32

        def predicted_bytes(self, shape, dtype):
            return 2 * prod(shape)

        def encode(self, tensor):
            return codecs.Payload((tensor.detach().half(),), tensor.dtype, tuple(tensor.shape), tensor.stride())

        def decode(self, payload):
            out = torch.empty_strided(payload.size, payload.stride, dtype=payload.dtype)
            return out.copy_(payload.tensors[0])

    return HalfPrecision.name


@pytest.fixture(scope="session")
def run_steps():
    """`run_steps(model, batch, num_steps=3, autocast=None)`: a dict of the loss and every gradient, per step.

    Step i starts from random seed i. No optimizer runs. Buffers are restored at the end, so that runs can be compared.
    """
    import torch

    def run(model, batch, num_steps=3, autocast=None):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        results = []
        for seed in range(num_steps):
            torch.manual_seed(seed)
            model.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(**batch).loss
            loss.backward()
            tensors = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            tensors |= {f"{name} (buffer)": buffer.clone() for name, buffer in model.named_buffers()}
            results.append({"loss": loss.detach(), "generator": torch.get_rng_state(), **tensors})
        model.zero_grad(set_to_none=True)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        return results

    return run


@pytest.fixture(scope="session")
def assert_same_steps():
    """`assert_same_steps(ours, plain)`: all results of `run_steps` are bit-equal (rule R1), generator states
    included."""
    import torch

    def check(ours, plain):
        assert len(ours) == len(plain)
        for number, (left, right) in enumerate(zip(ours, plain, strict=True)):
            assert left.keys() == right.keys()
            different = [name for name in left if not torch.equal(left[name], right[name])]
            assert not different, f"step {number}: {different}"

    return check


@pytest.fixture(scope="session")
def assert_exact(run_steps, assert_same_steps):
    """`assert_exact(model, batch, num_policies=6)`: profile, train under lossless policies, and return the profile.

    The first policy recomputes every recomputable value, the others are random. All must equal plain training.
    """
    from adacc_hf import AdaccConfig, apply_policy, profile_model

    def check(model, batch, num_policies=6, autocast=None, config=None):
        import torch

        plain = run_steps(model, batch, autocast=autocast)
        config = config or AdaccConfig(min_compress_bytes=0)
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            profile = profile_model(model, batch, config)
        actions = ("retain", "recompute", "compress")
        policies = [random_policy(profile, seed, actions, lossless=True) for seed in range(num_policies)]
        for policy in [uniform_policy(profile, "recompute"), *policies]:
            with apply_policy(model, policy, config):
                assert_same_steps(run_steps(model, batch, autocast=autocast), plain)
        return profile

    return check


@pytest.fixture
def tight_profile():
    """A profile of one block whose least-peak policy is in reach only of the search at a larger budget."""
    tape = TapeBuilder()
    start = tape.value("input", 4, codecs=(codec("int8", 1, 0.0, 0.0),))
    rotary, mask = tape.value("rotary", 4, shared=0), tape.value("mask", 4, shared=1)
    (out,) = tape.operator("op", [start, mask], [("out", 24)], 1 / 8, save=[-1])
    tape.values[out]["codecs"] = (codec("int8", 1, 0.0, 1 / 8),)
    tape.operator("last", [start, rotary], [("last", 4)], 0.0, save=[start, rotary], replayable=False)
    shared = [Shared(name="rotary", nbytes=12, saved=True), Shared(name="mask", nbytes=20, saved=False)]
    kind = replace(tape.kind(extra_bytes=4, forward_extra_bytes=4), held=(1,))
    return make_profile([kind], [0], shared, outside_live_bytes=2)


@pytest.fixture
def wide_profile():
    """A profile of two blocks in which replaying everything has a higher peak than any other plan."""
    tape = TapeBuilder()
    start = tape.value("input", 4)
    hidden, _ = tape.operator("first", [start], [("hidden", 84), ("left", 80)], 7 / 8, save=[-1])
    tape.operator("second", [hidden], [("wide", 64), ("right", 12)], 1 / 8, save=[-1])
    kind = replace(tape.kind(extra_bytes=4, forward_extra_bytes=4), block_actions=(BlockAction.PLAIN,))
    return make_profile([kind], [0, 0], gradient_bytes=45)


class NoGradientErrors(Measurement):
    """Gradient errors that try no codec."""

    def gradient_errors(self, *_):
        return GradientErrors()


@pytest.fixture
def measurement_without_errors():
    """Measurement for a profile in which every codec stays available."""
    return NoGradientErrors()
