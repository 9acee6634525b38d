"""The core on a CUDA device: measurements, predictions and synchronization. Run with `pytest -m gpu`.

Tests that also hold on the CPU run there as well, so that they are known to work.
"""

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.eval.trials.gradients import NOISE_FACTOR, Gradients, relative_error
from adacc_hf.head.chunked_loss import chunked_cross_entropy
from adacc_hf.kernels._host_payloads import ALIGNMENT, MOST_TENSORS
from adacc_hf.kernels._host_pool import host_pool
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.run.call import Recording
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.tape.replay_check import verify
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.torch_glue.compat import adds_into_wider, no_packed_sequences
from adacc_hf.torch_glue.memory import measure_step, static_bytes
from adacc_hf.torch_glue.meters import MemoryMeter, take_peak

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = AdaccConfig(min_compress_bytes=0)
BLOCK_BYTES = 512
"""Granularity of torch's caching allocator in bytes."""


@pytest.fixture(params=["eager", "sdpa"])
def on_device(request, tiny_gpt2, token_batch):
    """A function that returns (model, batch) on a device."""

    def make(device, **sizes):
        batch = {name: tensor.to(device) for name, tensor in token_batch(4, 64).items()}
        return tiny_gpt2(request.param, layers=3, **sizes).to(device), batch

    return make


@pytest.mark.parametrize("device", DEVICES)
def test_the_meter_counts_live_and_peak_bytes(device):
    with MemoryMeter.for_device(torch.device(device, 0) if device == "cuda" else torch.device(device)) as meter:
        tensor = torch.empty(1000, dtype=torch.uint8, device=device)
        meter.mark(("kept",))
        del tensor
        torch.empty(3 * BLOCK_BYTES, dtype=torch.uint8, device=device)
        meter.mark(("gone",))
    tensor_mark, end_mark = meter.points[-2:]
    assert tensor_mark.live_bytes == (1000 if device == "cpu" else 2 * BLOCK_BYTES)
    assert end_mark.live_bytes == 0
    assert tensor_mark.max_bytes == 3 * BLOCK_BYTES


@pytest.mark.gpu
def test_peaks_before_a_meter_are_known_after_it():
    take_peak()
    before = torch.cuda.memory_allocated()
    torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    with MemoryMeter.for_device(torch.device("cuda")) as meter:
        meter.mark(("start",))
        tensor = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.max_memory_allocated() == before + tensor.nbytes
    assert take_peak() == before + (8 << 20)
    assert take_peak() == before + tensor.nbytes


@pytest.mark.gpu
def test_a_meter_stands_still_inside_an_inner_one():
    with MemoryMeter.for_device(torch.device("cuda")) as outer:
        small = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        del small
        with MemoryMeter.for_device(torch.device("cuda")) as inner:
            inner.mark(("large",))
            large = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
            del large
            kept = torch.empty(1 << 19, dtype=torch.uint8, device="cuda")
        outer.mark(("after",))
    assert (outer.peak_bytes, inner.peak_bytes) == (1 << 20, 8 << 20)
    assert outer.points[-1].live_bytes == kept.nbytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("action", ["recompute", "compress", "retain"])
def test_stored_bytes_and_peak_are_as_predicted(on_device, device, action):
    model, batch = on_device(device, width=256, n_head=4, n_positions=64)
    policy = uniform_policy(profile_model(model, batch, CONFIG), action)
    with apply_policy(model, policy, CONFIG):
        for _ in range(3):
            model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
        step_memory = measure_step(model, batch)
    # One allocator block for every stored tensor; a transformer block has fewer than 100.
    rounding = BLOCK_BYTES * 100 * len(policy.blocks) if device == "cuda" else 0
    assert step_memory.stored_bytes == pytest.approx(policy.predicted_stored_bytes, abs=rounding)
    # 3 % on the CPU (test_memory.py), where an operator's temporaries equal the profiled step's.
    assert step_memory.peak_bytes == pytest.approx(policy.predicted_peak_bytes, rel=0.03, abs=rounding)


@pytest.mark.gpu
def test_the_predicted_peak_is_that_of_the_device(on_device):
    """The predicted peak is torch.cuda's, next to another tensor on the device, workspaces of products included."""
    somebody_elses = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
    model, batch = on_device("cuda", width=256, n_head=4, n_positions=64)
    policy = uniform_policy(profile_model(model, batch, CONFIG), "recompute")
    assert policy.predicted_peak_bytes > somebody_elses.nbytes
    with apply_policy(model, policy, CONFIG):
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
    # 3 % as above, of a peak that includes the other tensor.
    own_bytes = policy.predicted_peak_bytes - somebody_elses.nbytes
    rounding = BLOCK_BYTES * 100 * len(policy.blocks)
    assert torch.cuda.max_memory_allocated() == pytest.approx(
        policy.predicted_peak_bytes, abs=0.03 * own_bytes + rounding
    )


@pytest.mark.gpu
def test_an_earlier_model_that_only_cycles_hold_is_not_counted(on_device):
    model, batch = on_device("cuda")
    before = static_bytes(model, batch)
    earlier = torch.nn.Linear(1000, 1000, device="cuda")
    earlier.itself = [earlier]
    del earlier
    assert static_bytes(model, batch) == before


@pytest.mark.gpu
@pytest.mark.parametrize("is_ours", [False, True], ids=["plain", "policy"])
def test_a_steady_step_never_waits_for_the_device(on_device, is_ours):
    """A steady step under a policy of all actions never synchronizes (rule R10)."""
    model, batch = on_device("cuda")
    policy = random_policy(profile_model(model, batch, CONFIG), 0, ("retain", "recompute", "compress"))
    # Transformers synchronizes to detect packing, in plain training too.
    with no_packed_sequences(), apply_policy(model, policy, CONFIG) if is_ours else nullcontext():
        for _ in range(3):  # the first two calls at a shape are recorded, the third learns the order
            model(**batch).loss.backward()
        try:
            torch.cuda.set_sync_debug_mode("error")
            model(**batch).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("on_device", ["sdpa"], indirect=True)
def test_recomputing_around_a_fused_attention_is_exact(on_device, kernel, dropout):
    model, batch = on_device("cuda", attn_pdrop=dropout)
    bf16 = partial(torch.autocast, "cuda", dtype=torch.bfloat16)

    def step():
        torch.manual_seed(0)
        with bf16():
            loss = model(**batch).loss
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return Gradients(loss.detach(), gradients), torch.cuda.get_rng_state()

    with sdpa_kernel([getattr(SDPBackend, f"{kernel.upper()}_ATTENTION"), SDPBackend.MATH]):
        (plain, state), (again, _) = step(), step()
        with bf16():
            profile = profile_model(model, batch, CONFIG)
        if not any(kernel in value.name for kind in profile.kinds for value in kind.values):
            pytest.skip(f"this GPU has no attention by {kernel}")
        noise = relative_error(plain, again)  # from a GPU's atomic additions; zero on the emulated device
        with apply_policy(model, uniform_policy(profile, "recompute"), CONFIG):
            for _ in range(3):
                step_result, after = step()
                assert torch.equal(step_result.loss, plain.loss)
                assert torch.equal(after, state)
                assert relative_error(plain, step_result) <= NOISE_FACTOR * noise


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_a_fused_attention_is_recomputed_at_sizes_never_recorded(tiny_llama, token_batch, caplog, kernel):
    """A fused attention is recomputed at a new size. Plans come from a few samples, so the batch's own size is new."""
    model = tiny_llama(layers=3, hidden_size=256).to("cuda")
    batch = {name: tensor.to("cuda") for name, tensor in token_batch(8, 64).items()}
    bf16 = partial(torch.autocast, "cuda", dtype=torch.bfloat16)
    with sdpa_kernel([getattr(SDPBackend, f"{kernel.upper()}_ATTENTION"), SDPBackend.MATH]):
        with bf16():
            for rows, length in ((2, 32), (3, 48), (4, 64)):
                part = {name: tensor[:rows, :length] for name, tensor in batch.items()}
                profile = profile_model(model, part, CONFIG)
        if not any(kernel in value.name for kind in profile.kinds for value in kind.values):
            pytest.skip(f"this GPU has no attention by {kernel}")
        policy = uniform_policy(profile, "recompute")
        with apply_policy(model, policy, CONFIG):
            for _ in range(3):
                with bf16():
                    loss = model(**batch).loss
                loss.backward()
                model.zero_grad(set_to_none=True)
            with bf16():
                step_memory = measure_step(model, batch)
    assert not [record for record in caplog.records if "retain" in record.message]
    # The batch has twice the rows of the latest profile, which counts twice what does not depend on the rows: casts of
    # weights, and a checksum of each saved tensor. The outputs of attention take 786,432 bytes in three blocks.
    rounding = BLOCK_BYTES * 150 * len(policy.blocks)
    assert step_memory.stored_bytes == pytest.approx(2 * policy.predicted_stored_bytes, abs=rounding)


@pytest.mark.gpu
@pytest.mark.parametrize("rate", [0.1, 0.15, 0.42])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_recomputed_at_any_rate(rate, dtype):
    block = torch.nn.Dropout(rate).train()
    hidden = torch.randn(64, 64, device="cuda", dtype=dtype, requires_grad=True)
    recording = Recording("block", block, (hidden,), {})
    recording.run(lambda x: block(x).exp())
    recorder = recording.recorder
    tape = TapeCache(verify).verified_tape(recorder)
    recording.close()
    dropped = next(op for op in tape.operators if op.short_name == "native_dropout_backward")
    assert set(dropped.results()) <= tape.recomputable


@pytest.mark.gpu
@pytest.mark.parametrize("is_timed", [False, True])
def test_a_convolution_whose_kernel_is_chosen_by_time_is_not_replayed(monkeypatch, is_timed):
    """A convolution whose kernel is selected by timing is not replayed, because another kernel may win in backward."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", is_timed)
    block = torch.nn.Conv1d(8, 8, 3, padding=1, device="cuda")
    hidden = torch.randn(4, 8, 64, device="cuda", requires_grad=True)
    recording = Recording("block", block, (hidden,), {})
    recording.run(lambda x: block(x).exp())
    tape = TapeCache(verify).verified_tape(recording.recorder)
    recording.close()
    results_by_name = {op.short_name: set(op.results()) for op in tape.operators}
    assert results_by_name["convolution"].isdisjoint(tape.recomputable) == is_timed
    assert results_by_name["exp"] <= tape.recomputable or is_timed


@pytest.mark.gpu
def test_products_of_halves_are_added_to_the_gradient_of_a_head_while_they_are_made(monkeypatch):
    """Each chunk's product of 16-bit factors is added to the head's float32 gradient inside the product."""
    width, classes, num_rows = 64, 2048, 512  # eight chunks
    rows, weight = (torch.randn(n, width, device="cuda") for n in (num_rows, classes))
    rows, weight = rows.requires_grad_(), weight.mul_(0.1).requires_grad_()
    target = torch.randint(0, classes, (num_rows,), device="cuda")
    assert adds_into_wider(rows.device, torch.bfloat16, False)  # tried once, with a product
    added, addmm = [], torch.addmm

    def addmm_and_record(*args, **options):
        if args[0].is_cuda:
            added.append(options["out_dtype"])
        return addmm(*args, **options)

    monkeypatch.setattr(torch, "addmm", addmm_and_record)

    def gradient(dtype):
        chunked_cross_entropy(rows, weight, None, target, dtype=dtype).backward()
        weight_gradient, weight.grad = weight.grad, None
        return weight_gradient

    exact = gradient(torch.float32)
    assert added == []
    # Rounding to bfloat16, 2^-8, of rows, weight and logits, which averages out in part.
    assert (gradient(torch.bfloat16) - exact).norm() < 2**-7 * exact.norm()
    assert added == [torch.float32] * 8


@pytest.fixture
def host_profile(on_device):
    """A function that returns (model, batch, profile) on the GPU, with host memory offered."""

    def make(**settings):
        model, batch = on_device("cuda", width=256, n_head=4, n_positions=64)
        config = AdaccConfig(min_compress_bytes=0, host_memory="256MiB", **settings)
        return model, batch, config, profile_model(model, batch, config)

    return make


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_training_with_host_memory_is_exact_and_as_predicted(host_profile, seed):
    model, batch, _, profile = host_profile()
    policy = random_policy(profile, seed, ("retain", "recompute", "compress"), lossless=True)
    assert policy.predicted_host_bytes > 0

    def step():
        torch.manual_seed(7)
        model.zero_grad(set_to_none=True)
        loss = model(**batch).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = step()
    with apply_policy(model, policy):
        for _ in range(3):
            host_pool.take_peak()
            assert all(map(torch.equal, step(), plain))
            rounding = ALIGNMENT * MOST_TENSORS * policy.action_counts()["compress"]
            assert policy.predicted_host_bytes - rounding <= host_pool.take_peak() <= policy.predicted_host_bytes
        assert host_pool.live_bytes == 0
        del plain
        model.zero_grad(set_to_none=True)
        step_memory = measure_step(model, batch)
    assert host_pool.nbytes == 0
    rounding = BLOCK_BYTES * 100 * len(policy.blocks)
    assert step_memory.stored_bytes == pytest.approx(policy.predicted_stored_bytes, abs=rounding)
    # 3 % as above.
    assert step_memory.peak_bytes == pytest.approx(policy.predicted_peak_bytes, rel=0.03, abs=rounding)


@pytest.mark.gpu
def test_a_steady_step_with_host_memory_never_waits_for_the_device(host_profile):
    model, batch, _, profile = host_profile()
    with no_packed_sequences(), apply_policy(model, random_policy(profile, 1, ("retain", "compress"))):
        for _ in range(3):
            model(**batch).loss.backward()
        try:
            torch.cuda.set_sync_debug_mode("error")
            model(**batch).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_an_interrupted_backward_frees_host_memory(host_profile):
    model, batch, _, profile = host_profile()

    def interrupt(gradient):
        raise KeyError("interrupted")

    with apply_policy(model, uniform_policy(profile, "compress", "host")):
        for _ in range(2):
            model(**batch).loss.backward()
        loss = model(**batch).loss
        assert host_pool.live_bytes > 0
        handle = model.transformer.h[1].mlp.c_fc.weight.register_hook(interrupt)
        with pytest.raises(KeyError, match="interrupted"):
            loss.backward()
        handle.remove()
        del loss
        model(**batch).loss.backward()  # the device's thread frees the rest of the first graph before
        gc.collect()
        assert host_pool.live_bytes == 0


@pytest.mark.gpu
def test_copies_on_two_streams_are_ordered():
    """A buffer of the pool is used again on another stream at once, while its last copies may be pending."""

    class User:
        pass

    user, codec = User(), get_codec("host")
    tensors = [torch.full((1 << 20,), float(number), device="cuda") for number in range(16)]
    host_pool.reserve(user, tensors[0].nbytes)
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for number, tensor in enumerate(tensors):
        with torch.cuda.stream(streams[number % 2]):
            streams[number % 2].wait_stream(torch.cuda.default_stream())
            payload = codec.encode(tensor)
        with torch.cuda.stream(streams[(number + 1) % 2]):
            results.append(codec.decode(payload))
        del payload
    torch.cuda.synchronize()
    host_pool.release(user)
    assert all(map(torch.equal, results, tensors))


@pytest.mark.gpu
def test_pinned_memory_is_used_and_returned():
    class User:
        pass

    user = User()
    host_pool.reserve(user, 1 << 20)
    block = host_pool.store([torch.zeros(4, device="cuda")])
    assert block is not None
    assert block.is_pinned
    del block
    host_pool.release(user)
    assert host_pool.nbytes == 0
