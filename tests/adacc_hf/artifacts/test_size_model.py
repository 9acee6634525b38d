"""Size classes, and the uncertainty of predicted peaks."""

from __future__ import annotations

import pytest

from adacc_hf.artifacts.size_model import MAX_EXACT_SIZE, SIZE_CLASS_RATIO, SizeModel


def texts(samples, *lengths):
    return tuple((f"text_{place}", (samples, length)) for place, length in enumerate(lengths))


def sizes_of(*measured):
    """Return the size model of batches whose bytes are proportional to their tokens."""
    return SizeModel([(shapes, (sum(b * s for _, (b, s) in shapes),)) for shapes in measured])


ONE_TEXT = sizes_of(texts(4, 40), texts(4, 20), texts(2, 10), texts(3, 30))
PAIRS = sizes_of(texts(4, 40, 30), texts(4, 20, 21), texts(2, 10, 11), texts(4, 20, 10), texts(3, 30, 31))


@pytest.mark.parametrize("samples", range(2, 9))
def test_few_samples_have_size_classes_of_their_own(samples):
    assert ONE_TEXT.size_class(texts(samples, 40)) == texts(samples, 40)


def test_one_sample_gets_the_memory_of_two():
    """A batch of one sample gets the memory of two: it often runs other operators, which may need more."""
    assert ONE_TEXT.size_class(texts(1, 40)) == texts(2, 40)
    assert PAIRS.size_class(texts(1, 40, 30)) == texts(2, 40, 30)
    alone = sizes_of(texts(1, 40), texts(1, 20), texts(1, 10))
    assert alone.size_class(texts(1, 40)) == texts(1, 40)


def test_lengths_have_few_size_classes_and_each_bounds_its_batches():
    lengths = range(MAX_EXACT_SIZE + 1, 1001)
    classes = [ONE_TEXT.size_class(texts(4, length))[0][1][1] for length in lengths]
    assert all(length <= bound < SIZE_CLASS_RATIO * length + 1 for length, bound in zip(lengths, classes, strict=True))
    assert 40 in classes  # the profiled one
    # Factors of 1.25: from 17 to 1000 there are log(1000 / 17) / log(1.25) = 18.3 steps.
    assert len(set(classes)) <= 20


def test_two_lengths_have_a_larger_uncertainty_than_one():
    assert ONE_TEXT.uncertainty == 0.01
    assert PAIRS.uncertainty == 0.04
