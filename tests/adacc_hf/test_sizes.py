"""Rule R1 at sizes that were not recorded: models with symbolic tapes train bit for bit like plain ones.

Activations of all kinds are stored in host memory too, by the only codec that is lossless for all of them.

By default each architecture runs in one precision. `ADACC_SIZES=500 pytest tests/adacc_hf/test_sizes.py` draws 500
sizes for each architecture in both. The examples are the same at every run.
"""

import copy
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.host_link import HostLink
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.eval.zoo.parts import VOCABULARY, padded_text, two_texts
from adacc_hf.solve.simple_policies import random_policy

NUM_SIZES = int(os.environ.get("ADACC_SIZES", "6"))
MOST_SAMPLES, MOST_TOKENS = 4, 48
CONFIG = AdaccConfig(min_compress_bytes=0, host_memory="64MiB")
LINK = HostLink(to_host_bytes_per_ms=1e6, to_device_bytes_per_ms=1e6, copy_ms=0.01)

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

    def __init__(self, architecture, autocast):
        self.autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16) if autocast else nullcontext
        self.make_batch = partial(batch_of, architecture.batch)
        self.plain = architecture.build()
        self.model = copy.deepcopy(self.plain)
        with self.autocast():
            profile = profile_model(self.model, self.make_batch(MOST_SAMPLES, MOST_TOKENS, 40, 0), CONFIG)
        kinds = tuple(replace(kind, host_link=LINK) for kind in profile.kinds)
        profile = replace(profile, kinds=kinds, host_free_bytes=1 << 30)
        policy = random_policy(profile, 1, ("retain", "recompute", "compress"), lossless=True)
        assert policy.predicted_host_bytes > 0
        self.handle = apply_policy(self.model, policy)

    def step(self, model, batch, seed):
        """Return the loss and every gradient."""
        torch.manual_seed(seed)
        with self.autocast():
            loss = model(**batch).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return {"loss": loss.detach(), "generator": torch.get_rng_state(), **gradients}


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
