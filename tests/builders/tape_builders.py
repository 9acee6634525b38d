"""Records of calls of a small block, at sizes of choice."""

from functools import partial

import torch
from torch import nn

from adacc_hf.run.call import Recording
from adacc_hf.tape.guards import CallKey, KnownShapes
from adacc_hf.tape.inputs import argument_layout
from adacc_hf.tape.symbolic_tape import CallSizes, RecordedCall
from adacc_hf.tape.tape_cache import TapeCache


def key_of(block, *args, **kwargs):
    """Return the key of a call of `block`. Calls that cannot be traced get a key by their arguments."""
    key = KnownShapes().key(block, partial(block, **kwargs), args, kwargs)
    return key or CallKey((argument_layout(args, kwargs), (), 0, (), None), 0)


def record_block(block, *args, name="block", library=None, **kwargs):
    """Record a call of `block` in `library` and return its (key, tape)."""
    library = library or TapeCache()
    key = key_of(block, *args, **kwargs)
    recording = Recording(name, block, args, kwargs)
    recording.run(lambda *values: block(*values, **kwargs))
    tape = library.verified_tape(recording.recorder)
    library.remember(tape, key, name)
    recording.close()
    return key, tape


def record_of(block, *args, alignment=1):
    """Return a call of `block` as a symbolic tape is made of."""
    key, tape = record_block(block, *args)
    return RecordedCall(CallSizes.of(key, alignment), tape)


def text(samples, tokens):
    """Return hidden states of width 8 that require a gradient."""
    return torch.ones(samples, tokens, 8, requires_grad=True)


class Block(nn.Module):
    """A block that runs `forward(layer, hidden)`."""

    def __init__(self, forward=lambda layer, hidden, *_: layer(hidden).tanh().exp()):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.run = forward

    def forward(self, hidden, *numbers):
        return self.run(self.layer, hidden, *numbers)


def sizes_of(*args, alignment=1, block=None):
    """Return the sizes of a call of `block`, or of a `Block` as it is."""
    block = block or Block()
    return CallSizes.of(key_of(block, *args), alignment)
