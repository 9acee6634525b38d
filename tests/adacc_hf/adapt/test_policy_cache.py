"""PolicyCache: assignment of batch sizes to policies, and the limit on remembered sizes in a long run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adacc_hf.adapt.policy_cache import ENOUGH_SEEN, FEW_PROFILES, MAX_UNPLANNED, PolicyCache
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


def test_a_size_that_fits_in_none_wants_a_profile_at_once_and_one_that_fits_only_while_profiles_are_few(profiled):
    profiled.around(ids(40))
    assert profiled.wants(ids(40))
    profiled.around(ids(14))
    assert profiled.wants(ids(14))
    profiled._profiles = [None] * FEW_PROFILES
    for _ in range(ENOUGH_SEEN - 1):
        profiled.around(ids(7))
    assert not profiled.wants(ids(7))
    profiled.around(ids(7))
    assert profiled.wants(ids(7))
    assert profiled.has_wanted
    profiled.refuse(ids(7))
    assert not profiled.wants(ids(7))


def test_sizes_that_never_come_again_are_not_remembered_for_ever(profiled):
    for length in range(5000):
        assert profiled.around(parts(1000 + length)) is None
    assert len(profiled.unplanned) == MAX_UNPLANNED


def test_a_batch_runs_under_the_smallest_policy_around_it_if_none_fits_its_class(profiled):
    for length in (36, 34):
        policy = size_policy(ids(length))
        policy.is_extrapolated = True
        profiled.add(policy)
    assert profiled.within_class(ids(40), ids(33)) is None
    profiled.note_above_budget(ids(40), "settings")
    around = {length: profiled.within_class(ids(40), ids(length)) for length in (33, 34, 35, 36, 37)}
    assert {length: policy and policy.shapes for length, policy in around.items()} == {
        33: ids(34),
        34: ids(34),
        35: ids(36),
        36: ids(36),
        37: None,
    }
    assert profiled.within_class(ids(35), ids(35)) is None, "a policy for larger sizes than the class may be slower"
    profiled.add(size_policy(ids(40)))
    assert profiled.within_class(ids(40), ids(33)).shapes == ids(40)


def test_untracked_plans_are_shared_within_a_class_while_their_settings_hold(profiled):
    profiled.add_untracked(ids(36), "plans of 36", "settings")
    assert profiled.untracked_plans(ids(40), ids(34), "settings") == "plans of 36"
    assert profiled.untracked_plans(ids(40), ids(37), "settings") is None
    assert profiled.untracked_plans(ids(35), ids(34), "settings") is None
    assert profiled.untracked_plans(ids(40), ids(34), "a smaller budget") is None
    profiled.add_untracked(ids(40), "plans of 40", "settings")
    assert profiled.untracked_plans(ids(40), ids(34), "settings") == "plans of 40"
    profiled.clear()
    assert profiled.untracked_plans(ids(40), ids(34), "settings") is None


def test_all_sizes_larger_than_one_above_the_budget_are_above_the_budget(profiled):
    profiled.note_above_budget(ids(32), "settings")
    larger = [ids(32), ids(40), ids(32, samples=3)]
    smaller = [ids(31), ids(40, samples=1)]
    assert [profiled.is_above_budget(sizes, "settings") for sizes in (*larger, *smaller)] == [True] * 3 + [False] * 2
    assert not profiled.is_above_budget(ids(40), "another budget")
