"""Caches for batches of ever new sizes are no larger after thousands of sizes than after one thousand.

`ADACC_MANY_SIZES=10000 pytest tests/adacc_hf/test_many_sizes.py` runs ten thousand.
"""

import gc
import math
import os
import random
import sys
from collections import Counter
from types import SimpleNamespace

import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import random_policy
from adacc_hf.tape.tape import Tape

WIDTH, VOCABULARY = 4, 11
FEW, MANY = 1_000, int(os.environ.get("ADACC_MANY_SIZES", "3000"))
CONFIG = AdaccConfig(block_classes=("Block",), min_compress_bytes=0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.layer(hidden).tanh().exp()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(loss=hidden.sum())


def remembered():
    """Return the number of Adacc's objects by class, and of memory blocks that Python has allocated for all."""
    gc.collect()
    ours = Counter(type(thing) for thing in gc.get_objects() if str(type(thing).__module__).startswith("adacc_hf."))
    return ours, sys.getallocatedblocks()


def test_ever_new_sizes_take_no_more_memory(one_thread):
    sizes = [(samples, tokens) for samples in range(2, 202) for tokens in range(2, 52)]
    random.Random(0).shuffle(sizes)
    torch.manual_seed(0)
    model = Model()
    profile = profile_model(model, {"input_ids": torch.ones(8, 24, dtype=torch.long)}, CONFIG)
    with apply_policy(model, random_policy(profile, 0, ("compress", "recompute")), CONFIG):
        for number, size in enumerate(sizes[:MANY], start=1):
            model(torch.ones(size, dtype=torch.long)).loss.backward()
            if number == FEW:
                before, blocks = remembered()
        after, more_blocks = remembered()
    # The 1st, 2nd, 4th, ... new size leaves a record (rule R7), and recorded sizes are kept, up to MAX_SHAPES.
    num_records = math.ceil(math.log2(MANY / FEW)) + 1
    per_tape = {kind: math.ceil(count / before[Tape]) for kind, count in before.items()}
    grown = {kind.__name__: count - before[kind] for kind, count in after.items()}
    most = {kind.__name__: num_records * per_tape.get(kind, 0) for kind in after}
    assert {name: (count, most[name]) for name, count in grown.items() if count > most[name]} == {}
    # Layouts of codecs are cached, some 4,000 of them at seven memory blocks each; a tape takes hundreds.
    assert more_blocks - blocks < 0.02 * blocks
