"""Recorded calls, for the tests of tapes."""

import pytest
import torch

from adacc_hf.tape.recorder import Recorder


@pytest.fixture(scope="session")
def record_call():
    """`record_call(forward, block, *args, **kwargs)`: (tape, recorder) of `forward(block, *args, **kwargs)`."""

    def record(forward, block, *args, **kwargs):
        recorder = Recorder(block, args, kwargs)
        hooks = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda slot: None)
        with recorder.naming_modules(), recorder.watching_reads(), hooks, recorder:
            forward(block, *args, **kwargs)
        return recorder.tape(), recorder

    return record
