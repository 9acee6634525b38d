"""A process has one session of torch's profiler: the user's takes precedence, and threads wait for each other's."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import profiler

from adacc_hf import AdaccConfig, AdaccSession, apply_policy, profile_model
from adacc_hf.artifacts.errors import ConcurrentCallError, ProfilerConflictError
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.meters import CpuMemoryMeter
from adacc_hf.torch_glue.private import is_profiling

CPU = [profiler.ProfilerActivity.CPU]
CONFIG = AdaccConfig(min_compress_bytes=0)


@contextmanager
def scheduled(steps, **schedule):
    """Return a profiler that has run that many steps of a schedule."""
    with profiler.profile(activities=CPU, schedule=profiler.schedule(**schedule)) as session:
        for _ in range(steps):
            session.step()
        yield


@contextmanager
def started_session():
    session = profiler.profile(activities=CPU)
    session.start()
    yield
    session.stop()


AT_WORK = {
    "whole": lambda: profiler.profile(activities=CPU),
    "started": started_session,
    "with memory": lambda: profiler.profile(activities=CPU, profile_memory=True),
    "autograd": torch.autograd.profiler.profile,
    "warm-up": lambda: scheduled(1, wait=1, warmup=1, active=1),
    "active": lambda: scheduled(2, wait=1, warmup=1, active=2),
    "warm-up of the second cycle": lambda: second_cycle(),
}


@contextmanager
def second_cycle():
    schedule = profiler.schedule(wait=0, warmup=1, active=1, repeat=2)
    with profiler.profile(activities=CPU, schedule=schedule, acc_events=True) as session:
        session.step()
        session.step()
        yield


@pytest.mark.parametrize("kind", AT_WORK)
def test_a_profile_leaves_the_session_to_the_user(tiny_gpt2, token_batch, kind):
    model = tiny_gpt2()
    with AT_WORK[kind]():
        assert is_profiling()
        with pytest.raises(ProfilerConflictError, match="another torch profiler is running"):
            profile_model(model, token_batch(), CONFIG)
        torch.ones(2) + 1
    assert not is_profiling()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("ends_first", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in AT_WORK if kind != "warm-up of the second cycle"])
def test_a_users_profiler_that_starts_meanwhile_takes_over(kind, ends_first):
    meter = CpuMemoryMeter().__enter__()
    with AT_WORK[kind]() as session:
        if not ends_first:
            with pytest.raises(ProfilerConflictError, match="was started"):
                meter.__exit__(None, None, None)
        torch.ones(5).sin()
    if ends_first:
        with pytest.raises(ProfilerConflictError, match="was started"):
            meter.__exit__(None, None, None)
    if isinstance(session, profiler.profile) and kind != "warm-up":
        assert any("sin" in event.name for event in session.events())
    with CpuMemoryMeter() as meter:
        tensor = torch.ones(1000)
    assert meter.peak_bytes >= tensor.nbytes


def in_threads(run, number):
    """Return the result or exception of `run(n)` for each of several threads that start together."""
    results, barrier = [None] * number, threading.Barrier(number)

    def call(n):
        barrier.wait()
        try:
            results[n] = run(n)
        except Exception as error:
            results[n] = error

    threads = [threading.Thread(target=call, args=(n,)) for n in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def test_profiles_in_several_threads_are_right(tiny_gpt2, token_batch):
    alone = profile_model(tiny_gpt2(), token_batch(), CONFIG)
    # Made before: what a thread allocates while another thread measures counts there.
    pairs = [(tiny_gpt2(), token_batch()) for _ in range(3)]
    profiles = in_threads(lambda n: profile_model(*pairs[n], CONFIG), 3)
    for profile in profiles:
        assert [kind.digest for kind in profile.kinds] == [kind.digest for kind in alone.kinds]
        assert profile.plain_stored_bytes == alone.plain_stored_bytes


@pytest.mark.parametrize("is_forward", [True, False])
def test_a_first_step_in_other_threads(tiny_gpt2, token_batch, is_forward):
    model = tiny_gpt2()
    optimizer = torch.optim.SGD(model.parameters())
    session = AdaccSession(model, optimizer, memory_budget=1.0)
    with ThreadPoolExecutor(1) as thread:
        if is_forward:
            with pytest.raises(ConcurrentCallError, match="in another thread"), session.step(token_batch()):
                thread.submit(lambda: model(**token_batch())).result()
            return
        with session.step(token_batch()):
            thread.submit(model(**token_batch()).loss.backward).result()
            optimizer.step()
    assert session.policy is not None


def test_one_model_in_two_threads_is_refused(tiny_gpt2, token_batch):
    model = tiny_gpt2(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)  # threads share torch's generator
    profile = profile_model(model, token_batch(), CONFIG)
    inside, may_continue = threading.Event(), threading.Event()
    model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: (inside.set(), may_continue.wait(60))[0])
    with apply_policy(model, uniform_policy(profile, "recompute")):
        other = threading.Thread(target=lambda: model(**token_batch()).loss.backward())
        other.start()
        assert inside.wait(60)
        with pytest.raises(ConcurrentCallError, match="in one thread"):
            model(**token_batch())
        may_continue.set()
        other.join(60)
        model(**token_batch()).loss.backward()
