"""The bars of memory add up to the simulated peaks, and their parts are those of the moment of the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.reports import memory_bars
from adacc_hf.reports.memory_bars import PeakMemory, draw_memory_bars, peak_memory
from adacc_hf.solve.simple_policies import random_policy, uniform_policy

GIB = 2**30


def parts_of(profile, policy) -> PeakMemory:
    plans = [policy.plan_of(block.name) for block in profile.blocks]
    return peak_memory(profile, plans, simulate(profile, plans))


def stored_bytes(profile, policy) -> list[int]:
    """Return the bytes that each block stores under `policy`."""
    return [run_block(profile.kind_of(block), policy.plan_of(block.name)).stored_bytes for block in profile.blocks]


@pytest.mark.parametrize("seed", range(8))
def test_parts_add_up_to_the_peak(gpt2_like_profile, seed) -> None:
    profile = gpt2_like_profile(num_blocks=4, attention="eager")
    policy = random_policy(profile, seed=seed, actions=("retain", "compress", "recompute"))
    bar = parts_of(profile, policy)
    assert bar.peak_bytes == policy.predicted_peak_bytes
    assert bar.static_bytes == profile.static_bytes
    assert 0 <= bar.stored_bytes <= sum(stored_bytes(profile, policy))
    assert bar.other_bytes >= 0


def test_a_peak_in_the_loss_holds_what_all_blocks_store(gpt2_like_profile) -> None:
    profile = replace(gpt2_like_profile(num_blocks=3), loss_peak_bytes=100 * GIB)
    policy = uniform_policy(profile, "retain")
    assert parts_of(profile, policy).stored_bytes == sum(stored_bytes(profile, policy))


def test_a_peak_in_a_block_holds_what_earlier_blocks_store(gpt2_like_profile) -> None:
    profile = gpt2_like_profile(num_blocks=3)
    second = replace(profile.blocks[1], backward_base_bytes=100 * GIB)
    profile = replace(profile, blocks=(profile.blocks[0], second, profile.blocks[2]))
    policy = uniform_policy(profile, "retain")
    assert parts_of(profile, policy).stored_bytes == stored_bytes(profile, policy)[0]


def test_a_peak_in_the_optimizer_holds_nothing_for_backward(gpt2_like_profile) -> None:
    profile = replace(gpt2_like_profile(num_blocks=3), optimizer_peak_bytes=100 * GIB)
    bar = parts_of(profile, uniform_policy(profile, "retain"))
    assert (bar.stored_bytes, bar.peak_bytes) == (0, 100 * GIB)


@pytest.mark.parametrize(
    ("available_bytes", "lines"),
    [(4 * GIB, ["budget, 2.00 GiB", "available on the device, 4.00 GiB"]), (999 * GIB, ["budget, 2.00 GiB"])],
    ids=["small-device", "large-device"],
)
def test_a_large_device_does_not_shorten_the_bars(monkeypatch, available_bytes, lines) -> None:
    figures = []
    monkeypatch.setattr(memory_bars, "to_png", lambda figure: figures.append(figure) or b"")
    bar = PeakMemory(static_bytes=GIB, stored_bytes=2 * GIB, other_bytes=GIB // 16)
    draw_memory_bars({"plain": bar, "this policy": bar}, available_bytes, 2 * GIB)
    (axis,) = figures[0].axes
    figures[0].draw_without_rendering()
    assert [line.get_label() for line in axis.lines] == lines
    assert [label.get_text() for label in axis.get_yticklabels()] == ["plain, 3.06 GiB", "this policy, 3.06 GiB"]
    sizes = [text.get_text() for text in axis.texts]
    assert sizes == ["1.00 GiB", "1.00 GiB", "2.00 GiB", "2.00 GiB", "", ""], "a narrow part has no text"
