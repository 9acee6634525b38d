"""Memory probes: the tensors that watching strategies return in place of saved ones."""

import weakref

import torch

from adacc_hf.price.memory_probes import TrackedTensor


def test_a_tracked_tensor_dies_before_it_says_so():
    marks = []

    def mark(label):
        marks.append((label, tracked_storage() is None))

    tensor = torch.zeros(3)
    tracked_storage = weakref.ref(tensor)
    tracked = TrackedTensor(4, tensor, None, mark)
    del tensor
    assert tracked.tensor is not None
    del tracked
    assert marks == [(("release", 4), True)]
