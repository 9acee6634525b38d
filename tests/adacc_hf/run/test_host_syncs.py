"""Host synchronizations of a step at a new size: only where replay is compared (rules R7 and R10)."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.compat import no_packed_sequences

aten = torch.ops.aten
WAITS = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.is_nonzero.default)
NEW_SIZES = [(3, 19), (5, 35), (3, 57)]
CONFIG = AdaccConfig(min_compress_bytes=0)


class Waiting(TorchDispatchMode):
    """A mode that counts the operators that read a tensor's data."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in WAITS:
            self.operators[str(func)] += 1
        return func(*args, **(kwargs or {}))


def waits(model, batch) -> Counter[str]:
    with Waiting() as waiting:
        model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    return waiting.operators


@pytest.mark.parametrize("action", ["recompute", "compress"])
def test_a_new_size_waits_for_nothing(tiny_gpt2, token_batch, action):
    model = tiny_gpt2("sdpa", layers=2, n_positions=64)
    profile, *_ = [profile_model(model, token_batch(*size), CONFIG) for size in ((8, 64), (8, 32), (2, 17), (3, 48))]
    policy = uniform_policy(profile, action)
    with no_packed_sequences():  # Transformers synchronizes to detect packing, in plain training too
        plain = {size: waits(model, token_batch(*size)) for size in NEW_SIZES}
        with apply_policy(model, policy, CONFIG):
            extra_waits = [waits(model, token_batch(*size)) - plain[size] for size in NEW_SIZES]
    assert not any(extra_waits)  # on a CPU, checksums need no operator
