"""Data that a block reads into Python: detected reads, reads that matter for a tape, and calls that differ in data."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.tape.data_reads import MAX_READ_BYTES, MOST_NUMBERS, data_of, deciding_tensors, watched_reads

CONFIG = AdaccConfig(min_compress_bytes=0)
aten = torch.ops.aten


@pytest.fixture
def tape_of(record_call):
    """`tape_of(forward, *args)`: the tape of `forward(block, *args)`."""
    return lambda forward, *args: record_call(forward, torch.nn.Linear(4, 4), *args)[0]


def x():
    return torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda t: t.tolist(), id="tolist"),
        pytest.param(lambda t: t.cpu().numpy(), id="numpy"),
        pytest.param(np.asarray, id="asarray"),
        pytest.param(lambda t: torch.split(torch.zeros(6), t.tolist()), id="split"),
    ],
)
def test_what_runs_no_operator_is_seen_too(read):
    """Reads without an operator, as for lists and arrays, are detected too. A dispatch mode would miss them."""
    reads = []
    with watched_reads(lambda tensor, by: reads.append(by)):
        read(torch.tensor([2, 4]))
    assert len(reads) == 1
    assert not {"tolist", "numpy"} & torch.Tensor.__dict__.keys()


def test_threads_that_watch_at_once_see_their_own_reads():
    """Two threads that watch at the same time see their own reads. The first watch ends first, during the second."""
    reads, turns = {"first": [], "second": []}, Barrier(2, timeout=120)

    def watch(name, ends_first):
        if not ends_first:
            turns.wait()  # until the first one watches
        with watched_reads(lambda tensor, by: reads[name].append(tensor.item())):
            if ends_first:
                turns.wait()
            turns.wait()
            torch.tensor([len(name)]).tolist()
            turns.wait()
            if not ends_first:
                turns.wait()  # until the first one has stopped
                torch.tensor([0]).tolist()
        if ends_first:
            turns.wait()

    with ThreadPoolExecutor(2) as threads:
        for thread in [threads.submit(watch, "first", True), threads.submit(watch, "second", False)]:
            thread.result()
    assert reads == {"first": [5], "second": [6, 0]}
    assert not {"tolist", "numpy"} & torch.Tensor.__dict__.keys()


@pytest.mark.parametrize(
    ("func", "args", "deciding"),
    [
        (aten.add.Tensor, (torch.ones(2), torch.ones(2)), []),
        (aten.index.Tensor, (torch.ones(3), [torch.tensor([0, 2])]), []),
        (aten.index.Tensor, (torch.ones(3), [torch.tensor([True, False, True])]), [1]),
        (aten.masked_select.default, (torch.ones(3), torch.tensor([True, False, True])), [1]),
        (aten.nonzero.default, (torch.ones(3),), [0]),
    ],
)
def test_what_decides_a_size(func, args, deciding):
    flat = [args[0], *(args[1] if len(args) > 1 and isinstance(args[1], list) else args[1:])]
    tensors = deciding_tensors(func, args)
    assert [id(tensor) for tensor in tensors] == [id(flat[place]) for place in deciding]


def split_at(block, hidden, lengths):
    parts = [block(part).tanh() for part in hidden.split(lengths.tolist(), dim=1)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    ("forward", "argument"),
    [
        pytest.param(split_at, torch.tensor([2, 4]), id="lengths"),
        pytest.param(
            lambda block, hidden, ends: split_at(block, hidden, ends[1:] - ends[:-1]),
            torch.tensor([0, 2, 6]),
            id="ends",
        ),
        pytest.param(lambda block, hidden, mask: hidden[mask], torch.ones(2, 6, dtype=torch.bool), id="mask"),
        pytest.param(lambda block, hidden, n: hidden * n.max().item(), torch.tensor([3]), id="item"),
    ],
)
def test_what_follows_from_small_whole_arguments_is_known(tape_of, forward, argument):
    tape = tape_of(forward, x(), argument)
    assert tape.untrusted is None
    assert tape.reads == {(1,): data_of(argument)}


def test_numbers_that_the_block_makes_of_numbers_are_no_data(tape_of):
    """Numbers computed from Python numbers are no data, such as DeBERTa's root of a width or Gemma 3n's quantile."""
    tape = tape_of(lambda block, hidden: hidden * torch.tensor(6.0).sqrt().item() + torch.tensor([2.0]), x())
    assert tape.untrusted is None
    assert tape.reads == {}
    assert not [value for value in tape.values if value.source is not None and value.source.place == "unknown"]


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda block, hidden, ints: hidden.detach().tolist(), id="hidden"),
        pytest.param(lambda block, hidden, ints: (hidden.argmax(-1) + ints[0]).tolist(), id="routing"),
        pytest.param(lambda block, hidden, ints: block.weight.detach().tolist(), id="parameter"),
        pytest.param(lambda block, hidden, ints: torch.rand(2).tolist(), id="random"),
        pytest.param(lambda block, hidden, ints: ints.add_(1).tolist(), id="changed"),
    ],
)
def test_what_follows_from_anything_else_is_no_ground(tape_of, forward):
    tape = tape_of(forward, x(), torch.tensor([2, 4]))
    assert "Tensor.tolist reads data into Python" in tape.untrusted
    assert tape.reads == {}


def test_large_arguments_are_no_ground():
    just, above = (torch.zeros(MAX_READ_BYTES + more, dtype=torch.uint8) for more in (0, 1))
    assert data_of(just) == bytes(MAX_READ_BYTES)
    assert data_of(above) is None
    assert data_of(torch.zeros(2)) is data_of(None) is None


def test_data_is_what_an_argument_views():
    """Only the part of the storage that the argument views is data. The rest may be uninitialized, as for `unique`."""
    rows = torch.tensor([[1, 2], [3, 4]])
    assert data_of(rows[:, 0]) == (1, 3)
    assert data_of(rows[0] > 1) == bytes([False, True])


def test_few_whole_numbers_are_told_one_by_one():
    few, many = torch.arange(MOST_NUMBERS), torch.arange(MOST_NUMBERS + 1)
    assert data_of(few) == tuple(range(MOST_NUMBERS))
    assert data_of(many) == many.numpy().tobytes()
    assert data_of(few > 3) == (few > 3).numpy().tobytes()


def test_arguments_on_one_storage_are_told_apart_together(tape_of):
    """Arguments on one storage have one place on the tape, and the data of all its views counts."""
    ends = torch.tensor([0, 2, 6])
    tape = tape_of(lambda block, hidden, first, rest: rest.tolist(), x(), ends[:1], ends[1:])
    assert tape.reads == {(1,): data_of(ends[:1]), (2,): data_of(ends[1:])}


LENGTHS = ([1, 3, 2], [3, 2, 1], [2, 2, 2])


@pytest.fixture
def splitting(toy_model):
    """A model whose blocks split their tokens at adjustable lengths, as Qwen2-VL's vision blocks do."""
    lengths = torch.tensor(LENGTHS[0])

    def forward(block, hidden, ends, unused):
        counts = ends[1:] - ends[:-1]
        parts = [block.up(part).tanh().cumsum(1) for part in hidden.split(counts.tolist(), dim=1)]
        return hidden + block.down(torch.cat(parts, dim=1))

    def arguments_of(hidden):
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return {"ends": ends, "unused": None}

    def set_lengths(new):
        lengths.copy_(torch.tensor(new))

    return toy_model(forward, kwargs_of=arguments_of), set_lengths


@pytest.fixture
def batch(toy_batch):
    return toy_batch(4)


@pytest.mark.parametrize("action", ["recompute", "retain", "random"])
def test_other_data_at_one_shape_is_exact(splitting, batch, run_steps, assert_same_steps, recorded_blocks, action):
    model, set_lengths = splitting
    profile = profile_model(model, batch, CONFIG)
    assert all(kind.untrusted is None for kind in profile.kinds)
    policy = random_policy(profile, 3, lossless=True) if action == "random" else uniform_policy(profile, action)
    plain = {}
    for lengths in LENGTHS:
        set_lengths(lengths)
        plain[tuple(lengths)] = run_steps(model, batch)
    recorded_blocks.clear()
    with apply_policy(model, policy, CONFIG):
        for lengths in [*LENGTHS, *LENGTHS, *LENGTHS]:
            set_lengths(lengths)
            assert_same_steps(run_steps(model, batch), plain[tuple(lengths)])
    first = recorded_blocks.count(recorded_blocks[0])
    # Each of three lengths is recorded once and validated once; a plain policy records only one.
    assert first == (1 if policy.is_plain else 2 * len(LENGTHS))


TEXT = {"x": torch.randn(3, 24, 8, generator=torch.Generator().manual_seed(0))}


def test_numbers_that_are_read_are_sizes(splitting, run_steps, assert_same_steps, recorded_blocks):
    """Numbers read from data are sizes: lengths between recorded ones run from a symbolic tape.

    Replay is compared at few of them (rule R7).
    """
    model, set_lengths = splitting
    set_lengths([10, 8, 6])
    policy = uniform_policy(profile_model(model, TEXT, CONFIG), "recompute")
    recorded_lengths = [[4, 12, 8], [12, 4, 8], [8, 4, 12], [20, 2, 2], [2, 20, 2], [2, 2, 20], [9, 9, 6], [7, 3, 14]]
    new = [[n, 23 - 2 * n, n + 1] for n in range(3, 11)]
    plain = []
    for lengths in new:
        set_lengths(lengths)
        plain.append(run_steps(model, TEXT, num_steps=1))
    with apply_policy(model, policy, CONFIG):
        for lengths in recorded_lengths * 2:
            set_lengths(lengths)
            run_steps(model, TEXT, num_steps=1)
        recorded_blocks.clear()
        for place, lengths in enumerate(new):
            set_lengths(lengths)
            assert_same_steps(run_steps(model, TEXT, num_steps=1), plain[place])
    assert len(recorded_blocks) <= 2  # of one block; recording each of the 8 lengths would be 16


@pytest.mark.parametrize("special", [0, 1])
def test_a_number_that_is_read_and_decides_otherwise_is_noticed(
    toy_model, run_steps, assert_same_steps, special, caplog
):
    """A number read from data that changes the operators at one value is noticed, in the validated block or another
    one.

    The value lies between recorded ones.
    """
    number = [2]

    def forward(block, hidden, count):
        length = count.tolist()[0]
        inner = block.up(hidden).tanh()[:, :length]
        if length == 5 and block.is_special:
            inner = inner[:, :2].exp()
        return hidden + block.down(inner.exp()).sum(1, keepdim=True)

    model = toy_model(forward, kwargs_of=lambda hidden: {"count": torch.tensor(number)})
    for place, block in enumerate(model.layers):
        block.is_special = place == special
    policy = uniform_policy(profile_model(model, TEXT, CONFIG), "recompute")
    number[0] = 5
    plain = run_steps(model, TEXT, num_steps=1)
    with apply_policy(model, policy, CONFIG):
        for number[0] in [2, 9, 4, 12, 2, 9, 4, 12, 7, 8]:
            run_steps(model, TEXT, num_steps=1)
        assert "runs other operators" not in caplog.text
        number[0] = 5
        assert_same_steps(run_steps(model, TEXT, num_steps=1), plain)
        assert f"block layers.{special} runs other operators at some sizes" in caplog.text


def test_the_first_call_may_have_other_data_than_the_profile(splitting, batch, run_steps, assert_same_steps):
    """The first call may have other data than the profile: other operators at the same shape do not mean another
    model."""
    model, set_lengths = splitting
    policy = uniform_policy(profile_model(model, batch, CONFIG), "recompute")
    set_lengths([5, 1, 0])
    plain = run_steps(model, batch)
    with apply_policy(model, policy, CONFIG):
        assert_same_steps(run_steps(model, batch), plain)


@settings(max_examples=10)
@given(order=st.lists(st.sampled_from(range(len(LENGTHS))), min_size=3, max_size=12), seed=st.integers(0, 9))
def test_any_order_of_data_is_exact(toy_model, toy_batch, run_steps, assert_same_steps, order, seed):
    lengths = [list(LENGTHS[0])]

    def forward(block, hidden, counts):
        parts = [block.up(part).sigmoid() for part in hidden.split(counts.tolist(), dim=1)]
        return hidden + block.down(torch.cat(parts, dim=1))

    model = toy_model(forward, kwargs_of=lambda hidden: {"counts": torch.tensor(lengths[0])})
    batch = toy_batch()
    policy = random_policy(profile_model(model, batch, CONFIG), seed, lossless=True)
    plain = {}
    for index, each in enumerate(LENGTHS):
        lengths[0] = each
        plain[index] = run_steps(model, batch, num_steps=1)
    with apply_policy(model, policy, CONFIG):
        for index in order:
            lengths[0] = LENGTHS[index]
            assert_same_steps(run_steps(model, batch, num_steps=1), plain[index])
