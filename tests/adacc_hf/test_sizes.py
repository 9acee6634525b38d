"""Rule R1 at sizes that were not recorded: models with symbolic tapes train bit for bit like plain ones.

With codecs they train like plain models whose saved tensors are replaced by the codecs' round trips.

By default each architecture runs in one precision. `ADACC_SIZES=500 pytest tests/adacc_hf/test_sizes.py` draws 500
sizes for each architecture in both. The examples are the same at every run.
"""

import copy
import os
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.policy import Action
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.eval.zoo.parts import VOCABULARY, padded_text, two_texts
from adacc_hf.run.blocks import Installation, PlainStrategy
from adacc_hf.run.call import Recording
from adacc_hf.solve.simple_policies import random_policy
from adacc_hf.tape.execution_plan import encode_view
from adacc_hf.tape.replay import view

NUM_SIZES = int(os.environ.get("ADACC_SIZES", "6"))
MOST_SAMPLES, MOST_TOKENS = 4, 48
CONFIG = AdaccConfig(min_compress_bytes=0)

NAMES = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neo",
    "gpt_neox", "gptj", "opt", "bloom", "falcon", "cohere", "olmo2", "smollm3", "stablelm", "starcoder2", "granite",
    "bert", "roberta", "electra", "distilbert", "t5", "bart", "mbart", "pegasus", "mixtral", "qwen3_moe",
)  # fmt: skip


def batch_of(make_batch, samples, tokens, targets, seed):
    """Return the architecture's batch, in these sizes."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length):
        return torch.randint(5, VOCABULARY - 5, (samples, length), generator=generator)

    if make_batch is two_texts:
        return {"input_ids": ids(tokens), "labels": ids(targets)}
    batch = {"input_ids": ids(tokens)}
    if make_batch is padded_text and tokens > 4:
        batch["attention_mask"] = torch.ones(samples, tokens, dtype=torch.long)
        batch["attention_mask"][-1, -2:] = 0
    return {**batch, "labels": batch["input_ids"]}


class Pair:
    """A model under a random lossless policy, and a copy without a policy."""

    def __init__(self, architecture, autocast, actions=("retain", "recompute", "compress"), lossless=True):
        self.autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16) if autocast else nullcontext
        self.make_batch = partial(batch_of, architecture.batch)
        self.plain = architecture.build()
        self.model = copy.deepcopy(self.plain)
        with self.autocast():
            profile = profile_model(self.model, self.make_batch(MOST_SAMPLES, MOST_TOKENS, 40, 0), CONFIG)
        policy = random_policy(profile, 1, actions, lossless=lossless)
        self.handle = apply_policy(self.model, policy)

    def step(self, model, batch, seed, backward=True):
        """Return the loss and every gradient."""
        torch.manual_seed(seed)
        with self.autocast():
            loss = model(**batch).loss
        if backward:
            loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return {"loss": loss.detach(), "generator": torch.get_rng_state(), **gradients}


class Recorder(PlainStrategy):
    """A strategy that records a block's call and leaves the record in `tapes`."""

    expects_outer_hooks = True

    def __init__(self, name, tapes):
        self.name, self.tapes = name, tapes

    def run(self, block, fn, args, kwargs):
        recording = Recording(self.name, block, args, kwargs)
        result = recording.run(fn)
        self.tapes[self.name] = recording.recorder.tape()
        recording.discard()
        return result


class RoundTrips(PlainStrategy):
    """A strategy under which backward reads the codecs' round trips of the saved tensors.

    `tape` is a record of the call, which identifies the saved tensors; `codecs` are by value.
    """

    expects_outer_hooks = True

    def __init__(self, tape, codecs):
        self.tape, self.codecs = tape, codecs

    def run(self, block, fn, args, kwargs):
        slots, decoded = iter(self.tape.slots), {}

        def pack(tensor):
            slot = next(slots)
            codec = self.codecs.get(slot.value)
            if codec is None:
                return tensor
            if slot.value not in decoded:
                payload = codec.encode(view(tensor.detach(), encode_view(self.tape, slot.value)))
                decoded[slot.value] = view(codec.decode(payload), self.tape.values[slot.value].ref)
            return view(decoded[slot.value], slot)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            return fn(*args)


class CodecPair(Pair):
    """A model under a policy with lossy codecs, and a copy with the codecs' round trips only."""

    def __init__(self, architecture, autocast):
        super().__init__(architecture, autocast, ("retain", "compress"), lossless=False)
        self.installation = Installation(self.plain)
        self.codecs = {}
        for name, strategy in self.handle.plans.strategies.items():
            strategy.wrap_codec = partial(self._note, name)

    def _note(self, name, value, codec):
        self.codecs.setdefault(name, {})[value] = codec
        return codec

    def compressed_values(self):
        """Return the values to be compressed, by block."""
        plans = {name: strategy.plan for name, strategy in self.handle.plans.strategies.items()}
        values_by_block = {
            name: {value for value, choice in plan.choices if choice.action is Action.COMPRESS}
            for name, plan in plans.items()
        }
        return {name: values for name, values in values_by_block.items() if values}

    def plain_step(self, batch, seed):
        for function in self.installation.functions.values():
            function.strategy = PlainStrategy()
        return self.step(self.plain, batch, seed)

    def oracle_step(self, batch, seed):
        tapes = {}
        functions = self.installation.functions
        for name, function in functions.items():
            function.strategy = Recorder(name, tapes)
        self.step(self.plain, batch, seed, backward=False)
        for name, function in functions.items():
            function.strategy = RoundTrips(tapes[name], self.codecs.get(name, {}))
        return self.step(self.plain, batch, seed)


PRECISIONS = ("fp32", "bf16")


def cases(names):
    """Return (architecture, precision) of each case: by default, every second architecture has the second precision."""
    precisions = [PRECISIONS if "ADACC_SIZES" in os.environ else PRECISIONS[i % 2 :][:1] for i in range(len(names))]
    return [(name, precision) for name, of_name in zip(names, precisions, strict=True) for precision in of_name]


@pytest.fixture(scope="module", params=cases(NAMES), ids="-".join)
def pair(request, one_thread):
    name, kind = request.param
    architecture = architectures()[name]
    pair = Pair(architecture, autocast=kind == "bf16")
    yield pair
    pair.handle.remove()


SIZES = settings(max_examples=NUM_SIZES, suppress_health_check=list(HealthCheck))


@SIZES
@given(
    samples=st.integers(1, MOST_SAMPLES),
    tokens=st.integers(2, MOST_TOKENS),
    targets=st.integers(2, MOST_TOKENS),
    seed=st.integers(0, 2**16),
)
def test_every_size_trains_exactly(pair, samples, tokens, targets, seed):
    batch = pair.make_batch(samples, tokens, targets, seed)
    ours, plain = (pair.step(model, batch, seed) for model in (pair.model, pair.plain))
    assert ours.keys() == plain.keys()
    assert [name for name in ours if not torch.equal(ours[name], plain[name])] == []


CODEC_NAMES = ("gpt2", "llama", "gemma2", "bert", "t5", "qwen3_moe")


@pytest.fixture(scope="module", params=cases(CODEC_NAMES), ids="-".join)
def codec_pair(request, one_thread):
    name, kind = request.param
    pair = CodecPair(architectures()[name], autocast=kind == "bf16")
    yield pair
    pair.handle.remove()
    pair.installation.remove()


@SIZES
@given(
    samples=st.integers(2, MOST_SAMPLES),
    tokens=st.integers(5, MOST_TOKENS),
    targets=st.integers(5, MOST_TOKENS),
    seed=st.integers(0, 2**16),
)
def test_codecs_do_at_every_size_what_they_do_by_themselves(codec_pair, samples, tokens, targets, seed):
    """Codecs behave in training at every size as in isolation."""
    batch = codec_pair.make_batch(samples, tokens, targets, seed)
    codec_pair.codecs.clear()
    ours = codec_pair.step(codec_pair.model, batch, seed)
    assert {name: set(codecs) for name, codecs in codec_pair.codecs.items()} == codec_pair.compressed_values()
    oracle = codec_pair.oracle_step(batch, seed)
    assert ours.keys() == oracle.keys()
    assert [name for name in ours if not torch.equal(ours[name], oracle[name])] == []


def test_codecs_change_gradients(codec_pair):
    """Codecs change gradients. Otherwise the test above would hold for any codec."""
    batch = codec_pair.make_batch(3, 29, 17, 0)
    ours, plain = codec_pair.step(codec_pair.model, batch, 0), codec_pair.plain_step(batch, 0)
    assert torch.equal(ours["loss"], plain["loss"])
    assert not all(torch.equal(ours[name], plain[name]) for name in ours)
