"""Partitioned graphs: exact without a lossy codec, within the budget, and with the predicted stored bytes."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import min_cut_rematerialization_partition

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.policy import RETAIN, Action, Choice
from adacc_hf.compiler import AdaccPartitioner, CompiledPolicy
from adacc_hf.compiler.compiled_policy import PlanStore, RegionPlan
from adacc_hf.compiler.functorch import is_random
from adacc_hf.compiler.partitioner import GRAPH_SETTINGS

LOSSLESS = ("retain", "recompute")


def _partitioner(budget: float | int | str, **overrides: Any) -> AdaccPartitioner:
    return AdaccPartitioner(memory_budget=budget, min_compress_bytes=0, **overrides)


def _attention(graph: fx.GraphModule) -> list[str]:
    """Return the operators of fused attention in forward and backward."""
    return [str(node.target) for node in graph.graph.nodes if "dot_product" in str(node.target)]


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.gate
@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 0.5), (torch.bfloat16, 0.2)], ids=str)
def test_lossless_graphs_give_the_bits_of_the_plain_partition(train_step, dtype, budget):
    plain = train_step(min_cut_rematerialization_partition, dtype)
    partitioner = _partitioner(budget, actions=LOSSLESS)
    step = train_step(partitioner, dtype)
    (region,) = partitioner.policy.regions
    assert region.stored_bytes <= budget * region.plain_bytes
    assert torch.equal(step.loss, plain.loss)
    assert all(torch.equal(one, two) for one, two in zip(step.gradients, plain.gradients, strict=True))


@pytest.mark.parametrize("actions", [LOSSLESS, ("retain", "compress", "recompute")], ids=["lossless", "all"])
@pytest.mark.parametrize("budget", [0.35, 0.8])
def test_what_forward_hands_over_is_what_was_predicted(train_step, budget, actions):
    partitioner = _partitioner(budget, actions=actions)
    step = train_step(partitioner)
    (region,) = partitioner.policy.regions
    assert _bytes(step.saved()) == region.stored_bytes
    assert region.stored_bytes <= budget * region.plain_bytes


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "step by step"])
@pytest.mark.parametrize("actions", [("retain", "compress"), ("retain", "compress", "recompute")])
def test_gradients_of_sharp_attention_come_through_codecs(train_step, is_fused, actions):
    """Gradients of sharp attention stay close to plain ones under codecs, which need more than 4 bits for queries and
    keys. Fused attention's sums are those of the exact queries and keys."""
    options = {"dropout": 0.0, "is_fused": is_fused, "sharpness": 6.0}
    partitioner = _partitioner(0.01, actions=actions)
    plain, step = train_step(min_cut_rematerialization_partition, **options), train_step(partitioner, **options)
    (region,) = partitioner.policy.regions
    assert any(choice.action is Action.COMPRESS for _, choice in region.stored)
    assert _bytes(step.saved()) == region.stored_bytes
    assert torch.equal(step.loss, plain.loss)
    difference = sum(((a - b) ** 2).sum() for a, b in zip(step.gradients, plain.gradients, strict=True)) ** 0.5
    assert 0 < difference < DEGRADED_ERROR * sum((g**2).sum() for g in plain.gradients) ** 0.5


def test_random_operators_stay_in_forward(train_step: Any) -> None:
    step = train_step(_partitioner(0.2, actions=LOSSLESS), dropout=0.5)
    assert not any(is_random(node) for node in step.backward.graph.nodes)
    assert any(is_random(node) for node in step.forward.graph.nodes)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # from Dynamo's imports on a machine with a GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fused_attention_with_dropout_stays_in_forward(train_step: Any, dtype: torch.dtype) -> None:
    options = {"dtype": dtype, "dropout": 0.5, "device": "cuda", "is_fused": True}
    step = train_step(_partitioner(0.2, actions=LOSSLESS), **options)
    assert all("backward" in name for name in _attention(step.backward))
    assert len(_attention(step.forward)) == 2


def test_what_attention_makes_for_backward_alone_is_handed_over(train_step: Any) -> None:
    step = train_step(_partitioner(0.9, actions=("retain", "compress")), dropout=0.0, is_fused=True)
    assert len(_attention(step.backward)) == 2
    assert all("backward" in name for name in _attention(step.backward))


def test_masks_are_handed_over_as_bits(train_step: Any) -> None:
    partitioner = _partitioner(0.3, actions=LOSSLESS)
    step = train_step(partitioner, dropout=0.5)
    assert "bitmask" in {choice.codec for _, choice in partitioner.policy.regions[0].stored}
    assert not any(tensor.dtype is torch.bool for tensor in step.saved())


def test_a_region_that_fits_is_cut_as_ever(train_step: Any) -> None:
    plain = train_step(min_cut_rematerialization_partition)
    partitioner = _partitioner(1.0)
    step = train_step(partitioner)
    assert partitioner.policy.regions[0].reason == "everything fits"
    assert [str(n.target) for n in step.backward.graph.nodes] == [str(n.target) for n in plain.backward.graph.nodes]


def test_a_budget_that_needs_steps_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a compiled graph takes a float .* or bytes"):
        AdaccPartitioner(memory_budget="auto")


def test_bytes_bound_what_a_region_holds(train_step: Any) -> None:
    unlimited = _partitioner(1.0)
    train_step(unlimited)
    budget = unlimited.policy.plain_bytes * 3 // 4
    partitioner = _partitioner(f"{budget}B", actions=LOSSLESS)
    step = train_step(partitioner)
    (region,) = partitioner.policy.regions
    assert _bytes(step.saved()) == region.stored_bytes <= region.peak_bytes <= budget
    ample = _partitioner(unlimited.policy.plain_bytes)
    train_step(ample)
    assert ample.policy.regions[0].reason == "everything fits"


@pytest.mark.usefixtures("tiny_budgets")
def test_bytes_that_a_region_cannot_keep_to_are_refused_with_the_least(train_step: Any) -> None:
    with pytest.raises(
        BackendCompilerFailed, match=r"bounds what each compiled region may hold .* needs at least"
    ) as error_info:
        train_step(_partitioner(1000, actions=LOSSLESS))
    infeasible = error_info.value.inner_exception
    assert isinstance(infeasible, InfeasibleBudgetError)
    least = _partitioner(infeasible.smallest_budget_bytes, actions=LOSSLESS)
    train_step(least)
    assert least.policy.regions[0].peak_bytes == infeasible.smallest_budget_bytes


def test_a_plan_says_what_becomes_of_each_tensor(train_step: Any) -> None:
    partitioner = _partitioner(0.4)
    train_step(partitioner)
    (region,) = partitioner.policy.regions
    assert sum(tensor.stored_bytes for tensor in region.tensors) == region.stored_bytes
    assert {tensor.name for tensor in region.tensors if tensor.stored_bytes} == {name for name, _ in region.stored}
    assert all((tensor.action == "recompute") == (tensor.stored_bytes == 0) for tensor in region.tensors)
    assert {"0", "1.up"} <= {tensor.module for tensor in region.tensors}


@pytest.mark.parametrize("budget", [0.01, 1.0], ids=["least", "all"])
def test_backward_reads_what_an_input_held_before_forward_wrote_to_it(train_function: Any, budget: float) -> None:
    """Backward reads an input's value before forward's write, as for fp8's scale history or a running mean. torch's own
    partitioner reads the value after the write."""

    def function(x: torch.Tensor, weight: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        scale = 1.0 / (1.0 + count)
        result = ((x @ weight) * scale).tanh() * scale
        count.add_(1)
        return result

    inputs = [torch.randn(8, 16), torch.randn(16, 16)]
    expected = train_function(None, function, [*inputs, torch.arange(16)])
    gradients = train_function(_partitioner(budget, actions=LOSSLESS), function, [*inputs, torch.arange(16)])
    # Eager gradients use other formulas for tanh.
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(gradients, expected, strict=True))


def _rows_above_zero(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = x @ weight
    rows = (hidden.sum(-1) > 0).nonzero().squeeze(-1)
    picked = hidden[rows]
    return hidden.index_add(0, rows, picked.sin() * picked)


def _given_complex_numbers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x * x.abs()).flatten(1) @ weight


@pytest.mark.parametrize("function", [_rows_above_zero, _given_complex_numbers])
@pytest.mark.parametrize("actions", [LOSSLESS, ("retain", "compress", "recompute")], ids=["lossless", "all"])
def test_graphs_that_torch_can_cut_can_be_cut(train_function: Any, function: Any, actions: tuple[str, ...]) -> None:
    is_complex = function is _given_complex_numbers
    inputs = [torch.randn(8, 8, dtype=torch.complex64) if is_complex else torch.randn(8, 16), torch.randn(16, 16)]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        plain = train_function(min_cut_rematerialization_partition, function, inputs)
        for budget in (0.01, 0.5, 0.9):
            partitioner = _partitioner(budget, actions=actions, codecs=("int8",))
            gradients = train_function(partitioner, function, inputs)
            if actions == LOSSLESS:
                assert all(map(torch.equal, gradients, plain))
            assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_view_is_never_stored_for_what_it_shows(train_function: Any) -> None:
    """A view is never stored in place of its values, because it keeps its whole base alive."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide, narrow, rest = (x @ weight).split_with_sizes([8, 4, 4], dim=-1)
        return (narrow * rest).exp() * wide.unfold(1, 4, 4).prod(1)

    handed_over: list[fx.Node] = []

    def partition(*args: Any, **kwargs: Any) -> Any:
        graphs = partitioner(*args, **kwargs)
        handed_over.extend(graphs[0].graph.find_nodes(op="output")[0].args[0][kwargs["num_fwd_outputs"] :])
        return graphs

    for budget in (0.3, 0.6, 0.9):
        partitioner = _partitioner(budget, actions=LOSSLESS)
        train_function(partition, function, [torch.randn(8, 16), torch.randn(16, 16)])
        assert partitioner.policy.regions[0].stored
    makers = [node.args[0] if "getitem" in node.name else node for node in handed_over]
    assert not any(getattr(maker.target, "is_view", False) for maker in makers)


def test_a_stored_plan_is_for_the_sizes_of_the_example(train_function: Any, tmp_path: Path) -> None:
    """A stored plan applies to the example's sizes only: its bytes depend on them, and the fit to a budget in bytes."""
    regions = []
    for batch in (8, 32, 8):
        partitioner = AdaccPartitioner(AdaccConfig(memory_budget=0.5, actions=LOSSLESS), store=PlanStore(tmp_path))
        train_function(partitioner, _gelu, [torch.randn(batch, 16), torch.randn(16, 16)], dynamic=True)
        regions += partitioner.policy.regions
    assert regions[1].digest == regions[0].digest
    assert regions[1].plain_bytes > regions[0].plain_bytes
    assert regions[2] == regions[0]


def _gelu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ weight) @ weight


def test_a_region_inside_another_is_left_alone(train_function: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A region inside another one is left alone, because its graph does not mark parameters among its inputs."""
    inner = torch.compiler.nested_compile_region(_gelu)
    function = lambda x, weight: inner(inner(x, weight), weight)  # noqa: E731
    inputs = [torch.randn(8, 16), torch.randn(16, 16)]
    plain = train_function(min_cut_rematerialization_partition, function, inputs)
    partitioner = _partitioner(0.3)
    gradients = train_function(partitioner, function, inputs)
    assert all(map(torch.equal, gradients, plain))
    inside, outside = (region.reason for region in partitioner.policy.regions)
    assert "nested in another" in inside
    assert "has nested regions" in outside
    assert "has no budget: it has nested regions" in caplog.text


class _Watched(AdaccConfig):
    """Settings that record the names of the settings that are read while a graph is cut."""

    readings: ClassVar[set[str] | None] = None
    """Names that were read, or None while no graph is cut: what else torch does with a partitioner is not recorded."""

    def __getattribute__(self, name: str) -> Any:
        if _Watched.readings is not None:
            _Watched.readings.add(name)
        return super().__getattribute__(name)


def test_graphs_are_cut_by_the_settings_that_options_may_have(train_step: Any) -> None:
    settings = {"actions": ("retain", "compress"), "codecs": ("int8", "outlier_int4"), "min_compress_bytes": 0}
    partitioner = AdaccPartitioner(_Watched(memory_budget=0.5, **settings))
    readings: set[str] = set()

    def partition(*args: Any, **kwargs: Any) -> Any:
        _Watched.readings = readings
        try:
            return partitioner(*args, **kwargs)
        finally:
            _Watched.readings = None

    train_step(partition)
    names = {field.name for field in fields(AdaccConfig)}
    # The policy has read the budget before, and `exact` has determined the actions.
    assert readings & names == {*GRAPH_SETTINGS} - {"memory_budget", "exact"}


def test_caches_tell_settings_apart() -> None:
    assert _partitioner(0.5).uuid() == _partitioner(0.5).uuid()
    assert _partitioner(0.5).uuid() != _partitioner(0.4).uuid()
    assert _partitioner(0.5).uuid() != _partitioner(0.5, actions=LOSSLESS).uuid()
    assert _partitioner(0.5).uuid() != _partitioner(0.5, codecs=("int8",)).uuid()
    assert AdaccPartitioner(example_sizes=(8,)).uuid() != AdaccPartitioner(example_sizes=(16,)).uuid()


def test_caches_tell_every_part_of_a_policy_apart() -> None:
    """A key must not depend on the text with which a notebook shows a policy."""
    stored = (("addmm", RETAIN), ("mul", Choice(action=Action.COMPRESS, codec="int8", options=(("group_size", 64),))))
    plan = RegionPlan(digest="graph", stored=stored)
    plans = [
        plan,
        replace(plan, stored=stored[:1]),
        replace(plan, stored=((stored[0][0], stored[1][1]), stored[1])),
        replace(plan, stored=(stored[0], (stored[1][0], replace(stored[1][1], options=(("group_size", 32),))))),
        replace(plan, digest="another graph"),
    ]
    keys = {AdaccPartitioner(initial_policy=CompiledPolicy(share=0.5, regions=(one,))).uuid() for one in plans}
    assert len(keys) == len(plans)


def test_sizes_may_be_unknown_until_it_runs(train_step: Any) -> None:
    settings = {"actions": ("retain", "compress"), "codecs": ("int8",)}
    # The choice with the least stored bytes does not depend on prices, which are measured.
    config, least = AdaccConfig(min_compress_bytes=0, memory_budget=0.5, **settings), CompiledPolicy(share=None)
    static = train_step(AdaccPartitioner(config, least))
    dynamic = train_step(AdaccPartitioner(config, least), dynamic=True)
    placeholders = dynamic.forward.graph.find_nodes(op="placeholder")
    assert any(isinstance(node.meta["val"], torch.SymInt) for node in placeholders)
    assert any("coded" in node.name for node in dynamic.backward.graph.find_nodes(op="placeholder"))
    assert torch.equal(dynamic.loss, static.loss)
    assert all(torch.equal(a, b) for a, b in zip(dynamic.gradients, static.gradients, strict=True))


def test_regions_that_are_given_a_plan_follow_it(train_step: Any, tmp_path: Path) -> None:
    first = _partitioner(0.3)
    step = train_step(first)
    first.policy.save(tmp_path / "compiled.json")
    loaded_policy = CompiledPolicy.load(tmp_path / "compiled.json")
    assert loaded_policy == first.policy
    # Another budget leads to another plan. A plan that is passed in takes precedence.
    again = train_step(AdaccPartitioner(AdaccConfig(memory_budget=0.9), loaded_policy))
    assert [node.name for node in again.backward.graph.nodes] == [node.name for node in step.backward.graph.nodes]
    assert all(torch.equal(a, b) for a, b in zip(again.gradients, step.gradients, strict=True))


def test_a_region_of_another_graph_is_refused(train_step: Any) -> None:
    first = _partitioner(0.3)
    train_step(first)
    (plan,) = first.policy.regions
    wrong = replace(plan, stored=(("no_such_node", RETAIN),))
    with pytest.raises(Exception, match="stores no_such_node, which the region's graph does not contain"):
        train_step(AdaccPartitioner(first.config, CompiledPolicy(share=0.3, regions=(wrong,))))
