"""What earlier versions did otherwise: the same numbers, and what they kept or copied besides."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config

from adacc_hf.eval.published.older_versions import older_behaviours
from adacc_hf.torch_glue.memory import measure_step


def saved_by(compute):
    """The tensors that autograd saves in `compute()`, and what it gives."""
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        return compute(), saved


def test_softmax_keeps_its_input_and_gives_the_same():
    scores = torch.randn(4, 8, requires_grad=True)
    weights = torch.randn(4, 8)
    now, kept_now = saved_by(lambda: functional.softmax(scores, dim=-1))
    (gradient_now,) = torch.autograd.grad((now * weights).sum(), scores)
    with older_behaviours(["softmax keeps its input"]):
        then, kept_then = saved_by(lambda: functional.softmax(scores, dim=-1))
    (gradient_then,) = torch.autograd.grad((then * weights).sum(), scores)
    assert torch.equal(now, then)
    assert torch.equal(gradient_now, gradient_then)
    assert [tensor.shape for tensor in kept_now] == [scores.shape]
    assert [tensor.shape for tensor in kept_then] == [scores.shape] * 2
    assert any(torch.equal(tensor, scores) for tensor in kept_then)


def test_the_loss_copies_the_logits_and_is_the_same(one_thread):
    vocab_size = 4096
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, n_positions=64, vocab_size=vocab_size, bos_token_id=None, eos_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, vocab_size, (4, 64))
    batch = {"input_ids": ids, "labels": ids.clone()}
    now, step_now = model(**batch).loss, measure_step(model, batch)
    with older_behaviours(["the loss copies the shifted logits"]):
        then, step_then = model(**batch).loss, measure_step(model, batch)
    assert now.item() == pytest.approx(then.item(), rel=1e-6)
    logits_bytes = 4 * ids.numel() * vocab_size
    # The copy, which lacks the last position of each sequence, is one more of the logits' size in forward.
    forward_now, forward_then = (dict(step.timeline)["forward"] for step in (step_now, step_then))
    assert forward_then - forward_now == pytest.approx(logits_bytes, rel=0.1)


def test_nothing_is_left_of_it():
    before = functional.softmax
    with older_behaviours(["softmax keeps its input", "the loss copies the shifted logits"]):
        assert functional.softmax is not before
    assert functional.softmax is before
