"""Lazy logits behave like real ones in any use."""

import copy
import pickle
import weakref

import pytest
import torch
from function_builders import Square
from torch import nn
from torch.nn import functional as F

from adacc_hf.artifacts.errors import ChunkedHeadError
from adacc_hf.head.lazy_logits import HeadCall, LazyLogits


class Counts:
    """A watcher that counts."""

    def __init__(self):
        self.losses = self.wholes = 0
        self.computes_plainly = False

    def note_loss(self, loss):
        self.losses += 1

    def note_full_logits(self):
        self.wholes += 1


@pytest.fixture
def leaves():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in [(2, 6, 8), (11, 8), (11,)]]


@pytest.fixture
def target():
    target = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(1))
    target[0, 1] = -100
    return target


@pytest.fixture
def lazy(leaves):
    """`lazy(dtype)`: lazy logits of `leaves`, and their watcher."""

    def build(dtype=torch.float32):
        counts = Counts()
        return LazyLogits.of(HeadCall(*leaves, dtype, counts)), counts

    return build


def real(leaves, dtype=torch.float32):
    return F.linear(*(leaf.to(dtype) for leaf in leaves))


def gradients(result, leaves):
    weights = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.dtype)
    return torch.autograd.grad((result * weights).sum(), leaves)


def scale_in_place(logits):
    logits.mul_(3)
    return logits.float()


def set_item(logits):
    logits = logits + 0 if logits.is_leaf else logits
    logits[..., 2] = 1.0
    return logits.exp()


USES = {
    "softcap": lambda logits: (logits / 3).tanh() * 3,
    "sum": lambda logits: logits.sum(-1),
    "float": lambda logits: logits.float() * 2,
    "double": lambda logits: logits.to(torch.float64).exp(),
    "shift": lambda logits: logits[..., :-1, :].contiguous().view(-1, 11).exp(),
    "one token": lambda logits: logits[:, -1].exp(),
    "classes": lambda logits: logits[..., :5].exp(),
    "number": lambda logits: logits[0, 1, 2],
    "other view": lambda logits: logits.view(-1, 22).exp(),
    "transposed": lambda logits: logits.transpose(0, 1).exp(),
    "stack": lambda logits: torch.stack([logits, logits]),
    "in place": scale_in_place,
    "set item": set_item,
    "smoothed": lambda logits: F.cross_entropy(logits.view(-1, 11), torch.arange(12) % 11, label_smoothing=0.1),
    "per row": lambda logits: F.cross_entropy(logits.view(-1, 11), torch.arange(12) % 11, reduction="none"),
    "weighted": lambda logits: F.cross_entropy(
        logits.view(-1, 11), torch.arange(12) % 11, weight=torch.arange(11, dtype=logits.dtype)
    ),
    "own function": lambda logits: Square.apply(logits),
    "own function of a cast": lambda logits: Square.apply(logits[:, :-1].to(torch.float64)),
    "linear": lambda logits: F.linear(logits.float(), torch.ones(2, 11)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use", USES)
def test_any_use_gives_what_real_logits_give(lazy, leaves, use, dtype):
    logits, counts = lazy(dtype)
    ours, expected = USES[use](logits), USES[use](real(leaves, dtype))
    assert type(ours) is torch.Tensor
    assert ours.dtype == expected.dtype
    assert torch.equal(ours, expected)
    for mine, theirs in zip(gradients(ours, leaves), gradients(expected, leaves), strict=True):
        assert torch.equal(mine, theirs)
    assert counts.wholes >= 1
    assert counts.losses == 0


LOSSES = {
    "causal": lambda logits, target: F.cross_entropy(logits.float().view(-1, 11), target.view(-1)),
    "sum": lambda logits, target: F.cross_entropy(logits.view(-1, 11), target.view(-1), reduction="sum") / 7,
    "module": lambda logits, target: nn.CrossEntropyLoss()(logits.reshape(12, 11), target.flatten()),
    "shifted": lambda logits, target: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, 11), target[..., 1:].reshape(-1), ignore_index=-100
    ),
    "to device": lambda logits, target: F.cross_entropy(logits.to(target.device).view(-1, 11), target.view(-1)),
    "other ignored": lambda logits, target: F.cross_entropy(
        logits.view((-1, 11)), target.where(target >= 0, 3).view(-1), ignore_index=3
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_does_without_the_logits(lazy, leaves, target, loss):
    logits, counts = lazy()
    ours, expected = LOSSES[loss](logits, target), LOSSES[loss](real(leaves), target)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)  # another order of sums over 12 rows
    for mine, theirs in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert (counts.losses, counts.wholes) == (1, 0)


def test_the_loss_of_bfloat16_logits_is_a_float32(lazy, leaves, target):
    logits, _ = lazy(torch.bfloat16)
    loss = F.cross_entropy(logits.view(-1, 11), target.view(-1))
    expected = F.cross_entropy(real(leaves, torch.bfloat16).float().view(-1, 11), target.view(-1))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


def test_a_change_in_place_is_seen_by_the_loss(lazy, leaves, target):
    logits, counts = lazy()
    changed_logits = real(leaves)
    for each in (logits, changed_logits):
        each.mul_(0.5)
    ours, expected = LOSSES["causal"](logits, target), LOSSES["causal"](changed_logits, target)
    assert torch.equal(ours, expected)
    assert counts.losses == 0


def test_copies_and_files_hold_plain_tensors(lazy, leaves):
    for copied in (pickle.loads(pickle.dumps(lazy()[0].detach())), copy.deepcopy(lazy()[0].detach())):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, real(leaves))
    assert repr(lazy()[0]).startswith("tensor(")


def test_logits_read_without_gradients_can_still_be_trained_on(lazy, leaves):
    logits, _ = lazy()
    with torch.no_grad():
        assert not logits.argmax(-1).requires_grad
    for mine, theirs in zip(gradients(logits * 2, leaves), gradients(real(leaves) * 2, leaves), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda x: x.retain_grad(), id="retain_grad"),
        pytest.param(lambda x: x.register_hook(print), id="register_hook"),
        pytest.param(lambda x: x.register_hook(hook=print), id="by keyword"),
        pytest.param(lambda x: x.register_hook([].append), id="a method of no module"),
    ],
)
def test_hooks_on_the_logits_are_refused(lazy, use):
    with pytest.raises(ChunkedHeadError, match=r'AdaccConfig\(head="plain"\)'):
        use(lazy()[0])


class PassOn(torch.autograd.Function):
    """A Function that passes its inputs on below Python, as DDP does with outputs, and negates their gradients."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return tuple(None if gradient is None else -gradient for gradient in gradients)


@pytest.mark.parametrize("reads_logits", [False, True], ids=["loss", "loss-and-logits"])
def test_outputs_may_be_handed_on_where_the_weight_is_the_embeddings_too(target, reads_logits):
    weight = torch.randn(11, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()

    counts = Counts()

    def train(logits_of):
        embedded = F.embedding(target.clamp(min=0), weight)
        # A norm keeps tensors for its backward, and frees them after one backward.
        rows = F.layer_norm(embedded, (8,))
        logits = logits_of(rows)
        loss = F.cross_entropy(logits.view(-1, 11), target.view(-1))
        loss, logits = PassOn.apply(loss, logits)
        total = loss + logits.square().mean() if reads_logits else loss
        rows_ref = weakref.ref(rows)
        embedded.register_hook(lambda _: is_freed.append(rows_ref() is None))
        del rows, logits
        total.backward()
        gradient, weight.grad = weight.grad, None
        return loss, gradient

    is_freed = []
    loss, gradient = train(lambda rows: LazyLogits.of(HeadCall(rows, weight, None, torch.float32, counts)))
    assert (counts.wholes > 0) == reads_logits
    plain_loss, plain_gradient = train(lambda rows: F.linear(rows, weight))
    assert is_freed == [True, True]
    # Sums over chunks are computed in another order.
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(gradient, plain_gradient)
