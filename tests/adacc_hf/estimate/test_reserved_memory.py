"""Reserved memory of an allocator, from steps on fake tensors: its live bytes are the plan's, the rest its own."""

import random

import pytest
from transformers import GPT2Config, LlamaConfig

from adacc_hf.estimate import reserved_memory
from adacc_hf.estimate.adapters import Adapters
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.planning import Request, allocator_bytes, plan, training_profile
from adacc_hf.estimate.reserved_memory import CachingAllocator
from adacc_hf.estimate.static_memory import Sharding
from adacc_hf.solve.simple_policies import simulate_checkpointed, uniform_policy

KIB, MIB = 2**10, 2**20
SIZES = {"vocab_size": 500, "bos_token_id": None, "eos_token_id": None}
CONFIGS = {
    "gpt2": GPT2Config(n_layer=4, n_embd=256, n_head=4, n_positions=128, **SIZES),
    "llama": LlamaConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, **SIZES,
    ),
}  # fmt: skip


class Exact(CachingAllocator):
    """An allocator that reserves exactly the peak of live bytes."""

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
    settings = {"batch_size": 8, "seq_len": 128, **options}
    return Request(model=name, workload=workload, **settings)


@pytest.mark.parametrize(("name", "precision"), [("gpt2", "bf16-amp"), ("llama", "bf16")])
def test_live_bytes_are_those_of_the_plan(name, precision, monkeypatch):
    monkeypatch.setattr(reserved_memory, "CachingAllocator", Exact)
    request = request_for(name, precision)
    _, profile = training_profile(request)
    planned = {False: uniform_policy(profile, "retain").predicted_peak_bytes}
    planned[True] = simulate_checkpointed(profile).peak_bytes
    for is_checkpointed, peak_bytes in planned.items():
        # Plain steps agree to the byte. A checkpointed block's last operators do not run again, which is 2e-5 of a
        # peak.
        assert allocator_bytes(request, is_checkpointed) == pytest.approx(peak_bytes, rel=1e-4)


def test_a_plan_says_what_an_allocator_keeps_beyond_what_is_live():
    forecasts = plan(request_for("llama")).forecasts
    for name in ("plain", "full recomputation"):
        assert forecasts[name].peak_bytes < forecasts[name].reserved_bytes < 2 * forecasts[name].peak_bytes
    assert forecasts["full recomputation"].reserved_bytes < forecasts["plain"].reserved_bytes
    assert forecasts["adacc"].reserved_bytes is None


def test_kept_gradients_and_larger_states_are_reserved_too():
    def reserved_between_steps(**options):
        return allocator_bytes(request_for("gpt2", "fp32", batch_size=1, **options), is_checkpointed=True)

    assert (
        reserved_between_steps(optimizer="sgd")
        < reserved_between_steps(optimizer="sgd_momentum")
        < reserved_between_steps(optimizer="adamw")
    )
    assert reserved_between_steps(optimizer="sgd") <= reserved_between_steps(optimizer="sgd", accumulates=True)
    assert reserved_between_steps(
        optimizer="adamw", adapters=Adapters(rank=4, dtype="float32")
    ) < reserved_between_steps(optimizer="sgd")


def test_nothing_is_said_of_shared_models():
    assert allocator_bytes(request_for("llama", sharding=Sharding(method="fsdp", num_devices=2)), False) is None


# The allocator, block by block.


@pytest.fixture
def allocator() -> CachingAllocator:
    return CachingAllocator(1024 * MIB)


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (0, 0),
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_segment_is_taken_for_the_first_block(allocator, nbytes, segment):
    allocator.allocate("block", nbytes)
    assert allocator.most_reserved_bytes == segment
    allocator.free("block")
    assert allocator.most_reserved_bytes == segment
    allocator.allocate("block", nbytes)
    assert allocator.most_reserved_bytes == segment, "the same block serves again"


def test_small_blocks_do_not_come_from_large_segments(allocator):
    allocator.allocate("large", 40 * MIB)
    allocator.free("large")
    allocator.allocate("small", KIB)
    assert allocator.most_reserved_bytes == 42 * MIB


def test_the_rest_of_a_block_serves_others_unless_it_is_little(allocator):
    allocator.allocate("large", 40 * MIB)
    allocator.free("large")
    allocator.allocate("part", 30 * MIB)
    allocator.allocate("rest", 10 * MIB)
    assert allocator.most_reserved_bytes == 40 * MIB
    allocator.free("part")
    allocator.free("rest")
    allocator.allocate("nearly all", 39 * MIB)
    allocator.allocate("a mebibyte and a bit", MIB + 1)
    assert allocator.most_reserved_bytes == 60 * MIB, "1 MiB is not split off"


def test_the_smallest_block_that_is_large_enough_is_taken(allocator):
    for name, size in (("64", 64 * MIB), ("32", 32 * MIB)):
        allocator.allocate(name, size)
    for name in ("64", "32"):
        allocator.free(name)
    allocator.allocate("32 again", 32 * MIB)
    allocator.allocate("64 again", 64 * MIB)
    assert allocator.most_reserved_bytes == 96 * MIB


def test_neighbours_are_joined_and_segments_are_not(allocator):
    allocator.allocate("whole", 60 * MIB)
    allocator.free("whole")
    for name in "abc":
        allocator.allocate(name, 20 * MIB)
    for name in "acb":
        allocator.free(name)
    allocator.allocate("whole", 60 * MIB)
    assert allocator.most_reserved_bytes == 60 * MIB
    allocator.allocate("second", 60 * MIB)
    for name in ("whole", "second"):
        allocator.free(name)
    allocator.allocate("both", 100 * MIB)
    assert allocator.most_reserved_bytes == 220 * MIB


def test_what_is_held_in_the_middle_keeps_the_rest_apart(allocator):
    """A live block in the middle of free memory splits it: a gradient in the place of an activation. Hence more bytes
    are reserved than live."""
    allocator.allocate("activation", 64 * MIB)
    allocator.free("activation")
    for name in ("first", "gradient"):
        allocator.allocate(name, 16 * MIB)
    allocator.free("first")
    allocator.allocate("activation", 48 * MIB)
    assert allocator.most_reserved_bytes == 64 * MIB + 48 * MIB


def test_what_is_cached_is_given_back_when_the_device_is_full():
    allocator = CachingAllocator(100 * MIB)
    for name in ("free", "cut"):
        allocator.allocate(name, 40 * MIB)
    allocator.free("free")
    allocator.free("cut")
    allocator.allocate("held", 20 * MIB)
    allocator.allocate("large", 50 * MIB)
    assert allocator.most_reserved_bytes == 90 * MIB, "one segment went, the other is in use"
    allocator.allocate("too much", 60 * MIB)
    assert allocator.most_reserved_bytes == 150 * MIB


def test_a_key_has_one_block(allocator):
    allocator.allocate("block", 1)
    with pytest.raises(ValueError, match="'block' has a block already"):
        allocator.allocate("block", 1)


def test_freeing_everything_leaves_whole_segments(allocator):
    """After freeing everything, blocks of the segments' sizes need no new memory, in any order of earlier blocks."""
    dice = random.Random(0)
    live: dict[int, int] = {}
    for key in range(2000):
        if live and dice.random() < 0.5:
            block_to_free = dice.choice(list(live))
            allocator.free(block_to_free)
            del live[block_to_free]
        live[key] = int(2 ** dice.uniform(0, 26))
        allocator.allocate(key, live[key])
        assert allocator.most_reserved_bytes >= sum(live.values())
    for key in live:
        allocator.free(key)
    reserved = allocator.most_reserved_bytes
    segments = sorted((size for free in allocator.free_blocks.values() for size, _, _ in free), reverse=True)
    assert sum(segments) == reserved
    assert all(size % (2 * MIB) == 0 for size in segments)
