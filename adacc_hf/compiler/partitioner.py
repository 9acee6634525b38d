"""Partitioner that AOTAutograd calls for every compiled graph, to decide what forward stores for backward."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.files import fields_of
from adacc_hf.artifacts.policy import Action
from adacc_hf.artifacts.units import format_bytes, parse_bytes
from adacc_hf.compiler import functorch
from adacc_hf.compiler.compiled_policy import (
    CompiledPolicy,
    PlanStore,
    RegionPlan,
    graph_digest,
    graph_tensors,
    plan_for,
)
from adacc_hf.compiler.compress_pass import compress_saved, prevent_addmm_fusion
from adacc_hf.compiler.graph_codecs import graph_codec_options
from adacc_hf.compiler.graph_cost import OperatorTimes, keep_ms
from adacc_hf.compiler.graph_milp import GraphChoice, GraphModel, graph_model, least_bytes, least_time, retaining_choice
from adacc_hf.compiler.graph_precision import precision_needs, precision_sensitive_nodes
from adacc_hf.compiler.joint_graph import JointGraph, is_materialized, nbytes_of, read_joint_graph, root_of
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.price.timing import device_name
from adacc_hf.tape.execution_plan import codec_of

log = logging.getLogger(__name__)

GRAPH_SETTINGS = ("memory_budget", "exact", "actions", "codecs", "min_compress_bytes", "max_error")
"""Fields of `AdaccConfig` that affect compiled graphs. All other fields concern blocks, profiles and tracking."""


class AdaccPartitioner(functorch.CustomPartitionerFn):
    """Partitioner that retains, compresses or recomputes every forward value of a region, within `memory_budget`.

    A region is one compiled graph. A budget that is a fraction in (0, 1] is relative to the bytes that torch's own
    partitioner would store for backward. Each region may store that fraction of its own bytes, so all regions together
    stay within the budget. A budget in bytes limits the memory that each region needs for its backward at any time: the
    stored values and the values being recomputed.

    A region that fits the budget is partitioned by torch. If a region cannot stay within a budget in bytes,
    InfeasibleBudgetError is raised. If a region cannot stay within a fraction, the region stores the least possible,
    and a warning is logged. The region of the loss, for example, often cannot stay within a fraction. A region with a
    plan in `initial_policy` follows that plan. `policy` contains one `RegionPlan` per region partitioned in this
    process. Regions from a compile cache are not partitioned again.
    """

    def __init__(
        self,
        config: AdaccConfig | None = None,
        initial_policy: CompiledPolicy | None = None,
        store: PlanStore | None = None,
        example_sizes: tuple[int, ...] = (),
        **overrides: Any,
    ) -> None:
        """Create a partitioner for `config`, by default a `memory_budget` of 0.5.

        `overrides` replace fields of `config`.

        `initial_policy` contains plans of regions (compiled graphs) from earlier runs. Its budget applies to all other
        regions, instead of the budget in `config`. `store` contains the plans of earlier runs and receives new plans.
        `example_sizes` are the dynamic sizes for which the region is traced, if the partitioner is for one region only.
        Pass these sizes if torch caches partitioned graphs.
        """
        self.config = (config or AdaccConfig(memory_budget=0.5)).with_overrides(**overrides)
        self._initial_policy = _empty_policy(self.config) if initial_policy is None else initial_policy
        self.policy = replace(self._initial_policy, regions=())
        self._of_peak = not isinstance(self.config.memory_budget, float)
        self._store = store
        self._example_sizes = example_sizes
        self._recorded_plans = {plan.digest: plan for plan in self._initial_policy.regions}
        self._numbers: list[int | None] = []
        """Number that AOTAutograd gave to the graph of each plan in `policy`, or None if there is no number."""
        self._num_split: Counter[str] = Counter()
        """Number of graphs partitioned so far in each compilation. One compilation can split a function into several
        graphs."""
        self._times = OperatorTimes()
        self.refusals: list[str] = []
        """Reasons why torch's own partitioner partitions some regions (compiled graphs), which therefore have no
        budget: one per region."""

    def start_over(self, share: float | None) -> None:
        """Forget all regions (compiled graphs). Regions compiled from now on store at most the fraction `share` of
        their bytes.

        The fraction is relative to the bytes that plain torch.compile stores for backward. If `share` is None, regions
        store the least possible. Regions that are compiled already change only after `torch._dynamo.reset`.
        """
        self.policy = self._initial_policy = CompiledPolicy(share=share)
        self._recorded_plans = {}
        self._numbers.clear()
        self._num_split.clear()

    def count_calls(self, loss: Tensor) -> None:
        """Count how often the forward that computed `loss` called each region, and store the counts in the plans."""
        counts = Counter(functorch.graph_calls(loss))
        pairs = zip(self.policy.regions, self._numbers, strict=True)
        regions = tuple(replace(plan, calls=0 if number is None else counts[number]) for plan, number in pairs)
        self.policy = replace(self.policy, regions=regions)

    def is_called(self, loss: Tensor) -> bool:
        """Return True if the forward that computed `loss` called a compiled region, False if the forward ran eagerly.
        Calls are recognized by the numbers that AOTAutograd gives to graphs. If any region has no number, its calls
        cannot be recognized, and True is returned."""
        return None in self._numbers or any(number in self._numbers for number in functorch.graph_calls(loss))

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        num_outputs = kwargs["num_fwd_outputs"]
        refusal = functorch.prepare(gm)
        plan = RegionPlan(digest=graph_digest(gm, num_outputs), region=self._region())
        info = functorch.classify(gm, kwargs.get("static_lifetime_input_indices") or (), num_outputs)
        held_inputs = functorch.held_inputs(gm, info, num_outputs)
        if refusal is None and not joint_inputs:
            refusal = "it is nested in another region, so its inputs are not marked as parameters or activations"
        if not info.required_bw_nodes:
            refusal = "it has no backward"
        elif refusal is not None:
            self.refusals.append(refusal)
            log.warning("Adacc: torch.compile's own partition is used for a region, which has no budget: %s", refusal)
        if refusal is not None:
            return self._torch_partition(gm, joint_inputs, kwargs, replace(plan, reason=refusal))
        joint = read_joint_graph(gm, info, held_inputs)
        saved = functorch.plain_saved(gm, info)
        plain = {value for node in saved if (value := joint.value_of(node)) is not None}
        # Torch may have forward compute tensors that only backward reads. These tensors are not values of the joint
        # graph.
        plain_bytes = sum(nbytes_of(root) for root in {root_of(node) for node in saved} - {*held_inputs})
        plan = replace(plan, plain_bytes=plain_bytes, stored_bytes=plain_bytes, peak_bytes=plain_bytes)
        recorded_plan = self._recorded_plans.get(plan.digest)
        if recorded_plan is None and self._store is not None:
            recorded_plan = self._store.load(self._decision_key(plan, joint), plan.digest)
        if recorded_plan is None:
            plan = self._decide(joint, plan, plain, joint.source_values(saved))
            if self._store is not None:
                self._store.save(self._decision_key(plan, joint), plan)
        else:
            plan = replace(recorded_plan, region=plan.region, calls=None)
        if plan.reason:
            return self._torch_partition(gm, joint_inputs, kwargs, plan)
        stored = plan_for(joint, plan)
        saved = [joint.nodes[value] for value in stored]
        forward, backward = functorch.extract(gm, info, [*held_inputs, *saved], num_outputs)
        codecs = {joint.nodes[v].name: codec_of(how) for v, how in stored.items() if how.action is Action.COMPRESS}
        compress_saved(forward, backward, codecs, num_outputs)
        prevent_addmm_fusion(backward)
        self._note(plan)
        return forward, backward

    def uuid(self) -> str:
        """Return the partitioner's key in compile caches: source code, settings, initial policy and example sizes. A
        cache of partitioned graphs returns one graph for all sizes that the graph's guards allow. The graph stays
        within the budget only at the sizes with which it was traced, so these sizes are part of the key."""
        settings = [self.config, self._initial_policy, self._example_sizes]
        return f"adacc_hf {_source_digest()} {json.dumps(settings, default=fields_of)}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the partitioner without its plans, because Inductor's cache pickles all settings for cache keys."""
        return type(self), (self.config, self._initial_policy, None, self._example_sizes)

    def _decision_key(self, plan: RegionPlan, joint: JointGraph) -> str:
        """Return the key of the graph's plan in the `PlanStore`, a cache on disk. The key contains the partitioner's
        `uuid`, the bytes that torch would store, and the devices, because the costs of operators differ between
        devices."""
        devices = {device_name(node.meta["val"].device) for node in joint.nodes}
        return f"{self.uuid()} {plan.plain_bytes} {sorted(devices)}"

    def _decide(self, joint: JointGraph, plan: RegionPlan, plain: Set[int], plain_sources: Set[int]) -> RegionPlan:
        """Return `plan` with the decision of the integer program, or with the reason why torch's own partition is used.
        `plain` contains the values of the joint graph that torch's own partition would store for backward. This
        partition may also store tensors that are not values of the joint graph. `plain_sources` contains `plain`, and
        the values from which these other tensors are computed."""
        allowed_bytes = self.policy.allowed_bytes(plan.plain_bytes)
        tensors = tuple(
            replace(t, action=Action.RETAIN.value, stored_bytes=t.nbytes) for t in graph_tensors(joint, plain, {}, {})
        )
        if allowed_bytes is not None and allowed_bytes >= plan.plain_bytes:
            return replace(plan, tensors=tensors, reason="everything fits")
        graph = self._graph(joint)
        if allowed_bytes is None:
            choice = least_bytes(graph, limits_peak=self._of_peak)
        else:
            choice = self._solve(graph, plan, allowed_bytes)
        if (choice.peak_bytes if self._of_peak else choice.nbytes) >= plan.plain_bytes:
            return replace(plan, tensors=tensors, reason="no choice stores less")
        return replace(
            plan,
            stored_bytes=choice.nbytes,
            peak_bytes=choice.peak_bytes,
            overhead_ms=choice.ms - retaining_choice(graph, plain_sources).ms,
            stored=tuple((joint.nodes[value].name, how) for value, how in choice.stored.items()),
            tensors=graph_tensors(joint, plain, choice.stored, choice.stored_bytes),
        )

    def _torch_partition(self, gm: Any, joint_inputs: Any, kwargs: dict[str, Any], plan: RegionPlan) -> Any:
        partition = functorch.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        self._note(plan)
        return partition

    def _region(self) -> str:
        """Return the name of the graph that is being partitioned: "3", or "3.1" for the second graph of function 3."""
        function, compilation = functorch.compile_number()
        number = self._num_split[compilation]
        self._num_split[compilation] += 1
        return f"{function}.{number}" if number else function

    def _note(self, plan: RegionPlan) -> None:
        self._numbers.append(functorch.graph_number())
        self.policy = replace(self.policy, regions=(*self.policy.regions, plan))
        log.info("Adacc: %s", plan.summary())

    def _graph(self, joint: JointGraph) -> GraphModel:
        pairs = zip(joint.kind.operators, joint.operators, strict=True)
        times = [self._times.replay_ms(node) if operator.replayable else 0.0 for operator, node in pairs]
        may_replay = Action.RECOMPUTE in self.config.parsed_actions
        operators = tuple(
            replace(operator, ms=ms, replayable=operator.replayable and (may_replay or not operator.inputs))
            for operator, ms in zip(joint.kind.operators, times, strict=True)
        )
        store_ms = {index: keep_ms(node) for index, node in enumerate(joint.nodes)}
        degraded, (fine, precise) = precision_sensitive_nodes(joint), precision_needs(joint)
        indices = range(len(joint.nodes))
        codecs = {index: graph_codec_options(joint, index, self.config, degraded, fine) for index in indices}
        live_bytes = [nbytes_of(node) if is_materialized(node) else 0 for node in joint.nodes]
        kind = replace(joint.kind, operators=operators)
        return graph_model(kind, store_ms, codecs, live_bytes, precise)

    def _solve(self, graph: GraphModel, plan: RegionPlan, allowed_bytes: int) -> GraphChoice:
        """Return the fastest choice for a region's graph within `allowed_bytes`. If no choice fits a budget in bytes,
        raise InfeasibleBudgetError. If the budget is a fraction and no choice fits, log a warning and return the choice
        with the least bytes. The region of the loss, for example, stores little and often cannot store less."""
        choice = least_time(graph, allowed_bytes, limits_peak=self._of_peak)
        if choice is not None:
            return choice
        choice = least_bytes(graph, limits_peak=self._of_peak)
        if self.policy.budget_bytes is not None:
            needed_bytes = min(choice.peak_bytes, plan.plain_bytes)
            raise InfeasibleBudgetError(
                f"memory_budget={self.config.memory_budget!r} bounds what each compiled region may hold for its "
                f"backward, and region {plan.region} needs at least {format_bytes(needed_bytes)} with "
                f"{self.config.describe_actions()} (torch.compile alone needs {format_bytes(plan.plain_bytes)}): raise "
                f"memory_budget to at least that, allow more actions, or use a smaller batch",
                needed_bytes,
            )
        log.warning(
            "Adacc: share %r of the memory allows %s in region %s (torch.compile alone stores %s), and the least "
            "possible with %s is %s: the region stores that",
            self.policy.share,
            format_bytes(allowed_bytes),
            plan.region,
            format_bytes(plan.plain_bytes),
            self.config.describe_actions(),
            format_bytes(min(choice.nbytes, plan.plain_bytes)),
        )
        return choice


def _empty_policy(config: AdaccConfig) -> CompiledPolicy:
    """Return a policy with the budget of `config`, and without plans. Raises ValueError for the budget "auto"."""
    budget = config.memory_budget
    if budget == "auto":
        raise ValueError(
            "memory_budget='auto' needs the measured steps of a run: use AdaccCallback and train with "
            "torch_compile=True. On its own, a compiled graph takes a float in (0, 1], the fraction of the bytes that "
            "torch.compile would save, or bytes that each graph may hold for its backward"
        )
    if isinstance(budget, float):
        return CompiledPolicy(share=budget)
    return CompiledPolicy(
        share=None, budget_bytes=parse_bytes(budget, "memory_budget") if isinstance(budget, str) else budget
    )


@cache
def _source_digest() -> str:
    """Return a digest of the source files of this package and its codecs."""
    package = Path(__file__).parents[1]
    kernels = Path(get_codec.__code__.co_filename).parent
    files = sorted([*package.rglob("*.py"), *kernels.glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
