"""Sizes that never repeat, and batches of these sizes."""

from __future__ import annotations

import statistics

import pytest
import torch

from adacc_hf.eval.trials.length_cases import IGNORED, IMAGE_TOKEN, LENGTH_CASES, Scale, middle

SCALE = Scale()
TINY = Scale(width=32, layers=2, heads=2, shortest=12, longest=24, steps=2)


@pytest.mark.parametrize("name", LENGTH_CASES)
def test_no_two_sizes_are_alike_and_their_median_is_about_their_mean(name: str) -> None:
    sizes = LENGTH_CASES[name].draw(SCALE, seed=0)
    assert len(set(sizes)) == SCALE.steps
    assert sizes != sorted(sizes)
    assert sizes == LENGTH_CASES[name].draw(SCALE, seed=0) != LENGTH_CASES[name].draw(SCALE, seed=1)
    lengths = [size[0] for size in sizes]
    assert len(set(lengths)) == SCALE.steps
    assert SCALE.shortest <= min(lengths)
    assert max(lengths) <= SCALE.longest
    assert statistics.median(lengths) == pytest.approx(middle(sizes)[0], rel=0.03)


def test_every_length_may_be_used_once_but_not_twice() -> None:
    scale = Scale(shortest=5, longest=9, steps=5)
    assert sorted(scale.lengths(torch.Generator())) == [5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="ask for 5 steps or fewer"):
        Scale(shortest=5, longest=9, steps=6).lengths(torch.Generator())


@pytest.mark.parametrize("name", LENGTH_CASES)
def test_a_seed_is_a_batch(name: str) -> None:
    case = LENGTH_CASES[name]
    size = case.draw(SCALE, seed=0)[0]
    first, same, other_batch = (case.make_batch(SCALE, size, "cpu", seed) for seed in (3, 3, 4))
    assert {name: tensor.shape for name, tensor in first.items()} == {
        name: tensor.shape for name, tensor in other_batch.items()
    }
    assert all(torch.equal(tensor, same[name]) for name, tensor in first.items())
    assert not torch.equal(first["labels"], other_batch["labels"])


@pytest.mark.parametrize("name", LENGTH_CASES)
def test_every_model_trains_on_its_batches(name: str) -> None:
    case, state = LENGTH_CASES[name], torch.get_rng_state()
    model = case.model(TINY, "cpu", seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    for size in case.draw(TINY, seed=0):
        loss = model(**case.make_batch(TINY, size, "cpu", seed=0)).loss
        loss.backward()
        assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_padding_is_in_every_batch_and_in_no_loss() -> None:
    batch = LENGTH_CASES["llama_padded"].make_batch(SCALE, (57,), "cpu", 0)
    ends = batch["attention_mask"].sum(1)
    assert ends[0] == 57
    assert ((ends[1:] >= 28) & (ends[1:] < 57)).all()
    assert torch.equal(batch["labels"] == IGNORED, batch["attention_mask"] == 0)


def test_an_image_is_as_many_tokens_as_it_has_patches_merged() -> None:
    batch = LENGTH_CASES["qwen2_vl"].make_batch(SCALE, (40, 3, 4), "cpu", 0)
    assert ((batch["input_ids"] == IMAGE_TOKEN).sum(1) == 12).all()
    assert len(batch["pixel_values"]) == batch["image_grid_thw"].prod(1).sum() == SCALE.batch * 48


def test_mistrals_window_binds_at_some_sizes_and_not_at_others() -> None:
    window = LENGTH_CASES["mistral"].settings(SCALE)["sliding_window"]
    lengths = [size[0] for size in LENGTH_CASES["mistral"].draw(SCALE, seed=0)]
    assert 0.4 < sum(length > window for length in lengths) / len(lengths) < 0.6
