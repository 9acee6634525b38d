"""Watchers of a patch: one list per thread, and a patch that lasts as long as any of them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from adacc_hf.torch_glue.watchers import Watchers


class Patch:
    """A patch that counts how often it was applied and undone."""

    def __init__(self):
        self.num_applied = self.num_undone = 0

    def __call__(self):
        self.num_applied += 1
        return self.undo

    def undo(self):
        self.num_undone += 1

    @property
    def is_applied(self):
        return self.num_applied > self.num_undone


@pytest.fixture
def patch():
    return Patch()


@pytest.fixture
def watchers(patch):
    return Watchers(patch)


def test_the_innermost_watcher_is_the_current_one(watchers, patch):
    assert watchers.current() is None
    with watchers.watching("outer"):
        with watchers.watching("inner"):
            assert watchers.current() == "inner"
        assert watchers.current() == "outer"
        assert patch.is_applied
    assert watchers.current() is None
    assert (patch.num_applied, patch.num_undone) == (1, 1)


def test_a_thread_sees_its_own_watcher_and_the_last_one_undoes_the_patch(watchers, patch):
    begun, ended = Barrier(2, timeout=120), Barrier(2, timeout=120)

    def watch_in_thread():
        assert watchers.current() is None
        with watchers.watching("other"):
            begun.wait()
            current = watchers.current()
            ended.wait()
        return current

    with ThreadPoolExecutor(1) as pool:
        with watchers.watching("own"):
            other = pool.submit(watch_in_thread)
            begun.wait()
            assert watchers.current() == "own"
        assert patch.is_applied, "the other thread still watches"
        assert watchers.current() is None
        ended.wait()
        assert other.result(timeout=120) == "other"
    assert (patch.num_applied, patch.num_undone) == (1, 1)
