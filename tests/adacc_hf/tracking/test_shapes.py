"""Sizes of batches: which dimensions are free to differ, and batches made to another size."""

import torch

from adacc_hf.tracking.shapes import batch_shapes, fits_in, is_alike, resized


def rollouts(samples, prompt, completion):
    """A batch of reinforcement learning."""
    ids = {"prompt_ids": (samples, prompt), "completion_ids": (samples, completion)}
    tokens = {name: torch.ones(size, dtype=torch.long) for name, size in ids.items()}
    return tokens | {"old_logps": torch.zeros(samples, completion), "advantages": torch.zeros(samples), "beta": 0.1}


def test_samples_and_lengths_are_free_also_of_numbers_for_each_token():
    free = {shape.name: shape.num_free for shape in batch_shapes(rollouts(4, 6, 9))}
    assert free == {"advantages": 1, "completion_ids": 2, "old_logps": 2, "prompt_ids": 2}
    assert is_alike(batch_shapes(rollouts(4, 6, 9)), batch_shapes(rollouts(2, 5, 3)))


def test_the_width_of_features_is_not_free():
    before, after = ({"input_ids": torch.ones(2, 8, dtype=torch.long), "x": torch.ones(2, n)} for n in (5, 6))
    assert not is_alike(batch_shapes(before), batch_shapes(after))


def test_a_batch_made_to_another_size():
    shapes = [batch_shapes(rollouts(4, 6, 9)), batch_shapes(rollouts(3, 7, 5))]
    made = resized(rollouts(4, 6, 9), *shapes)
    assert batch_shapes(made) == shapes[1]
    assert made["beta"] == 0.1


def test_a_batch_may_lack_tensors_of_a_larger_one():
    """Text alone needs less than text with images."""
    ids, patches = torch.ones(2, 8, dtype=torch.long), torch.zeros(12, 3)
    seeing = batch_shapes({"input_ids": ids, "pixel_values": patches})
    assert fits_in(batch_shapes({"input_ids": ids[:, :6]}), seeing)
    assert not fits_in(batch_shapes({"input_ids": ids.repeat(1, 2)}), seeing)
    assert not fits_in(seeing, batch_shapes({"input_ids": ids}))
    assert not fits_in(batch_shapes({"input_ids": ids, "attention_mask": ids}), seeing)
    assert fits_in(seeing, seeing)
