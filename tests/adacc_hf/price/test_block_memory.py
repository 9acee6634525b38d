"""The memory of a block's call, measured on the call alone."""

import pytest
import torch
from torch import nn

from adacc_hf.price.block_memory import RepeatedCall, TrackedTensor, measure_block
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.shared_storage import storage_key_of
from adacc_hf.run.call import Recording
from adacc_hf.tape.guards import KnownShapes


class Block(nn.Module):
    def __init__(self, overwrites=False):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.overwrites = overwrites

    def forward(self, hidden, scale):
        x = self.down(torch.nn.functional.dropout(self.up(hidden).sigmoid(), 0.5) * scale)
        return hidden.mul_(0.5) + x if self.overwrites else hidden + x


@pytest.fixture
def recorded():
    """Return `recorded(block)`: (a call from the block's code, one from its graph, tape, arguments)."""

    def run(block):
        torch.manual_seed(0)
        args = (torch.randn(8, 16, requires_grad=True).exp(), torch.rand(8, 64))
        known_shapes = KnownShapes()
        assert known_shapes.key(block, block.forward, args, {}) is not None
        recording = Recording("block", block, args, {})
        recording.run(block.forward)
        tape = recording.recorder.tape()
        tape.untrusted = None
        known_shapes.paths.compare_graph(tape, block.forward, args)
        paths = known_shapes.paths
        graph = paths.graph_of(block.forward, args)
        recording.discard()
        written = {storage_key_of(args[0])} if block.overwrites else set()
        own = RepeatedCall.of_block(block, block.forward, args, None, 1, written)
        return own, RepeatedCall.of_graph(*graph, 1, written), tape, args

    return run


def test_the_graphs_backward_has_the_memory_of_the_blocks_own(recorded):
    own, graph, tape, _ = recorded(Block())
    first, second = (measure_block(call, call, tape, frozenset(), Measurement(), False) for call in (own, graph))
    assert first.backward == second.backward
    assert {(event.value, event.death) for event in first.forward} == {
        (event.value, event.death) for event in second.forward
    }
    unpacked = [event.slot for event in first.backward if not event.release]
    assert sorted(unpacked) == sorted(event.slot for event in first.backward if event.release)


def test_gradients_that_exist_are_not_allocated_again(recorded):
    block = Block()
    _, graph, tape, _ = recorded(block)
    fresh, added = (measure_block(graph, graph, tape, frozenset(), Measurement(), has) for has in (False, True))
    down_bytes = sum(parameter.nbytes for parameter in block.down.parameters())
    ends = [memory.backward[-1].entry_bytes for memory in (fresh, added)]  # before the backward of `up`
    assert ends[0] - ends[1] == down_bytes


@pytest.mark.parametrize("overwrites", [False, True])
def test_nothing_of_the_model_changes(recorded, overwrites):
    block = Block(overwrites)
    *calls, tape, args = recorded(block)
    tensors = [*args, *block.parameters()]
    before = [tensor.detach().clone() for tensor in tensors]
    for call in calls:
        measure_block(call, call, tape, frozenset(), Measurement(), False)
    assert all(map(torch.equal, tensors, before))
    assert all(parameter.grad is None for parameter in block.parameters())


def test_a_tracked_tensor_dies_before_it_says_so():
    marks = []
    tensor = torch.zeros(3)
    tracked = TrackedTensor(4, tensor, marks.append)
    assert tracked.tensor is not None
    del tracked
    assert marks == [("release", 4)]
