"""Batch shapes: equality, and batches resized to other shapes."""

import pytest
import torch

from adacc_hf.torch_glue.batch_shapes import batch_shapes, fits_in


def rollouts(samples, prompt, completion):
    """Return a batch of reinforcement learning."""
    ids = {"prompt_ids": (samples, prompt), "completion_ids": (samples, completion)}
    tokens = {name: torch.ones(size, dtype=torch.long) for name, size in ids.items()}
    return tokens | {"old_logps": torch.zeros(samples, completion), "advantages": torch.zeros(samples), "beta": 0.1}


def sounds(length):
    """Return a batch of Wav2Vec2, whose feature extractor creates no mask."""
    return {"input_values": torch.zeros(2, length), "labels": torch.ones(2, 7, dtype=torch.long)}


def images(height, width):
    return {"pixel_values": torch.zeros(2, 3, height, width), "pixel_mask": torch.ones(2, height, width)}


@pytest.mark.parametrize(
    ("small", "large"),
    [
        pytest.param(rollouts(2, 5, 6), rollouts(4, 6, 7), id="texts"),
        pytest.param(sounds(600), sounds(640), id="sounds"),
        pytest.param(images(20, 30), images(32, 30), id="images"),
    ],
)
def test_sizes_differ_from_batch_to_batch(small, large):
    small, large = batch_shapes(small), batch_shapes(large)
    assert fits_in(small, large)
    assert not fits_in(large, small)


def test_images_are_as_many_as_a_text_says():
    one, two = (batch_shapes({"pixel_values": torch.zeros(2, n, 3, 8, 8)}) for n in (1, 2))
    assert not fits_in(one, two)


def test_other_tensors_make_another_sort_of_batch():
    ids = torch.ones(2, 8, dtype=torch.long)
    for other in ({"input_ids": ids, "attention_mask": ids}, {"inputs": ids}, {"input_ids": ids.unsqueeze(-1)}):
        assert not fits_in(batch_shapes(other), batch_shapes({"input_ids": ids}))


def test_a_batch_may_lack_tensors_of_a_larger_one():
    """A batch without the images of a larger one is covered by it: text alone needs less memory."""
    ids, patches = torch.ones(2, 8, dtype=torch.long), torch.zeros(12, 3)
    seeing = batch_shapes({"input_ids": ids, "pixel_values": patches})
    assert fits_in(batch_shapes({"input_ids": ids[:, :6]}), seeing)
    assert not fits_in(batch_shapes({"input_ids": ids.repeat(1, 2)}), seeing)
    assert not fits_in(seeing, batch_shapes({"input_ids": ids}))
    assert not fits_in(batch_shapes({"input_ids": ids, "attention_mask": ids}), seeing)
    assert fits_in(seeing, seeing)


def packed(lengths):
    """Return a batch of one row with documents of `lengths`, as TRL's collator makes it."""
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    ids = torch.ones(1, sum(lengths), dtype=torch.long)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "cu_seq_lens_q": boundaries, "max_length_q": max(lengths)}


def test_the_number_of_documents_in_a_row_is_no_size():
    assert batch_shapes(packed([5, 3, 8])) == batch_shapes(packed([10, 6]))
    assert batch_shapes(packed([5, 3])) != batch_shapes(packed([10, 6]))
