"""Bytes of a block beside Megatron's formula: equal where the same tensors are kept, to what the formula leaves out."""

import json

import pytest

from adacc_hf.eval.block_bytes import UNEXPLAINED, VARIANTS, Shape, main, stored
from adacc_hf.eval.records.schemas import check_record

SHAPE = Shape(s=128, b=2, h=256, a=4)
STATISTICS = 16 * SHAPE.s * SHAPE.b
"""Mean and deviation of two norms for each token, in float32."""
SUMS = 4 * SHAPE.a * SHAPE.s * SHAPE.b + 24
"""Of fused attention: a logarithm for each row of scores, in float32, and three numbers of the random generator."""
WEIGHTS = 2 * 12 * SHAPE.h**2
"""Autocast's casts of a block's weights to 16 bits."""


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("formula", STATISTICS),
        ("gelu_new", STATISTICS + 24 * SHAPE.sbh),  # three more tensors of 4 h
        ("fused", STATISTICS + SUMS),
        ("recomputed", 0),
        ("no dropout", STATISTICS + SUMS),
        # Inputs of both norms in float32, and what they make cast for the layer that reads it.
        ("autocast", STATISTICS + SUMS + 4 * SHAPE.sbh + WEIGHTS),
    ],
)
def test_more_than_the_formula_is_what_it_leaves_out(name, more):
    found = stored(name, SHAPE)
    assert found["formula_bytes"] == VARIANTS[name].sbh * SHAPE.sbh + VARIANTS[name].as2b * SHAPE.as2b
    assert found["stored_bytes"] - found["formula_bytes"] == more
    assert sum(tensor["nbytes"] for tensor in found["tensors"]) == found["stored_bytes"]


def test_every_tensor_is_explained(tmp_path, capsys):
    output = tmp_path / "block_bytes.json"
    assert main(["--output", str(output)], lambda name: stored(name, SHAPE)) == 0
    text = capsys.readouterr().out
    check_record(json.loads(output.read_text()))
    assert UNEXPLAINED not in text
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {VARIANTS['formula'].title} ")]
    assert "34sbh + 5as^2b" in line
