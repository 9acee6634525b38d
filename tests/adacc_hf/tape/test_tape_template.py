"""Templates of tapes: the numbers of a tape, and tapes filled with other numbers."""

from tape_builders import Block, record_of, sizes_of, text

from adacc_hf.tape.symbolic_tape import SymbolicTape
from adacc_hf.tape.tape import Source
from adacc_hf.tape.tape_template import TapeTemplate


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
        TapeTemplate(record_of(Block(forward), text(2, 5)).tape).digest()
        for forward in (
            lambda layer, hidden: layer(hidden).tanh(),
            lambda layer, hidden: layer(hidden).sigmoid(),
            lambda layer, hidden: layer(hidden).tanh() * 2.0,
            lambda layer, hidden: layer(hidden).tanh() * 3.0,
            lambda layer, hidden: layer(hidden).double().tanh(),
        )
    }
    assert len(digests) == 5
