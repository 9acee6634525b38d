"""Memory and time of both heads, from the losses of one micro-batch."""

import pytest
import torch
from live_step_builders import TABLE, are_equal, grads_of, train

from adacc_hf import AdaccConfig, apply_policy
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import measure_step


@pytest.mark.parametrize(("budget", "trained"), [("auto", "plain"), ("1GiB", "chunked")])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_both_heads_are_known_from_one_step(name, budget, trained, one_thread, without_onednn):
    """The peak with the head that trains is exact."""
    config = AdaccConfig(min_compress_bytes=0, memory_budget=budget)
    batch = {key: value.repeat(4, 1) for key, value in TABLE[name].make_batch(0).items()}
    model = TABLE[name].build().train()
    loss, profile = train(model, batch, config)
    if trained == "plain":
        plain = TABLE[name].build().train()
        assert torch.equal(train(plain, batch)[0], loss)
        assert are_equal(grads_of(plain), grads_of(model))
    assert profile.heads == ("plain", "chunked")
    for head in profile.heads:
        policy = uniform_policy(profile.with_head(head), "retain")
        model = TABLE[name].build().train()
        with apply_policy(model, policy):
            measure_step(model, batch)
            peak = measure_step(model, batch).peak_bytes
        # The labels of a noted loss live until its end.
        assert policy.predicted_peak_bytes == pytest.approx(peak, rel=0.005 if head == trained else 0.08)
