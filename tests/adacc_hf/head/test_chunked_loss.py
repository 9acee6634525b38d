"""The chunked cross entropy against cross entropy on whole logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from adacc_hf.artifacts.errors import ChunkedHeadError
from adacc_hf.head import chunked_loss
from adacc_hf.head.chunked_loss import chunk_rows, chunked_cross_entropy
from adacc_hf.torch_glue.meters import CpuMemoryMeter


def make_case(num_rows, width, classes, has_bias=True, ignored=(), scale=1.0):
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, width, generator=generator)
    weight = torch.randn(classes, width, generator=generator) * scale
    bias = torch.randn(classes, generator=generator) if has_bias else None
    target = torch.randint(0, classes, (num_rows,), generator=generator)
    target[list(ignored)] = -100
    return rows, weight, bias, target


def whole_loss(rows, weight, bias, target, reduction="mean", dtype=torch.float32):
    cast_bias = None if bias is None else bias.to(dtype)
    return F.cross_entropy(F.linear(rows.to(dtype), weight.to(dtype), cast_bias).float(), target, reduction=reduction)


def in_chunks(*tensors, num_rows, **options):
    """Return the loss in chunks of `num_rows` rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "chunk_rows", lambda width: num_rows)
        return chunked_cross_entropy(*tensors, **options)


def loss_and_gradients(function, tensors, target, **options):
    leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in tensors]
    loss = function(*leaves, target, **options)
    (3.0 * loss).backward()
    return loss.detach(), [leaf.grad for leaf in leaves if leaf is not None]


@given(
    num_rows=st.integers(1, 40),
    chunk=st.integers(1, 50),
    has_bias=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_any_chunking_gives_the_loss_and_gradients_of_whole_logits(num_rows, chunk, has_bias, reduction, data):
    ignored = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=num_rows - 1, unique=True))
    *tensors, target = make_case(num_rows, 8, 13, has_bias, ignored)
    expected, gradients = loss_and_gradients(whole_loss, tensors, target, reduction=reduction)
    options = {"dtype": torch.float32, "num_rows": chunk, "reduction": reduction}
    loss, ours = loss_and_gradients(in_chunks, tensors, target, **options)
    # Another order of sums: a few roundings of 6e-8, relative to the largest term of a sum of 40.
    torch.testing.assert_close(loss, expected, rtol=3e-6, atol=3e-6)
    for mine, theirs in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@given(
    num_rows=st.integers(1, 40),
    chunk=st.integers(1, 50),
    width=st.integers(2, 40),  # with one column, products are vector products with other code
    classes=st.one_of(st.integers(64, 400), st.sampled_from([1000, 4097, 5026])),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    is_cast=st.booleans(),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_padded_rows_of_logits_change_no_bit(num_rows, chunk, width, classes, has_bias, dtype, is_cast, data):
    ignored = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=num_rows - 1, unique=True))
    *tensors, target = make_case(num_rows, width, classes, has_bias, ignored)
    tensors = [tensor if tensor is None or is_cast else tensor.to(dtype) for tensor in tensors]
    options = {"dtype": dtype, "num_rows": chunk}
    padded = loss_and_gradients(in_chunks, tensors, target, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "COLUMNS", 1)
        unpadded = loss_and_gradients(in_chunks, tensors, target, **options)
    assert torch.equal(padded[0], unpadded[0])
    for mine, theirs in zip(padded[1], unpadded[1], strict=True):
        assert torch.equal(mine, theirs)
        assert mine.is_contiguous()


def test_all_rows_ignored_gives_nan_as_the_mean_over_nothing_does():
    *tensors, target = make_case(4, 8, 13, ignored=range(4))
    assert chunked_cross_entropy(*tensors, target, dtype=torch.float32).isnan()
    assert whole_loss(*tensors, target).isnan()


def test_a_bfloat16_product_has_the_loss_of_float32_logits_and_gradients_no_worse():
    """A bfloat16 loss is within 1e-5 of the loss of the same logits in float32, as only sums differ."""
    *tensors, target = make_case(96, 64, 1000, scale=0.02)
    exact = loss_and_gradients(whole_loss, tensors, target)
    plain = loss_and_gradients(whole_loss, tensors, target, dtype=torch.bfloat16)
    ours = loss_and_gradients(in_chunks, tensors, target, dtype=torch.bfloat16, num_rows=32)
    assert ours[0].dtype is torch.float32
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-5, atol=0)
    for mine, theirs, truth in zip(ours[1], plain[1], exact[1], strict=True):
        assert mine.dtype is torch.float32
        assert (mine - truth).norm() <= 1.1 * (theirs - truth).norm()


def test_large_logits_stay_finite():
    """Large logits have a finite loss: softmax underflows to 0 at the label, its logarithm does not."""
    rows, weight, _, target = make_case(4, 8, 13, has_bias=False, scale=100.0)
    loss = chunked_cross_entropy(rows, weight, None, target, dtype=torch.float32)
    assert loss > 100
    torch.testing.assert_close(loss, whole_loss(rows, weight, None, target), rtol=1e-5, atol=0)


def test_infinite_logits_reach_loss_and_gradients():
    """Infinite logits reach loss and gradients, so that a gradient scaler notices them."""
    *tensors, target = make_case(4, 8, 13)
    tensors[0][1] = torch.inf
    loss, gradients = loss_and_gradients(chunked_cross_entropy, tensors, target, dtype=torch.float32)
    assert not loss.isfinite()
    assert not any(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("frozen", [0, 1, 2], ids=["rows", "weight", "bias"])
def test_what_needs_no_gradient_gets_none(frozen):
    *tensors, target = make_case(6, 8, 13)
    for index, tensor in enumerate(tensors):
        tensor.requires_grad_(index != frozen)
    chunked_cross_entropy(*tensors, target, dtype=torch.float32).backward()
    assert [tensor.grad is None for tensor in tensors] == [index == frozen for index in range(3)]


def test_a_second_backward_is_refused():
    *tensors, target = make_case(6, 8, 13)
    loss = chunked_cross_entropy(tensors[0].requires_grad_(), *tensors[1:], target, dtype=torch.float32)
    loss.backward(retain_graph=True)
    with pytest.raises(ChunkedHeadError, match=r'AdaccConfig\(head="plain"\)'):
        loss.backward()


def test_logits_never_exist_as_a_whole():
    width, classes, num_rows = 64, 2048, 1024
    rows, weight, _, target = make_case(num_rows, width, classes, has_bias=False)
    rows.requires_grad_(), weight.requires_grad_()
    with CpuMemoryMeter() as meter:
        chunked_cross_entropy(rows, weight, None, target, dtype=torch.float32).backward()
    chunk = chunk_rows(width) * classes * 4
    # The gradients, a chunk's logits and their softmax, and tensors of one number per row.
    assert meter.peak_bytes <= rows.nbytes + weight.nbytes + 2 * chunk + 64 * num_rows
    assert meter.peak_bytes < num_rows * classes * 4 / 2
