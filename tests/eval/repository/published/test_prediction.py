"""Behaviour of earlier library versions: the same numbers with additional saved or copied tensors."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config

from adacc_hf.eval.repository.published.prediction import older_behaviours
from adacc_hf.torch_glue.meters import CpuMemoryMeter


def saved_by(compute):
    """Return the result of `compute()`, and the tensors that autograd saves in it."""
    saved_tensors = []
    with saved_tensors_hooks(lambda tensor: saved_tensors.append(tensor) or tensor, lambda tensor: tensor):
        return compute(), saved_tensors


def test_softmax_keeps_its_input_and_gives_the_same():
    scores = torch.randn(4, 8, requires_grad=True)
    weights = torch.randn(4, 8)
    new_probabilities, new_saved = saved_by(lambda: functional.softmax(scores, dim=-1))
    (new_gradient,) = torch.autograd.grad((new_probabilities * weights).sum(), scores)
    with older_behaviours(["softmax keeps its input"]):
        old_probabilities, old_saved = saved_by(lambda: functional.softmax(scores, dim=-1))
    (old_gradient,) = torch.autograd.grad((old_probabilities * weights).sum(), scores)
    assert torch.equal(new_probabilities, old_probabilities)
    assert torch.equal(new_gradient, old_gradient)
    assert [tensor.shape for tensor in new_saved] == [scores.shape]
    assert [tensor.shape for tensor in old_saved] == [scores.shape] * 2
    assert any(torch.equal(tensor, scores) for tensor in old_saved)


def test_the_loss_copies_the_logits_and_is_the_same(one_thread):
    vocab_size = 4096
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, n_positions=64, vocab_size=vocab_size, bos_token_id=None, eos_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, vocab_size, (4, 64))
    batch = {"input_ids": ids, "labels": ids.clone()}
    with CpuMemoryMeter() as new_meter:
        new_loss = model(**batch).loss
    with older_behaviours(["the loss copies the shifted logits"]), CpuMemoryMeter() as old_meter:
        old_loss = model(**batch).loss
    assert new_loss.item() == pytest.approx(old_loss.item(), rel=1e-6)
    logits_bytes = 4 * ids.numel() * vocab_size
    # The copy, without the last position of each sequence, is another tensor of the logits' size in forward.
    assert old_meter.peak_bytes - new_meter.peak_bytes == pytest.approx(logits_bytes, rel=0.1)


def test_nothing_is_left_of_it():
    original_softmax = functional.softmax
    with older_behaviours(["softmax keeps its input", "the loss copies the shifted logits"]):
        assert functional.softmax is not original_softmax
    assert functional.softmax is original_softmax
