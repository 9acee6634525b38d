"""Fixtures of the product's tests: those of tests/builders, runs of a few steps, and counts of recorded calls."""

import pytest
from counted_times import *  # noqa: F403
from gpt2_profiles import *  # noqa: F403
from model_builders import *  # noqa: F403
from profile_builders import *  # noqa: F403

from adacc_hf.price.codec_gradient_error import GradientErrors
from adacc_hf.price.measurement import Measurement
from adacc_hf.run.call import Call, Recording
from adacc_hf.solve.simple_policies import random_policy, uniform_policy


@pytest.fixture
def recorded_blocks(monkeypatch):
    """Names of the blocks whose calls were recorded, or checked against a tape."""
    names, record, run = [], Recording.run, Call.run

    def run_call(self, *call):
        names.extend([self.block] if self._lossy is not None else [])
        return run(self, *call)

    monkeypatch.setattr(Recording, "run", lambda self, *call: names.append(self.name) or record(self, *call))
    monkeypatch.setattr(Call, "run", run_call)
    return names


@pytest.fixture
def half_precision(monkeypatch):
    """Name of a codec registered by the tests only, for inputs of Linear layers: it stores 16 of a float's 32 bits."""
    from math import prod

    import torch

    from adacc_hf.kernels import codecs

    codecs.list_codecs()
    monkeypatch.setattr(codecs, "registry", dict(codecs.registry))

    @codecs.register
    class HalfPrecision(codecs.Codec):
        name = "half_precision"
        suits = frozenset({"linear"})

        def supports(self, shape, dtype):
            return dtype is torch.float32

        def predicted_bytes(self, shape, dtype):
            return 2 * prod(shape)

        def encode(self, tensor):
            return codecs.Payload((tensor.detach().half(),), tensor.dtype, tuple(tensor.shape))

        def decode(self, payload):
            return payload.tensors[0].to(payload.dtype)

    return HalfPrecision.name


@pytest.fixture(scope="module")
def without_onednn():
    """Run without oneDNN, whose matrix products and convolutions have workspaces that differ between processors."""
    import torch

    torch.backends.mkldnn.enabled = False
    yield
    torch.backends.mkldnn.enabled = True


@pytest.fixture(scope="session")
def run_steps():
    """`run_steps(model, batch, num_steps=3, autocast=None)`: a dict of the loss and every gradient, per step. Step i
    starts from random seed i. No optimizer runs. Buffers are restored at the end, so that runs can be compared."""
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
    """`assert_same_steps(ours, plain)`: results of `run_steps` and generator states are bit-equal (rule R1)."""
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
    """`assert_exact(model, batch, num_policies=6)`: profile, train under lossless policies, and return the profile. The
    first policy recomputes every recomputable value, the others are random. All must equal plain training."""
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


class NoGradientErrors(Measurement):
    """Gradient errors that try no codec."""

    def gradient_errors(self, *_):
        return GradientErrors()


@pytest.fixture
def measurement_without_errors():
    """Measurement for a profile in which every codec stays available."""
    return NoGradientErrors()


@pytest.fixture
def fresh_accelerate():
    """Reset Accelerate's state, which an earlier test's Trainer has left in the process."""
    from accelerate.state import AcceleratorState, GradientState

    for state in (AcceleratorState, GradientState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState):
        state._reset_state()
