"""Models compiled in several regions, block by block or with graph breaks, share one budget."""

from typing import Any

import pytest
import torch

from adacc_hf import AdaccCallback, InfeasibleBudgetError

# Importing Inductor raises torch's own deprecation warnings. Tracing a loss after another graph does so, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.usefixtures("eager_graphs"),
]
NUM_BLOCKS = 2
LOSSLESS = ("retain", "recompute")


@pytest.fixture
def block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Accelerate compile each of the equal blocks, and the remaining model, separately."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")


@pytest.fixture
def breaking_blocks(monkeypatch: pytest.MonkeyPatch, make_model) -> None:
    """Put a graph break into the middle of every block."""
    block = type(make_model().transformer.h[0].mlp)
    forward = block.forward

    def broken(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return forward(self, hidden)

    monkeypatch.setattr(block, "forward", broken)


def train_as_plainly(make_model, train, budget: float) -> Any:
    callback = AdaccCallback(memory_budget=budget, actions=LOSSLESS)
    plain, ours = (
        train(callbacks, torch_compile=True, max_steps=3, model=make_model(n_layer=NUM_BLOCKS))
        for callbacks in (None, [callback])
    )
    ours.assert_equals(plain)
    return callback.compiled_policy


@pytest.mark.usefixtures("block_by_block")
def test_blocks_that_share_one_graph_count_each_time(make_model, train) -> None:
    policy = train_as_plainly(make_model, train, 0.5)
    assert max(plan.calls for plan in policy.regions) == NUM_BLOCKS
    assert 0 < policy.stored_bytes <= 0.5 * policy.plain_bytes
    block = max(policy.regions, key=lambda plan: plan.calls)
    assert policy.plain_bytes >= NUM_BLOCKS * block.plain_bytes


@pytest.mark.usefixtures("block_by_block")
def test_a_peak_is_kept_to_by_blocks_that_share_one_graph(make_model, train) -> None:
    def run(budget: int) -> AdaccCallback:
        callback = AdaccCallback(memory_budget=budget, actions=LOSSLESS)
        train([callback], torch_compile=True, max_steps=12, model=make_model(n_layer=NUM_BLOCKS))
        return callback

    with pytest.raises(InfeasibleBudgetError) as infeasible:
        run(2**20)
    least = infeasible.value.smallest_budget_bytes
    budget = least + 2**18  # less than plain training needs
    callback = run(budget)
    peaks = [event["measured_peak_bytes"] for event in callback.history if event["event"] == "memory"]
    # The first share is already close, because the stored bytes of the graphs and their numbers of calls are exact.
    assert peaks[0] <= 1.03 * budget
    assert 0.97 * budget <= peaks[-1] <= budget


@pytest.mark.usefixtures("breaking_blocks")
def test_graph_breaks_share_one_fraction(make_model, train) -> None:
    policy = train_as_plainly(make_model, train, 0.7)
    assert len(policy.call_plans) > 2 * NUM_BLOCKS
    assert 0 < policy.stored_bytes <= 0.7 * policy.plain_bytes
