"""What an allocator keeps, from steps on tensors without memory: its live bytes are the plan's, the rest is its own."""

import pytest
from transformers import GPT2Config, LlamaConfig

from adacc_hf import Policy
from adacc_hf.artifacts.checkpointing import simulate_checkpointed
from adacc_hf.estimate import reserved_memory
from adacc_hf.estimate.caching_allocator import CachingAllocator
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Adapters, Workload
from adacc_hf.estimate.planning import Request, allocator_bytes, plan, training_profile
from adacc_hf.estimate.static_memory import Sharding

SIZES = {"vocab_size": 500, "bos_token_id": None, "eos_token_id": None}
CONFIGS = {
    "gpt2": GPT2Config(n_layer=4, n_embd=256, n_head=4, n_positions=128, **SIZES),
    "llama": LlamaConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, **SIZES,
    ),
}  # fmt: skip


class Exact(CachingAllocator):
    """An allocator that keeps just the most that was live."""

    def __init__(self, memory_bytes):
        super().__init__(memory_bytes)
        self._sizes = {}

    def allocate(self, key, nbytes):
        self._sizes[key] = nbytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, sum(self._sizes.values()))

    def free(self, key):
        del self._sizes[key]


def request_for(name, precision="bf16", sharding=None, device="a100", **options):
    workload = Workload(
        config=CONFIGS[name],
        device=find_device(device),
        precision=PRECISIONS[precision],
        adapters=options.pop("adapters", None),
        sharding=sharding or Sharding(),
    )
    asked = {"batch_size": 8, "seq_len": 128, "find_largest": False, **options}
    return Request(model=name, workload=workload, **asked)


@pytest.mark.parametrize(("name", "precision"), [("gpt2", "bf16-amp"), ("llama", "bf16")])
def test_live_bytes_are_those_of_the_plan(name, precision, monkeypatch):
    monkeypatch.setattr(reserved_memory, "CachingAllocator", Exact)
    request = request_for(name, precision)
    _, profile = training_profile(request)
    planned = {False: Policy.uniform(profile, "retain").predicted_peak_bytes}
    planned[True] = simulate_checkpointed(profile).peak_bytes
    for is_checkpointed, peak_bytes in planned.items():
        # Plain steps agree to the byte; that a checkpointed block's last operators do not run again is 2e-5 of a peak.
        assert allocator_bytes(request, is_checkpointed) == pytest.approx(peak_bytes, rel=1e-4)


def test_a_plan_says_what_an_allocator_keeps_beyond_what_is_live():
    forecasts = plan(request_for("llama")).forecasts
    for name in ("plain", "full recomputation"):
        assert forecasts[name].peak_bytes < forecasts[name].reserved_bytes < 2 * forecasts[name].peak_bytes
    assert forecasts["full recomputation"].reserved_bytes < forecasts["plain"].reserved_bytes
    assert forecasts["adacc"].reserved_bytes is None


def test_kept_gradients_and_larger_states_are_reserved_too():
    def kept(**options):
        return allocator_bytes(request_for("gpt2", "fp32", batch_size=1, **options), is_checkpointed=True)

    assert kept(optimizer="sgd") < kept(optimizer="sgd_momentum") < kept(optimizer="adamw")
    assert kept(optimizer="sgd") <= kept(optimizer="sgd", accumulates=True)
    assert kept(optimizer="adamw", adapters=Adapters(rank=4, dtype="float32")) < kept(optimizer="sgd")


def test_nothing_is_said_of_shared_models():
    assert allocator_bytes(request_for("llama", sharding=Sharding(method="fsdp", num_devices=2)), False) is None
