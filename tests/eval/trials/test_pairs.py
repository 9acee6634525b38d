"""The bi-encoder that is measured: what its loss reads, and what its weights depend on."""

import torch

from adacc_hf.eval.trials.families import Size
from adacc_hf.eval.trials.pairs import PairsFamily

TINY = Size(width=32, layers=1, heads=2, batch=3, tokens=12)


def test_the_encoder_is_called_on_beginnings_and_on_ends():
    model = PairsFamily().model(TINY, "eager")
    lengths = []
    model.encoder.register_forward_hook(
        lambda module, args, kwargs, output: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert model(**TINY.batches()).loss.requires_grad
    assert lengths == [8, 4]


def test_pairs_that_are_alike_have_a_small_loss():
    model = PairsFamily().model(TINY, "sdpa").eval()
    part = TINY.batches()["input_ids"][:, :4]
    alike = model(torch.cat([part, part, part], dim=1))
    mixed = model(torch.cat([part, part, part.roll(1, 0)], dim=1))
    assert alike.loss < mixed.loss


def test_weights_depend_on_the_seed_alone():
    weights = [
        PairsFamily().model(TINY, "sdpa", seed=seed).encoder.embeddings.word_embeddings.weight for seed in (0, 0, 1)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
