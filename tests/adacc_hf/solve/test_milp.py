"""Choices of the integer program."""

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import RETAIN, Choice
from adacc_hf.solve.milp import build_block_model


def test_what_stands_on_randomness_that_is_not_stored_is_never_replayed(tape_builder):
    tape = tape_builder()
    start = tape.value("input", 8)
    (noise,) = tape.operator("rand", [start], [("noise", 8)], ms=1.0, replayable=False)
    (a,) = tape.operator("f", [noise], [("a", 8)], ms=1.0, save=[-1])
    tape.operator("g", [a], [("b", 8)], ms=1.0, save=[-1])
    model = build_block_model(tape.kind(), AdaccConfig())
    # f reads the noise, which is never stored; g reads a, which can be stored.
    assert model.runnable == {2}
    assert model.recompute(a) is None


def test_without_recompute_nothing_is_replayed(gpt2_like_profile):
    kind = gpt2_like_profile().kinds[0]
    assert build_block_model(kind, AdaccConfig(actions=("retain", "compress"))).runnable == frozenset()


def test_codecs_that_save_nothing_are_no_choice(tape_builder, make_codec):
    tape = tape_builder()
    start = tape.value("input", 8)
    (a,) = tape.operator("f", [start], [("a", 8)], ms=1.0, save=[-1])
    tape.values[a]["codecs"] = (make_codec("int8", 8, 0.0, 0.0), make_codec("int4", 5, 0.1, 0.1))
    model = build_block_model(tape.kind(), AdaccConfig())
    assert [store.choice for store in model.menus[a]] == [RETAIN, Choice.compress(tape.values[a]["codecs"][1])]
