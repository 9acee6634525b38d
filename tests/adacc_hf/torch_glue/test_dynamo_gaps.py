"""Guards that Dynamo lacks: reads of classes, and patches of Dynamo that last as long as a trace."""

import gc

import pytest
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import dicts, user_defined

from adacc_hf.torch_glue.dynamo import ClassReads
from adacc_hf.torch_glue.dynamo_gaps import guard_identities, record_class_reads, record_dict_order


@pytest.fixture
def owner():
    """A class that no other test changes."""

    class Owner:
        factor = 3

        def method(self):
            return 1

        @property
        def size(self):
            return 2

        @staticmethod
        def static():
            return 3

        @classmethod
        def of(cls):
            return 4

    return Owner


def replace_class_method(owner):
    owner.of = classmethod(lambda cls: 5)


CHANGES = {
    "attribute": ("factor", lambda owner: setattr(owner, "factor", 4)),
    "removed attribute": ("factor", lambda owner: delattr(owner, "factor")),
    "method": ("method", lambda owner: setattr(owner, "method", lambda self: 5)),
    "property": ("size", lambda owner: setattr(owner, "size", property(lambda self: 5))),
    "static method": ("static", lambda owner: setattr(owner, "static", staticmethod(lambda: 5))),
    "class method": ("of", replace_class_method),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_was_read_is_noticed(owner, name):
    read, change = CHANGES[name]
    reads, others = ClassReads([(owner, read)]), ClassReads([(owner, n) for n, _ in CHANGES.values() if n != read])
    assert reads.are_current()
    change(owner)
    assert not reads.are_current()
    assert others.are_current(), "only what a trace has read is compared"


def test_a_class_that_is_gone_is_not_current(owner):
    class Short:
        factor = 1

    reads = ClassReads([(Short, "factor"), (owner, "factor")])
    assert reads.are_current()
    del Short
    gc.collect()
    assert not reads.are_current()


def patched_attributes():
    """Return the attributes of Dynamo that the contexts may replace."""
    owners = [symbolic_convert, user_defined.UserDefinedObjectVariable, user_defined.UserDefinedClassVariable]
    owners += [value for value in vars(dicts).values() if isinstance(value, type)]
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


@pytest.mark.parametrize(
    "context", [lambda: record_class_reads({}, []), lambda: guard_identities([]), lambda: record_dict_order([])]
)
def test_dynamo_is_as_before_after_an_error(context):
    before, inside = patched_attributes(), {}

    def fail():
        inside.update(patched_attributes())
        raise KeyError

    with pytest.raises(KeyError), context():
        fail()
    after = patched_attributes()
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert any(inside[name] is not before[name] for name in before), "the context replaces something"
