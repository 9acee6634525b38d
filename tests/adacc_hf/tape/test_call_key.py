"""What is known of a block's calls, by shape and by the data that they read."""

from types import SimpleNamespace

import torch
from torch import nn

from adacc_hf.tape.call_inputs import data_of
from adacc_hf.tape.call_key import MAX_SHAPES, KnownShape, KnownShapes

BLOCK = nn.Linear(2, 2)


def key_of(known, *args, **kwargs):
    return known.key(BLOCK, args, kwargs)


def shape(**reads):
    return KnownShape(SimpleNamespace(reads={(name,): data_of(tensor) for name, tensor in reads.items()}))


def test_data_that_nothing_reads_tells_no_calls_apart():
    known = KnownShapes()
    assert key_of(known, torch.tensor([1, 2])) == key_of(known, torch.tensor([2, 1]))
    assert key_of(known, torch.tensor([1, 2])) != key_of(known, torch.tensor([1, 2, 3]))


def test_data_that_a_tape_reads_does():
    known, one, other = KnownShapes(), torch.tensor([1, 2]), torch.tensor([2, 1])
    key = known.add(key_of(known, a=one, b=other), shape(a=one))
    assert key == key_of(known, a=one.clone(), b=one + 5)
    assert key != key_of(known, a=other, b=one)
    assert list(known) == [key]


def test_what_is_known_is_forgotten_when_more_is_read():
    """Its key lacks data that may matter at that shape too."""
    known, one, other = KnownShapes(), torch.tensor([1, 2]), torch.tensor([3])
    known.add(key_of(known, a=one, b=one), shape(a=one))
    key = known.add(key_of(known, a=one, b=other), shape(a=one, b=other))
    assert list(known) == [key]
    assert key == key_of(known, a=one, b=other)
    assert key_of(known, a=one) != key


def test_what_a_block_is_made_of_tells_calls_apart():
    """The same at other blocks that are made alike; hooks of one function are alike."""

    def made(*layers):
        return nn.Sequential(nn.Linear(2, 2), *layers)

    def key_of_call(known, block):
        return known.key(block, (torch.ones(2),), {})

    known, block = KnownShapes(), made(nn.Tanh())
    before = key_of_call(known, block)
    block[1] = nn.GELU()
    other = key_of_call(known, block)
    hook = block[0].register_forward_hook(lambda *_: None)
    hooked = key_of_call(known, block)
    block.append(nn.Dropout())
    assert len({before, other, hooked, key_of_call(known, block)}) == 4
    del block[2]
    hook.remove()
    assert key_of_call(known, block) == other
    block[1] = nn.Tanh()
    assert key_of_call(known, block) == before
    assert key_of_call(KnownShapes(), made(nn.Tanh())).given_to(block) == before.given_to(block)


def test_new_data_at_a_known_shape_is_unseen_once():
    known, one, other = KnownShapes(), torch.tensor([1, 2]), torch.tensor([2, 1])
    first = known.add(key_of(known, a=one), shape(a=one))
    unseen, new_shape = key_of(known, a=other), key_of(known, a=torch.tensor([1]))
    assert [known.is_unseen(key) for key in (first, new_shape, unseen, unseen)] == [False, False, True, False]


def test_unseen_data_is_not_remembered_for_ever():
    known, one = KnownShapes(), torch.tensor([0])
    known.add(key_of(known, a=one), shape(a=one))
    keys = [key_of(known, a=torch.tensor([number])) for number in range(1, MAX_SHAPES + 2)]
    assert all(known.is_unseen(key) for key in keys)
    assert known.is_unseen(keys[0])
    assert not known.is_unseen(keys[-1])
