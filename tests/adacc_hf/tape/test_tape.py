"""The tape as a record: digests, references, and each value's storage."""

import pytest
import torch
from torch import nn

from adacc_hf.tape.recorder import Recorder
from adacc_hf.tape.tape import TapeValue, TensorRef


def record(module, *args, forward=None):
    recorder = Recorder(module, args, {})
    with torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda slot: None), recorder:
        (forward or module)(*args)
    return recorder.tape()


def value(size, stride, offset=0, dtype=torch.float32, nbytes=96, overwritten=False):
    ref = TensorRef(0, (size, stride, offset), dtype)
    return TapeValue(0, nbytes, ref, torch.device("cpu"), None, overwritten=overwritten)


@pytest.mark.parametrize(
    ("record", "encodable"),
    [
        pytest.param(value((4, 6), (6, 1)), True, id="contiguous"),
        pytest.param(value((6, 4), (1, 6)), True, id="transposed"),
        pytest.param(value((4, 1, 6), (6, 999, 1)), True, id="a stride of a dimension of one says nothing"),
        pytest.param(value((4, 5), (6, 1)), False, id="columns missing"),
        pytest.param(value((3, 6), (6, 1)), False, id="rows missing"),
        pytest.param(value((3, 6), (6, 1), offset=6), False, id="starts later"),
        pytest.param(value((4, 6), (0, 1)), False, id="expanded"),
        pytest.param(value((4, 6), (6, 1), nbytes=48, dtype=torch.bfloat16), True, id="two bytes each"),
        pytest.param(value((), (), nbytes=4), True, id="scalar"),
        pytest.param(value((4, 6), (6, 1), overwritten=True), False, id="overwritten"),
    ],
)
def test_what_can_be_encoded_whole(record, encodable):
    assert record.is_encodable is encodable


def test_equal_blocks_have_equal_digests():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    one, two = record(first, x), record(second, torch.randn(2, 4, requires_grad=True))
    assert one.digest == two.digest
    assert one.kind == two.kind


@pytest.mark.parametrize(
    ("forward", "same_structure"),
    [
        pytest.param(lambda m, x: m(x * 3.0), True, id="another constant"),
        pytest.param(lambda m, x: m(x[:1] * 2.0), True, id="another shape"),
        pytest.param(lambda m, x: m(x + 2.0), False, id="another operator"),
        pytest.param(lambda m, x: m(x * 2.0).tanh(), False, id="one more operator"),
        pytest.param(lambda m, x: m(m(x * 2.0)), False, id="wired otherwise"),
    ],
)
def test_what_digests_tell_apart(forward, same_structure):
    """The structure ignores sizes and constants, the digest includes them."""
    module, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    base = record(module, x, forward=lambda x: module(x * 2.0))
    other = record(module, x, forward=lambda x: forward(module, x))
    assert (base.structure == other.structure) is same_structure
    assert base.digest != other.digest
    assert base.identity == other.identity


def test_of_other_operators_those_that_run_in_both_calls_are_found():
    module, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    base = record(module, x, forward=lambda x: module(module(x).tanh()).exp())
    other = record(module, x, forward=lambda x: module(module(x).sin().neg()).exp())
    same, is_whole = base.values_in(other)
    assert not is_whole
    names = {base.values[value].name: other.values[counterpart].name for value, counterpart in same.items()}
    # The next operator reads "block:tanh" here and "block:neg" there, which are different values.
    assert names == {name: name for name in names}
    assert names.keys() == {value.name for value in base.values} - {"block:tanh"}
    shorter = record(module, x, forward=lambda x: module(module(x)).exp())
    same, is_whole = base.values_in(shorter)
    assert not is_whole
    assert len(set(same.values())) == len(same)  # no two values match one, though two operators read it
    assert all(base.values[value].name == shorter.values[counterpart].name for value, counterpart in same.items())


def test_the_kind_names_structure_sizes_identity_and_call():
    module = nn.Linear(4, 4)
    base = record(module, torch.randn(2, 4, requires_grad=True)).kind.split("-")
    longer = record(module, torch.randn(3, 4, requires_grad=True)).kind.split("-")
    wider = record(nn.Linear(4, 5), torch.randn(2, 4, requires_grad=True)).kind.split("-")
    assert [a == b for a, b in zip(base, longer, strict=True)] == [True, False, True, False]
    assert [a == b for a, b in zip(base, wider, strict=True)] == [False, False, False, True]
