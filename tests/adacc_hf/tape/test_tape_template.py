"""Templates of tapes: the numbers of a tape, and tapes filled with other numbers."""

from tape_builders import Block, record_of, sizes_of, text

from adacc_hf.tape.symbolic_tape import SymbolicTape
from adacc_hf.tape.tape_template import TapeNumbers, TapeTemplate


def test_what_is_the_same_at_all_sizes_is_shared():
    family = SymbolicTape.of([record_of(Block(), text(*size)) for size in ((2, 5), (3, 8), (4, 13))])
    one, other = (family.tape_at(sizes_of(text(3, tokens)), None) for tokens in (6, 7))
    assert family.tape_at(sizes_of(text(3, 6)), None) is one
    assert one.digest != other.digest
    assert one.recomputable is other.recomputable is family.base.recomputable
    assert one.consumers(0) is other.consumers(0)


def numbers_at(samples, tokens):
    return TapeNumbers(record_of(Block(), text(samples, tokens)).tape)


def test_tapes_of_two_sizes_differ_in_numbers_alone():
    one, other = numbers_at(2, 5), numbers_at(3, 8)
    assert one.digest_without_numbers == other.digest_without_numbers
    assert len(one.numbers) == len(other.numbers)
    assert one.numbers != other.numbers
    assert numbers_at(2, 5).numbers == one.numbers


def test_other_operators_and_constants_of_other_types_have_another_digest():
    digests = {
        TapeNumbers(record_of(Block(forward), text(2, 5)).tape).digest_without_numbers
        for forward in (
            lambda layer, hidden: layer(hidden).tanh(),
            lambda layer, hidden: layer(hidden).sigmoid(),
            lambda layer, hidden: layer(hidden).tanh() * 2.0,
            lambda layer, hidden: layer(hidden).tanh() * 3.0,
            lambda layer, hidden: layer(hidden).double().tanh(),
        )
    }
    assert len(digests) == 5


def test_a_template_that_is_filled_with_a_tapes_numbers_is_that_tape():
    """The places of a template are those of the numbers, in order."""
    base, other = (record_of(Block(), text(*size)).tape for size in ((2, 5), (3, 8)))
    numbers = TapeNumbers(other).numbers
    template = TapeTemplate(base, list(range(len(numbers))))
    filled = template.fill(base, numbers, "digest")
    assert filled.values == other.values
    assert filled.slots == other.slots
    assert [repr((op.args, op.kwargs)) for op in filled.operators] == [
        repr((op.args, op.kwargs)) for op in other.operators
    ]
    assert [op.signature() for op in filled.operators] == [op.signature() for op in other.operators]
    assert (filled.digest, filled.structure, filled.is_unchecked) == ("digest", other.structure, True)
