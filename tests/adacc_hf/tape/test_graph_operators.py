"""The operators of a traced graph on fake tensors are those that a recorder sees when the block's own Python runs."""

import pytest
import torch
from tape_builders import Block, record_block, text
from torch import nn

from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.run.blocks import Installation
from adacc_hf.run.call import Recording
from adacc_hf.tape.guards import KnownShapes

CASES = {"gpt2": torch.bfloat16, "llama": torch.float32, "bert": torch.bfloat16, "mixtral": torch.float32}
OTHERWISE = {"bloom", "falcon", "phimoe"}
"""Architectures with views whose strides along a dimension of size one, or whose bases, differ in Dynamo's graph."""


class Comparing:
    """Strategy that records each call of a block, and compares it with the call's graph."""

    expects_outer_hooks = True

    def __init__(self):
        self.same = []

    def run(self, block, fn, args, kwargs):
        known_shapes = KnownShapes()
        if known_shapes.key(block, fn, args, kwargs) is None:
            return fn(*args)
        recording = Recording("block", block, args, kwargs)
        result = recording.run(fn)
        tape = recording.recorder.tape()
        known_shapes.paths.compare_graph(tape, fn, args)
        self.same.append(known_shapes.paths.has_graph_of(tape))
        recording.discard()
        return result


def comparisons(architecture, sizes=(2, 3), dtype=torch.float32):
    model, strategy = architecture.build().train().to(dtype), Comparing()
    installation = Installation(model, architecture.block_classes)
    for call in installation.calls.values():
        call.strategy = strategy
    for size in sizes:
        model(**architecture.make_batch(size))
        installation.begin_step()
    installation.remove()
    return strategy.same


@pytest.mark.gate
@pytest.mark.parametrize(("name", "dtype"), CASES.items(), ids=CASES)
def test_a_graph_tells_what_a_block_runs(name, dtype):
    same = comparisons(architectures()[name], dtype=dtype)
    assert same
    assert all(same)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Initializing zero-element")  # MobileBERT has such a layer
@pytest.mark.filterwarnings("ignore:Casting complex values")  # buffers of LLaMA 4
@pytest.mark.parametrize("name", architectures())
def test_a_graph_tells_what_any_block_runs(name):
    assert all(comparisons(architectures()[name])) or name in OTHERWISE | {"jetmoe", "recurrent_gemma"}


def test_under_autocast_a_graph_casts_as_the_block_does():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(comparisons(architectures()["llama"]))


def branching(layer, hidden):
    first, second = layer(hidden).split([hidden.shape[1] // 2, (hidden.shape[1] + 1) // 2], dim=1)
    return first.mean() * second.exp() + (0 if hidden.shape[1] < 16 else second)


def padded(layer, hidden):
    return layer(nn.functional.pad(hidden, (0, 0, 0, -hidden.shape[1] % 4))).tanh()  # `pad` takes no symbolic sizes


@pytest.mark.parametrize("forward", [branching, padded])
def test_a_graph_tells_the_operators_of_all_sizes_on_its_path(forward):
    block, known_shapes, tapes = Block(forward), KnownShapes(), {}
    for args in [(text(*size),) for size in ((2, 9), (3, 10), (2, 7), (5, 14), (3, 19))]:
        path = known_shapes.key(block, block, args, {}).shape[2]
        _, tape = record_block(block, *args)
        known_shapes.paths.compare_graph(tape, block, args)
        tapes.setdefault(path, []).append(tape)
        for each in tapes[path]:
            assert known_shapes.paths.has_other_numbers(each, block, args) == (each is not tape)
    assert len(tapes) == (2 if forward is branching else 1)
