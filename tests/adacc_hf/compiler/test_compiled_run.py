"""AdaccCallback in a run with torch_compile=True: its decisions, files and cleanup."""

from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from adacc_hf import AdaccCallback, InfeasibleBudgetError
from adacc_hf.adapt.run_profiler import TrainingLoop
from adacc_hf.adapt.run_state import RunState
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.files import COMPILED_FILE, HISTORY_FILE
from adacc_hf.compiler import CompiledPolicy, RegionPlan
from adacc_hf.compiler.compiled_run import CompiledRun, begin_compiled_run
from adacc_hf.torch_glue.compat import switch_checkpointing

# Importing Inductor raises torch's own deprecation warnings. Tracing a loss after another graph does so, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
SETTINGS = {"memory_budget": 0.5, "actions": ("retain", "recompute")}


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert inductor.custom_partitioner_fn is None


def state_of(config: AdaccConfig, model: torch.nn.Module | None = None) -> RunState:
    return RunState(config, None, model or torch.nn.Linear(1, 1), None, TrainingLoop())


@pytest.mark.parametrize(
    ("settled_for", "requested_budget", "share"),
    [(0.7, 0.7, 0.4), ("1GiB", "1GiB", 0.4), (0.7, 0.5, 0.5), ("1GiB", 0.5, 0.5), (None, "1GiB", None)],
)
def test_a_checkpoint_is_followed_if_it_is_settled_for_the_budget(tmp_path, settled_for, requested_budget, share):
    CompiledPolicy(share=0.4, settled_for=settled_for).save(tmp_path / COMPILED_FILE)
    (tmp_path / HISTORY_FILE).write_text('[{"step": 1, "event": "change"}]')
    state = state_of(AdaccConfig(memory_budget=requested_budget))
    run = begin_compiled_run(state, tmp_path)
    run.remove()
    assert [event["step"] for event in state.history] == [1]
    assert run.policy.share == share
    assert run.policy.settled_for == (requested_budget if requested_budget == settled_for else None)


class InventedRun:
    """A CompiledRun with invented regions of (plain bytes, least bytes, calls). Under a budget in bytes, the measured
    peak of a step is 1000 bytes above that of its regions."""

    def __init__(self, budget: float, regions: list[tuple[int, int, int]]) -> None:
        self.measures_peak, self.regions = isinstance(budget, int), regions
        self.state = state_of(AdaccConfig(memory_budget=budget))
        self.run = CompiledRun(self.state)

    @property
    def shares(self) -> list[float | None]:
        return [event["share"] for event in self.state.history if event["event"] == "change"]

    def step(self, error: int = 0, size: int = 1) -> CompiledPolicy:
        self.run.begin_step(0)
        partitioner = self.run._installed.partitioner
        share = partitioner.policy.share
        plans = []
        for number, (plain, least, calls) in enumerate(self.regions):
            stored_bytes = max(least, 0 if share is None else int(share * plain))
            sizes = {"plain_bytes": plain, "stored_bytes": stored_bytes, "peak_bytes": stored_bytes}
            plans.append(RegionPlan(digest="", region=str(number), calls=calls, **sizes))
            partitioner._note(plans[-1])
        if self.measures_peak:
            self.run._meter.close()
            self.run._is_measured, self.run._num_elements = True, size
            self.run._meter.peak_bytes = 1000 + sum(plan.peak_bytes for plan in plans) + error
        self.run.end_step(1)
        return CompiledPolicy(share=share, regions=tuple(plans))


@pytest.fixture
def invented_run():
    runs = []

    def make(budget: float, regions: list[tuple[int, int, int]] | None = None) -> InventedRun:
        runs.append(InventedRun(budget, regions or [(1000, 100, 1)]))
        return runs[-1]

    yield make
    for one in runs:
        one.run.remove()


@pytest.mark.usefixtures("tiny_budgets")
def test_what_the_peak_leaves_is_given_to_the_regions(invented_run) -> None:
    compiled = invented_run(1500)
    for _ in range(3):
        compiled.step()
    assert compiled.shares == [0.5]
    assert compiled.run.peak_bytes == 1500


@pytest.mark.usefixtures("tiny_budgets")
def test_a_peak_above_the_budget_takes_back_what_is_too_much(invented_run) -> None:
    compiled = invented_run(1500)
    compiled.step()
    compiled.step(error=200)
    compiled.step(error=200)
    # The share falls by 200 of the 500, and by 1 % of 1000 as a safety margin.
    assert compiled.shares == [0.5, 0.29]
    assert compiled.run.peak_bytes == 1490


@pytest.mark.usefixtures("tiny_budgets")
def test_what_a_small_batch_leaves_is_kept_for_larger_ones(invented_run) -> None:
    compiled = invented_run(1500)
    compiled.step(error=-300, size=1)
    compiled.step(error=0, size=2)
    compiled.step(error=-200, size=1)
    # The second step is 300 too high. The smaller third batch changes nothing.
    assert compiled.shares == [0.8, 0.49]


@pytest.mark.usefixtures("tiny_budgets")
def test_a_budget_below_the_least_peak_is_refused(invented_run) -> None:
    expected = r"memory_budget=1050 allows .* raise memory_budget to at least that"
    with pytest.raises(InfeasibleBudgetError, match=expected) as error:
        invented_run(1050).step()
    assert error.value.smallest_budget_bytes == 1100


def test_what_cannot_keep_to_a_fair_share_has_the_others_store_less_again(invented_run) -> None:
    compiled = invented_run(0.5, [(1000, 100, 1), (1000, 480, 1), (900, 800, 1)])
    compiled.step()
    compiled.step()
    # The first two regions share 650, and the second one cannot keep to its part.
    assert compiled.shares == [0.325]
    assert compiled.step().stored_bytes == 1450
    assert compiled.shares == [0.325, 0.17]
    assert compiled.run.figures({})["adacc/stored_gib"] == 1450 / 2**30


def test_a_fraction_that_the_regions_cannot_keep_to_is_refused(invented_run) -> None:
    compiled = invented_run(0.3, [(1000, 401, 3), (400, 400, 1)])
    compiled.step()
    # The regions need 0.4715 of all bytes, and the suggested fraction is rounded up.
    with pytest.raises(InfeasibleBudgetError, match=r"memory_budget=0.3 allows 1020 B of .* at least 0.472") as error:
        compiled.step()
    assert compiled.shares == [None]
    assert error.value.smallest_budget_bytes == 1603


@pytest.mark.usefixtures("eager_graphs")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.21 with Transformers 5.23
def test_adapters_train_as_plainly_over_several_micro_batches(make_model, train) -> None:
    peft = pytest.importorskip("peft")

    def run(callbacks: list[AdaccCallback]) -> Any:
        settings = {"torch_compile": True, "max_steps": 2, "gradient_accumulation_steps": 2}
        adapters = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
        return train(callbacks, model=peft.get_peft_model(make_model(n_layer=1), adapters), **settings)

    callback = AdaccCallback(**{**SETTINGS, "memory_budget": 0.7})
    run([callback]).assert_equals(run([]))
    policy = callback.compiled_policy
    assert 0 < policy.stored_bytes <= 0.7 * policy.plain_bytes


def test_settings_without_effect_in_graphs_are_named(caplog) -> None:
    config = AdaccConfig(memory_budget=0.5, head="chunked", block_classes=("GPT2Block",), profile_steps=3)
    CompiledRun(state_of(config)).remove()
    assert "Adacc: head='chunked', block_classes=('GPT2Block',): no effect with torch.compile on" in caplog.text


def test_a_partitioner_of_the_users_own_is_not_replaced(make_trainer) -> None:
    inductor.custom_partitioner_fn = print
    with pytest.raises(ValueError, match="Adacc needs this setting for its own partitioner"):
        make_trainer([AdaccCallback(**SETTINGS)], torch_compile=True).train()
    inductor.custom_partitioner_fn = None


def test_checkpointing_is_off_while_it_lasts(make_model) -> None:
    model = make_model()
    switch_checkpointing(model, on=True)
    run = CompiledRun(state_of(AdaccConfig(memory_budget=0.5), model))
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    run.remove()
    assert model.transformer.gradient_checkpointing
