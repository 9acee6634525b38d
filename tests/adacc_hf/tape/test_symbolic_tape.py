"""Symbolic tapes: which calls share one, and that its tape at any size equals a recorded one."""

import pytest
import torch
from tape_builders import Block, key_of, record_block, record_of, sizes_of, text
from torch import nn

from adacc_hf.tape.symbolic_tape import (
    AGREED,
    ENOUGH_RECORDS,
    MOST_RECORDS,
    SizeClassRecords,
    SymbolicTape,
    describe_numbers,
)
from adacc_hf.tape.tape import Source
from adacc_hf.tape.tape_cache import TapeCache

# Size classes, which differ without any polynomial


def test_sizes_of_zero_and_one_are_told_from_others():
    outlines = [sizes_of(text(samples, 5)).size_class for samples in (0, 1, 2, 3, 40)]
    assert len(set(outlines)) == 3
    assert len(set(outlines[2:])) == 1


def test_sizes_that_are_aligned_are_told_from_others_where_kernels_do():
    outlines = [sizes_of(text(2, tokens), alignment=16).size_class for tokens in (16, 32, 160, 17, 40)]
    assert len(set(outlines[:3])) == len(set(outlines[3:])) == 1
    assert outlines[0] != outlines[3]
    assert sizes_of(text(2, 16)).size_class == sizes_of(text(2, 17)).size_class
    # Masks end in a number of tokens: records of few samples also serve a batch of 32.
    assert sizes_of(text(32, 16), alignment=16).size_class == outlines[0]


def test_numbers_among_arguments_are_sizes_too():
    """Numbers among the arguments are sizes if the block reads them, as Swin's image height and width."""

    def forward(layer, hidden, grid, name, unread=0):
        hidden = layer(hidden).unflatten(1, grid)
        return hidden.tanh() if name == "same" else hidden

    block = Block(forward)
    few, many = (sizes_of(text(2, n), grid, "same", block=block) for n, grid in ((6, (2, 3)), (36, (4, 9))))
    assert few.size_class == many.size_class
    assert few.dimensions == (2, 6, 8, 2, 3)
    assert many.dimensions == (2, 36, 8, 4, 9)
    assert sizes_of(text(2, 6), (2, 3), "same", 7, block=block).dimensions == few.dimensions
    others = [((1, 6), "same"), ((2, 3), "other"), ((2, 3), True)]
    assert few.size_class not in [sizes_of(text(2, 6), *args, block=block).size_class for args in others]


def test_a_call_of_another_layout_is_of_no_family():
    family = SymbolicTape.of([record_of(Block(), text(*size)) for size in ((2, 5), (3, 8), (4, 13))])
    assert family.tape_at(sizes_of(text(3, 7)), None) is not None
    assert family.tape_at(sizes_of(torch.ones(3, 7, 9, requires_grad=True)[..., 1:]), None) is None
    assert family.tape_at(sizes_of(text(7, 3).transpose(0, 1)), None) is None


# Sizes that a symbolic tape serves


@pytest.fixture
def library():
    return TapeCache()


def family_of(library, tokens, samples=3, block=None):
    """Return the symbolic tape that serves a call of these sizes, or None."""
    served_tape = library.symbolic_tape_at(key_of(block or Block(), text(samples, tokens)), "block")
    return None if served_tape is None else served_tape[0]


def served(library, tokens, samples=3, block=None):
    return family_of(library, tokens, samples, block) is not None


def test_all_sizes_of_a_program_are_served(library):
    """All sizes of a traced path are served, also beyond the recorded ones. A size of 1 has another path."""
    block = Block()
    for samples, tokens in ((2, 8), (4, 20)):
        record_block(block, text(samples, tokens), library=library)
        assert not served(library, 10)
    record_block(block, text(4, 13), library=library)
    sizes = [(tokens, samples) for tokens in (2, 7, 8, 9, 20, 21, 500) for samples in (2, 3, 5)]
    assert {family_of(library, *size) for size in sizes} == {family_of(library, 8, 2)} != {None}
    assert not served(library, 10, samples=1)
    assert not served(library, 1)


def test_beyond_the_sizes_that_were_seen_each_block_is_checked(library):
    """Beyond the recorded range each block is checked; within the range one block is, until enough sizes agreed."""
    for samples, tokens in ((2, 8), (4, 20), (4, 13)):
        record_block(Block(), text(samples, tokens), library=library)
    family = family_of(library, 10)

    def is_checked(tokens, samples=3):
        return not family.tape_at(sizes_of(text(samples, tokens)), None).is_unchecked

    assert not any(map(is_checked, (9, 10, 30)))
    family.num_new = AGREED + 1
    checked = [is_checked(*size) for size in ((11, 3), (12, 4), (7, 3), (21, 3), (12, 5), (14, 2))]
    assert checked == [True, True, False, False, False, True]
    library.extend(family, key_of(Block(), text(5, 30)))
    family.tapes_by_size.clear()
    checked = [is_checked(*size) for size in ((7, 3), (21, 3), (12, 5), (30, 5), (31, 5), (30, 6))]
    assert checked == [False, True, True, True, False, False]
    family.tapes_by_size.clear()
    family.num_new = 31  # the 32nd
    assert not is_checked(11)
    assert is_checked(12)


def branching(layer, hidden):
    """Run other operators from 16 tokens on."""
    return layer(hidden).tanh() if hidden.shape[1] < 16 else layer(hidden).exp().tanh()


def test_sizes_with_other_operators_are_another_family(library):
    """Sizes with other operators have another symbolic tape. Guards mark the boundary."""
    block = Block(branching)
    for tokens in (4, 9, 14, 20, 31, 40):
        record_block(block, text(3, tokens), library=library)
    below, above = family_of(library, 10, block=block), family_of(library, 35, block=block)
    assert None is not below is not above is not None
    assert {family_of(library, tokens, block=block) for tokens in (3, 5, 15)} == {below}
    assert {family_of(library, tokens, block=block) for tokens in (16, 17, 100)} == {above}


@torch.compiler.disable
def rounded_up(hidden):
    return nn.functional.pad(hidden, (0, 0, 0, -hidden.shape[1] % 16))


@torch.compiler.disable
def even_or_odd(hidden):
    return hidden.tanh() if hidden.shape[1] % 2 else hidden.exp()


def test_where_other_operators_run_unseen_each_size_is_recorded(library):
    block = Block(lambda layer, hidden: even_or_odd(layer(hidden)))
    for tokens in (4, 10, 20):
        record_block(block, text(3, tokens), library=library)
    assert served(library, 6, block=block)
    for tokens in (5, 11, 21):
        record_block(block, text(3, tokens), library=library)
        assert not any(served(library, n, block=block) for n in range(3, 30))


def test_records_of_other_operators_are_not_fitted_together():
    """Records of a profile are merged without a comparison with the symbolic tape (`TapeCache.take`)."""
    block = Block(lambda layer, hidden: even_or_odd(layer(hidden)))
    class_records = SizeClassRecords(SymbolicTape.of)
    for tokens in (4, 10, 20):
        class_records.add(record_of(block, text(3, tokens)))
    assert class_records.symbolic_tape is not None
    class_records.add(record_of(block, text(3, 5)))
    assert class_records.has_failed
    assert class_records.symbolic_tape is None


def rounding(layer, hidden):
    return layer(rounded_up(hidden)).tanh()


def test_numbers_that_follow_no_rule_are_given_up(library):
    lengths = (3, 18, 30, 35, 49, 60, 66, 90)
    assert len(lengths) == MOST_RECORDS
    block = Block(rounding)
    for tokens in lengths:
        record_block(block, text(3, tokens), library=library)
        assert not served(library, 20, block=block)
    (class_records,) = library.records["block"].values()
    assert class_records.has_failed
    assert class_records.records == []
    for tokens in (16, 32, 48, 64):  # these lengths follow one polynomial
        record_block(block, text(3, tokens), library=library)
    assert not served(library, 40, block=block)


def test_blocks_that_are_not_trusted_are_not_recorded_at_each_size(library):
    """Untrusted blocks, whose operators depend on a number read from data, are not recorded at each size."""
    reads = [True]

    @torch.compiler.disable
    def read(hidden):
        return hidden.detach().tanh().sum().item() if reads else 1.0

    block = Block(lambda layer, hidden: layer(hidden) * read(hidden))
    for number, tokens in enumerate((4, 9, 14)):
        key = key_of(block, text(3, tokens))
        assert (library.untrusted_at(key, "block") is None) == (number < ENOUGH_RECORDS - 1)
        record_block(block, text(3, tokens), library=library)
    reads.clear()
    record_block(block, text(3, 5), library=library)  # now recorded once
    assert library.untrusted_at(key, "block") is None


# Sizes that are equal by chance


class Pair(nn.Module):
    """A block that reads two texts, as a decoder's block does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden, other):
        return hidden + (self.layer(hidden) @ other.transpose(1, 2)).softmax(-1) @ other


def given_pair(block, samples, tokens, others):
    args = text(samples, tokens), text(samples, others)
    return key_of(block, *args)


def test_sizes_that_were_equal_by_chance_come_apart(library):
    block = Pair()
    for samples, tokens in ((2, 8), (4, 20), (4, 13)):
        record_block(block, text(samples, tokens), text(samples, tokens), library=library)
    family, sizes = library.symbolic_tape_at(given_pair(block, 3, 10, 10), "block")
    assert library.tape_of(family, sizes) is not None
    family, sizes = library.symbolic_tape_at(given_pair(block, 3, 10, 15), "block")
    assert library.tape_of(family, sizes) is None
    for tokens, others in ((10, 15), (19, 9)):
        record_block(block, text(3, tokens), text(3, others), library=library)
        assert not family.is_active  # the distinct lengths are fitted again
    for tokens, others in ((17, 8), (9, 20), (12, 12)):
        family, sizes = library.symbolic_tape_at(given_pair(block, 3, tokens, others), "block")
        _, tape = record_block(block, text(3, tokens), text(3, others))
        assert describe_numbers(library.tape_of(family, sizes)) == describe_numbers(tape)


# Results that show later


@pytest.fixture
def family(library):
    for samples, tokens in ((2, 8), (4, 20), (4, 13)):
        record_block(Block(), text(samples, tokens), library=library)
    served_tape, _ = library.symbolic_tape_at(key_of(Block(), text(3, 10)), "block")
    return served_tape


def test_what_is_distrusted_is_recorded_at_each_size(library, family, caplog):
    assert served(library, 10)
    for samples, tokens in ((2, 8), (4, 20), (4, 13)):
        record_block(Block(), text(samples, tokens), library=library, name="another")
    library.distrust(family, "block")
    assert "block block runs other operators at some sizes" in caplog.records[0].message
    assert not served(library, 10)
    assert not family.is_active
    for outlines in library.records.values():
        for class_records in outlines.values():
            assert class_records.active_symbolic_tape() is None
    for tokens in (9, 11, 12):
        record_block(Block(), text(3, tokens), library=library)
    assert not served(library, 10)


def test_a_replay_that_failed_at_one_recorded_size_is_done_at_none():
    records = [record_of(Block(), text(*size)) for size in ((2, 5), (3, 8), (4, 13))]
    exp = next(value.index for value in records[0].tape.values if value.name == "block:exp")
    records[1].tape.recomputable -= {exp}
    assert exp not in SymbolicTape.of(records).base.recomputable


# Tapes with other numbers


def test_what_is_the_same_at_all_sizes_is_shared():
    records = [record_of(Block(), text(*size)) for size in ((2, 5), (3, 8), (4, 13))]
    records[0].tape.sharing = ((0, Source("parameter", ("layer.bias",)), ((8,), (1,), 0)),)
    family = SymbolicTape.of(records)
    one, other = (family.tape_at(sizes_of(text(3, tokens)), None) for tokens in (6, 7))
    assert family.tape_at(sizes_of(text(3, 6)), None) is one
    assert one.digest != other.digest
    assert one.recomputable is other.recomputable is family.base.recomputable
    assert one.consumers(0) is other.consumers(0)
    assert one.sharing is other.sharing is records[0].tape.sharing


def test_other_operators_and_constants_of_other_types_have_another_digest():
    digests = {
        describe_numbers(record_of(Block(forward), text(2, 5)).tape)[0]
        for forward in (
            lambda layer, hidden: layer(hidden).tanh(),
            lambda layer, hidden: layer(hidden).sigmoid(),
            lambda layer, hidden: layer(hidden).tanh() * 2.0,
            lambda layer, hidden: layer(hidden).tanh() * 3.0,
            lambda layer, hidden: layer(hidden).double().tanh(),
        )
    }
    assert len(digests) == 5
