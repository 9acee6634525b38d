"""PolicyCache: assignment of batch sizes to policies, and the limit on remembered sizes in a long run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adacc_hf.adapt.policy_cache import ENOUGH_SEEN, MAX_UNPLANNED, PolicyCache, most_wanted
from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.torch_glue.batch_shapes import TensorShape


def ids(length, samples=2):
    return (TensorShape("input_ids", (samples, length)),)


def parts(count):
    """Return shapes with a name that depends on `count`: no two have a size class in common."""
    return (TensorShape(f"part_{count}", (2,)),)


def size_policy(shapes):
    """Return a policy whose profile has no size model."""
    return SizePolicy(shapes, SimpleNamespace(profile=SimpleNamespace(sizes=None)), "plans")


@pytest.fixture
def profiled():
    """Return the policies of a run whose first batch had 32 tokens."""
    size_policies = PolicyCache()
    size_policies.add(size_policy(ids(32)))
    return size_policies


def test_sizes_of_which_no_profile_tells_run_under_the_smallest_around(profiled):
    profiled.add(size_policy(ids(64)))
    assert profiled.class_of(ids(20)) is None
    assert [profiled.around(ids(length)).shapes for length in (20, 32, 33, 64)] == [ids(32), ids(32), ids(64), ids(64)]
    assert profiled.around(ids(65)) is None


def test_a_size_that_fits_in_none_wants_a_profile_at_once_unless_none_could_tell_of_all_sizes(profiled):
    profiled.around(ids(20))
    assert most_wanted([profiled.unplanned]) is None
    profiled.around(ids(40))
    assert most_wanted([profiled.unplanned]) == ids(40)
    profiled.can_run_on_parts = False
    profiled.around(ids(100))
    assert most_wanted([profiled.unplanned]) == ids(40)


def test_sizes_that_never_come_again_are_not_remembered_for_ever(profiled):
    profiled.can_run_on_parts = False
    for length in range(5000):
        assert profiled.around(parts(1000 + length)) is None
    assert len(profiled.unplanned) == MAX_UNPLANNED
    assert most_wanted([profiled.unplanned]) is None
    for length in range(ENOUGH_SEEN * 100):
        profiled.around(parts(length % 100))
    assert most_wanted([profiled.unplanned]) is not None
