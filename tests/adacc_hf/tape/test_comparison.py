"""Recording beside a tape: the same record as alone, in no memory, and where the call leaves the tape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adacc_hf.tape.comparison import CheckingRecorder
from adacc_hf.tape.recorder import Recorder
from adacc_hf.torch_glue.memory import MemoryMeter

ROWS = 4096


@pytest.fixture
def block():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def usual(block, hidden):
    for _ in range(6):
        hidden = (block(hidden) * 2.0 + 1.0).tanh()
    return hidden


def x():
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def run(recorder, call, *args, keep=True):
    """Run `call` under `recorder`; what autograd saves is let go at once unless `keep`."""

    def pack(tensor):
        recorder.save(tensor)
        return tensor.detach() if keep else None

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed)
    with recorder.naming_modules(), recorder.watching_reads(), hooks, recorder:
        return call(*args)


def tape_of(block, call, hidden):
    recorder = Recorder(block, (hidden,), {})
    run(recorder, call, block, hidden)
    return recorder.tape()


def checking(block, hidden, tape, wanted=(), on_leaving=lambda bases: None):
    return CheckingRecorder(block, (hidden,), {}, tape, wanted, on_leaving)


def test_the_record_is_that_of_a_recorder_that_keeps_all(block):
    """Storages die on the way, and new ones are made in their places."""
    hidden = x()
    recorder = checking(block, hidden, tape_of(block, usual, hidden))
    run(recorder, usual, block, hidden, keep=False)
    tape = recorder.finish()
    assert not recorder.has_left
    assert tape.digest == tape_of(block, usual, hidden).digest
    assert all(tape.values[value].source is not None for value, _ in recorder.kept())


def test_it_keeps_no_memory(block):
    hidden = x()
    tape = tape_of(block, usual, hidden)

    def peak(recorder):
        with MemoryMeter.for_device(torch.device("cpu")) as meter:
            run(recorder, usual, block, hidden, keep=False)
        return meter.peak_bytes

    beside, alone = peak(checking(block, hidden, tape)), peak(Recorder(block, (hidden,), {}))
    nbytes = hidden.untyped_storage().nbytes()
    assert alone > 20 * nbytes  # of 24 results
    assert beside < 4 * nbytes  # an operator's input and result, and the product that the sum is made from


def shorter(block, hidden):
    return (block(hidden) * 2.0 + 1.0).tanh()


def longer(block, hidden):
    return usual(block, hidden).exp()


def other_number(block, hidden):
    hidden = (block(hidden) * 2.0 + 1.0).tanh()
    return usual(block, hidden * 3.0)


def other_tensor(block, hidden):
    return (block(hidden) * 2.0 + 1.0).tanh() * block.weight[0, 0]


@pytest.mark.parametrize("call", [shorter, longer, other_number, other_tensor])
def test_it_tells_where_a_call_leaves_the_tape(block, call):
    """With the wanted values that were made before, in full."""
    hidden, found = x(), []
    tape = tape_of(block, usual, hidden)
    made = [value.index for value in tape.values if value.source is None]
    recorder = checking(block, hidden, tape, wanted=made, on_leaving=found.append)
    run(recorder, call, block, hidden)
    assert recorder.finish().digest != tape.digest
    assert recorder.has_left
    (bases,) = found
    first = made[:4]  # the product, twice that, one more, and its tangent
    assert set(first) <= bases.keys() <= set(made)
    assert torch.equal(bases[first[3]], (block(hidden) * 2.0 + 1.0).tanh())


def test_what_was_let_go_is_not_given(block):
    hidden, found = x(), []
    tape = tape_of(block, usual, hidden)
    made = [value.index for value in tape.values if value.source is None]
    recorder = checking(block, hidden, tape, wanted=made[:2], on_leaving=found.append)

    def call(block, hidden):
        hidden = block(hidden) * 2.0
        recorder.let_go(made[0])
        return hidden.exp()

    run(recorder, call, block, hidden)
    recorder.finish()
    assert [sorted(bases) for bases in found] == [made[1:2]]


def test_what_runs_in_a_pause_is_not_the_blocks(block):
    hidden = x()
    tape = tape_of(block, usual, hidden)
    recorder = checking(block, hidden, tape)

    def call(block, hidden):
        with recorder.paused():
            assert hidden.detach().exp().sum().tolist() > 0
        return usual(block, hidden)

    run(recorder, call, block, hidden)
    found = recorder.finish()
    assert not recorder.has_left
    assert (found.digest, found.untrusted) == (tape.digest, None)
