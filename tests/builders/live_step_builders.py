"""Micro-batches that train, with or without a profile, for tests."""

import torch

from adacc_hf import AdaccConfig
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.price.batch import Batch, TrainingStep
from adacc_hf.price.live_step import LiveStep
from adacc_hf.price.measurement import Measurement
from adacc_hf.run.blocks import Installation
from adacc_hf.tape.tape_cache import TapeCache

TABLE = architectures()
LOSSLESS = AdaccConfig(actions=("retain", "recompute"), min_compress_bytes=0)


def train(model, batch, config=None, autocast=False, num_micro=1, block_classes=None):
    """Train on one micro-batch, profiled if `config` is given. Return (loss, profile)."""
    live = None
    if config is not None:
        installation = Installation(model, block_classes)
        live = LiveStep(installation, config, Measurement(), TapeCache())
        live.begin(Batch(batch), TrainingStep(gradient_accumulation_steps=num_micro))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    if live is not None:
        live.leave_forward(loss)
    loss.backward()
    value = loss.detach().clone()
    del loss
    if live is None:
        return value, None
    live.end()
    profile = live.profile()
    installation.remove()
    return value, profile


def grads_of(model):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def are_equal(first, second):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))
