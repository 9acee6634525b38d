"""A kind of blocks that the tests of the memory simulator calculate by hand."""

import pytest


@pytest.fixture
def kind(tape_builder, make_codec):
    """input(100) -> a(10), copy(3) -> b(20) -> c(40); a, b and c are saved, each by its own operator."""
    tape = tape_builder()
    start = tape.value("input", 100)
    a, _ = tape.operator("f", [start], [("a", 10), ("copy", 3)], ms=1.0, save=[-2])
    (b,) = tape.operator("g", [a], [("b", 20)], ms=2.0, save=[-1])
    tape.operator("h", [b], [("c", 40)], ms=4.0, save=[-1])
    tape.values[b]["codecs"] = (make_codec("int4", 5, 0.25, 0.5),)
    return tape.kind()
