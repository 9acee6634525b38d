"""Retry of a micro-batch after an out-of-memory error: the first try's effects are undone."""

import random
import re

import numpy
import pytest
import torch

from adacc_hf.adapt.oom_retry import run_with_retry

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Failing:
    """Micro-batch that draws random numbers from all generators, and runs out of memory the first `num_fails` times."""

    def __init__(self, device, num_fails=1, message="no room", error=torch.OutOfMemoryError):
        self.device, self.num_fails, self.message, self.draws, self.error = device, num_fails, message, [], error

    def __call__(self):
        self.draws.append(
            [
                random.random(),
                numpy.random.rand(),
                *(torch.rand(1, device=generator_device).item() for generator_device in ("cpu", self.device)),
            ]
        )
        if len(self.draws) <= self.num_fails:
            raise self.error(self.message)
        return "done"


def retry(run, tighten=lambda: None, advice=lambda: "Take less"):
    return run_with_retry(run, torch.nn.Linear(2, 2).to(run.device), tighten, advice, report=lambda: "the table")


@pytest.mark.parametrize("device", DEVICES)
def test_the_second_try_draws_what_the_first_drew(device):
    def tighten():
        torch.rand(3, device=device)

    run = Failing(device)
    assert retry(run, tighten) == "done"
    first, second = run.draws
    assert first == second


@pytest.mark.parametrize(
    ("message", "is_tried_again"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ...",
            True,
        ),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("The size of tensor a (2) must match the size of tensor b (3)", False),
    ],
)
def test_libraries_run_out_of_memory_in_their_own_words(message, is_tried_again):
    run = Failing("cpu", message=message, error=RuntimeError)
    if is_tried_again:
        assert retry(run) == "done"
    else:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            retry(run)
    assert len(run.draws) == 1 + is_tried_again


def test_what_a_broken_backward_left_is_taken_away_before_the_next_try():
    model = torch.nn.Linear(2, 1)
    earlier = model.weight.grad = torch.ones(1, 2)
    tries = []

    def run():
        tries.append((model.weight.grad is earlier, model.bias.grad))
        if len(tries) == 1:
            model.weight.grad, model.bias.grad = torch.zeros(1, 2), torch.zeros(1)
            raise torch.OutOfMemoryError("no room")

    run_with_retry(run, model, lambda: None, lambda: "", lambda: "")
    assert tries == [(True, None), (True, None)]
