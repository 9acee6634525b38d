"""Prices of a tape: times and temporaries of operators."""

import pytest
import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.price import measurement
from adacc_hf.price.timing import Timing

CONFIG = AdaccConfig(min_compress_bytes=0)


def test_temporaries_of_operators_are_counted(tiny_gpt2, token_batch):
    """Temporaries of operators are counted: a safe softmax's mask of rows of -inf, and Python numbers as tensors."""
    kind = profile_model(tiny_gpt2(), token_batch(), CONFIG).kinds[0]
    besides = {}
    for operator in kind.operators:
        besides.setdefault(operator.name, set()).add(operator.extra_bytes)
    (softmax,) = (operator for operator in kind.operators if operator.name == "aten._safe_softmax.default")
    (result,) = (kind.values[value] for value in softmax.outputs)
    assert softmax.extra_bytes > result.nbytes // torch.float32.itemsize  # a boolean for each element, and more
    assert max(besides["aten.mul.Tensor"]) == 12  # 8 bytes in double precision, and 4 in the other factor's
    assert besides["aten.native_layer_norm.default"] == besides["aten.bmm.default"] == {0}


@pytest.mark.parametrize(("timing", "scarce_ms"), [(Timing(2.0, 1.0), 2.0), (Timing(2.0, 4.0), 4.0)])
def test_prices_are_in_the_time_that_is_scarce(monkeypatch, tiny_gpt2, token_batch, timing, scarce_ms):
    for module in ("measurement", "codec_selection"):
        monkeypatch.setattr(f"adacc_hf.price.{module}.time_of", lambda run, device: timing)
    (kind,) = profile_model(tiny_gpt2("sdpa"), token_batch(), CONFIG).kinds
    assert {operator.ms for operator in kind.operators} == {0.0, scarce_ms}  # 0: operators that never run again
    options = [option for value in kind.activations for option in value.codecs]
    assert {option.encode_ms for option in options} == {option.decode_ms for option in options} == {scarce_ms}


def test_operators_on_results_that_the_recorder_has_freed_are_timed(toy_model, toy_batch, monkeypatch):
    monkeypatch.setattr(measurement, "time_of", lambda run, device: run() or Timing(1.0, 1.0))

    def forward(block, hidden):
        return hidden + block.down(((block.up(hidden) + 1 + 2 + 3).tanh() + 4 + 5).sigmoid())

    (kind,) = profile_model(toy_model(forward), toy_batch(), CONFIG).kinds
    assert [operator.ms for operator in kind.operators] == [1.0] * len(kind.operators)
