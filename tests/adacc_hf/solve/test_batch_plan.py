"""Plans of optimizer steps: every sample once, within the budget, in the least time."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.solve.batch_plan import padding, plan_step

NUMBERS = (1, 2, 3, 4, 6, 8)
lengths_of_a_step = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=9)


def cost_within(limit, fixed=20):
    """Return the cost of a micro-batch of at most `limit` tokens."""

    def cost(number, longest):
        tokens = number * sum(longest)
        return fixed + tokens if tokens <= limit else None

    return cost


@given(lengths_of_a_step, st.integers(1, 200), st.integers(1, 12))
def test_each_sample_is_in_one_micro_batch_that_fits(lengths, limit, num_groups):
    groups = plan_step(lengths, cost_within(limit), num_groups)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert len(groups) >= min(num_groups, len(lengths))
    for group in groups:
        longest = [max(lengths[index][part] for index in group) for part in range(2)]
        assert len(group) == 1 or len(group) * sum(longest) <= limit


@given(lengths_of_a_step, st.integers(50, 400), st.integers(0, 60))
def test_no_division_of_the_sorted_samples_takes_less_time(lengths, limit, fixed):
    cost = cost_within(limit, fixed)

    def total(groups):
        costs = []
        for group in groups:
            longest = tuple(max(lengths[index][part] for index in group) for part in range(2))
            ms = cost(len(group), longest)
            costs.append(ms if ms is not None else 0 if len(group) == 1 else float("inf"))
        return sum(costs)

    order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    borders = [b for k in range(len(order)) for b in combinations(range(1, len(order)), k)]
    divisions = [[order[a:b] for a, b in zip((0, *inner), (*inner, len(order)), strict=True)] for inner in borders]
    regular = [each for each in divisions if all(len(g) in (*NUMBERS, len(order)) for g in each)]
    assert total(plan_step(lengths, cost)) == min(map(total, regular))


def test_samples_of_equal_length_are_not_padded():
    lengths = [(30,), (2,), (30,), (2,), (2,)]
    groups = plan_step(lengths, cost_within(1000, fixed=1))
    assert padding(groups, lengths) == (66, 66)
    assert padding([range(5)], lengths) == (66, 150)
