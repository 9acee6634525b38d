"""Guards that Dynamo lacks: reads of classes, and patches of Dynamo that last as long as a trace."""

import gc

import pytest
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import dicts, user_defined

from adacc_hf.torch_glue.dynamo import ClassReads
from adacc_hf.torch_glue.dynamo_gaps import class_read_patches, dict_order_patches, identity_patches
from adacc_hf.torch_glue.watchers import patched


def test_a_class_that_is_gone_is_not_current():
    class Short:
        factor = 1

    reads = ClassReads([(Short, "factor")])
    assert reads.are_current()
    del Short
    gc.collect()
    assert not reads.are_current()


def patched_attributes():
    """Return the attributes of Dynamo that the contexts may replace."""
    owners = [symbolic_convert, user_defined.UserDefinedObjectVariable, user_defined.UserDefinedClassVariable]
    owners += [value for value in vars(dicts).values() if isinstance(value, type)]
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


@pytest.mark.parametrize("patches", [lambda: class_read_patches({}, []), lambda: dict_order_patches([])])
def test_dynamo_is_as_before_after_an_error(patches):
    before, inside = patched_attributes(), {}

    def fail():
        inside.update(patched_attributes())
        raise KeyError

    with pytest.raises(KeyError), patched([*identity_patches([]), *patches()]):
        fail()
    after = patched_attributes()
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert any(inside[name] is not before[name] for name in before), "the patches replace something"
