"""Rule R1 at sizes that were never recorded: under the tapes of their families, models train bit for bit as without us.

`ADACC_SIZES=500 pytest tests/adacc_hf/test_sizes.py` draws as many sizes for each architecture; the examples are the
same at every run.
"""

import copy
import os
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.eval.zoo.parts import VOCABULARY, padded_text, two_texts

NUM_SIZES = int(os.environ.get("ADACC_SIZES", "6"))
MOST_SAMPLES, MOST_TOKENS = 4, 48
CONFIG = AdaccConfig(min_compress_bytes=0)

NAMES = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neo",
    "gpt_neox", "gptj", "opt", "bloom", "falcon", "cohere", "olmo2", "smollm3", "stablelm", "starcoder2", "granite",
    "bert", "roberta", "electra", "distilbert", "t5", "bart", "mbart", "pegasus", "mixtral", "qwen3_moe",
)  # fmt: skip


def batch_of(make_batch, samples, tokens, targets, seed):
    """As the zoo makes them, but of these sizes."""
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
    """A model under a random lossless policy, and its like without."""

    def __init__(self, architecture, autocast, actions=("retain", "recompute", "compress"), lossless=True):
        self.autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16) if autocast else nullcontext
        self.make_batch = partial(batch_of, architecture.batch)
        self.plain = architecture.build()
        self.model = copy.deepcopy(self.plain)
        with self.autocast():
            profile = profile_model(self.model, self.make_batch(MOST_SAMPLES, MOST_TOKENS, 40, 0), CONFIG)
        policy = Policy.random(profile, 1, actions, lossless=lossless)
        self.handle = apply_policy(self.model, policy)

    def step(self, model, batch, seed):
        """The loss and every gradient."""
        torch.manual_seed(seed)
        with self.autocast():
            loss = model(**batch).loss
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return {"loss": loss.detach(), "generator": torch.get_rng_state(), **found}


def families(handle):
    """Those of all blocks."""
    seen = [seen for outlines in handle.library._seen.values() for seen in outlines.values()]
    return [group.family for each in seen for group in each._groups.values()]


@pytest.fixture(scope="module", params=[(name, kind) for name in NAMES for kind in ("fp32", "bf16")], ids="-".join)
def pair(request, one_thread):
    name, kind = request.param
    architecture = architectures()[name]
    pair = Pair(architecture, autocast=kind == "bf16")
    yield pair
    pair.handle.remove()


@settings(
    max_examples=NUM_SIZES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
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
