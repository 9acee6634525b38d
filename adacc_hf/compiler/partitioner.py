"""The partitioner that AOTAutograd calls for every compiled region."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Action, Choice
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
from adacc_hf.compiler.compress_pass import compress_saved, keep_products_apart
from adacc_hf.compiler.graph_cost import OperatorTimes, graph_codec_options, keep_ms
from adacc_hf.compiler.graph_memory import GraphInput, graph_inputs, most_live_bytes, most_live_bytes_of_code
from adacc_hf.compiler.graph_milp import GraphChoice, GraphModel, graph_model, keeping, least_bytes, least_time
from adacc_hf.compiler.graph_precision import precision_needs, precision_sensitive_nodes
from adacc_hf.compiler.joint_graph import JointGraph, is_held, nbytes_of, read_joint_graph, root_of
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.price.profile_cache import device_name
from adacc_hf.solve.linear_program import SolverLog
from adacc_hf.tape.execution_plan import codec_of

log = logging.getLogger(__name__)

GRAPH_SETTINGS = (
    "memory_budget", "actions", "codecs", "outliers", "compiled_outliers", "zscore_threshold", "group_size",
    "min_compress_bytes", "max_error", "solver_gap", "solver_seconds",
)  # fmt: skip
"""The fields of `AdaccConfig` that a graph is cut by; the others are about blocks, profiles and tracking."""


class AdaccPartitioner(functorch.CustomPartitionerFn):
    """Keeps, codes or recomputes every forward value of a region, within `memory_budget`.

    A budget that is a fraction in (0, 1] is one of the bytes that torch's own partitioner would save; each region of a
    model gets that fraction of its own bytes, so that together they keep to it. A budget in bytes bounds what each
    region holds for its backward at any time: what is stored, with what is recomputed of it meanwhile. A region that
    fits is left as it is. One that cannot keep to bytes raises InfeasibleBudgetError; one that cannot keep to a
    fraction, as that of the loss often cannot, gets the least possible and a warning. `policy` has one `RegionPlan` per
    region that was partitioned in this process; what comes out of a compile cache is not partitioned again. A region
    that `given` has a plan for follows that one.
    """

    def __init__(
        self,
        config: AdaccConfig | None = None,
        given: CompiledPolicy | None = None,
        store: PlanStore | None = None,
        example_sizes: tuple[int, ...] = (),
        **overrides: Any,
    ) -> None:
        """`given` has plans to follow, and the share of regions that it has none for; else the budget is that.

        What was decided in earlier runs is taken from `store`, and what is decided is put there. `example_sizes` are
        those of the dynamic sizes of the one region that this is for, where a cache of cut graphs is on.
        """
        self.config = (config or AdaccConfig(memory_budget=0.5)).with_overrides(**overrides)
        self._given = _nothing_yet(self.config) if given is None else given
        self.policy = replace(self._given, regions=())
        self._of_peak = not isinstance(self.config.memory_budget, float)
        self._store = store
        self._example_sizes = example_sizes
        self._known = {plan.digest: plan for plan in self._given.regions}
        self._graphs: list[_Graph] = []
        """For each plan of `policy` its graph."""
        self._num_split: Counter[str] = Counter()
        """For each compilation the graphs that its function was split into so far."""
        self._times = OperatorTimes()

    def start_over(self, share: float | None, plans: Sequence[RegionPlan] = ()) -> None:
        """Forget all regions; those that are compiled from now on get `share` of their bytes, None: the least possible.

        A region that `plans` has one for, made for that share before, follows it. For what is compiled already, see
        `torch._dynamo.reset`.
        """
        self.policy = self._given = CompiledPolicy(share=share)
        self._known = {plan.digest: plan for plan in plans}
        self._graphs.clear()
        self._num_split.clear()

    def count_calls(self, loss: Tensor) -> None:
        """Note how often the forward that made `loss` called each region."""
        calls = list(functorch.graph_calls(loss))
        counts = Counter(number for number, _ in calls)
        functions = dict(calls)
        for graph in self._graphs:
            if graph.number in functions:
                graph.function = weakref.ref(functions[graph.number])
        self._update(lambda plan, graph: replace(plan, calls=0 if graph.number is None else counts[graph.number]))

    def is_called(self, loss: Tensor) -> bool:
        """Whether the forward that made `loss` called any region; True where torch has no number to know one by."""
        numbers = {graph.number for graph in self._graphs}
        return None in numbers or any(number in numbers for number, _ in functorch.graph_calls(loss))

    def look_at_code(self) -> None:
        """Note what the code of each region has live, once calls were counted and backward has run."""
        self._update(lambda plan, graph: replace(plan, code_bytes=plan.code_bytes or graph.code_bytes()))

    def _update(self, change: Callable[[RegionPlan, _Graph], RegionPlan]) -> None:
        regions = tuple(map(change, self.policy.regions, self._graphs))
        self.policy = replace(self.policy, regions=regions)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        num_outputs = kwargs["num_fwd_outputs"]
        refusal = functorch.prepare(gm)
        plan = RegionPlan(digest=graph_digest(gm, num_outputs), region=self._region())
        info = functorch.classify(gm, kwargs.get("static_lifetime_input_indices") or (), num_outputs)
        held = functorch.held_inputs(gm, info, num_outputs)
        elsewhere = {node.name for node in held}
        if refusal is None and not joint_inputs:
            refusal = "it is nested in another, which does not say which of its inputs are parameters"
        if not info.required_bw_nodes:
            refusal = "it has no backward"
        elif refusal is not None:
            log.warning("Adacc: a compiled region is left to torch.compile and keeps to no budget: %s", refusal)
        if refusal is not None:
            return self._plainly(gm, joint_inputs, kwargs, replace(plan, reason=refusal), elsewhere)
        joint = read_joint_graph(gm, info, held)
        saved = functorch.plain_saved(gm, info)
        plain = {value for node in saved if (value := joint.value_of(node)) is not None}
        # Torch may have forward make what backward alone reads, which is no value of ours.
        plain_bytes = sum(nbytes_of(root) for root in {root_of(node) for node in saved} - {*held})
        plan = replace(plan, plain_bytes=plain_bytes, stored_bytes=plain_bytes, peak_bytes=plain_bytes)
        known = self._known.get(plan.digest) or self._from_store(plan, joint)
        if known is None:
            plan = self._decide(joint, plan, plain, joint.values_behind(saved))
            if self._store is not None:
                self._store.save(self._decider(plan, joint), plan)
        else:
            plan = replace(known, region=plan.region, calls=None, code_bytes=None)
        if plan.reason:
            return self._plainly(gm, joint_inputs, kwargs, plan, elsewhere)
        stored = plan_for(joint, plan)
        saved = [joint.nodes[value] for value in stored]
        forward, backward = functorch.extract(gm, info, [*held, *saved], num_outputs)
        compress_saved(forward, backward, _codecs(joint, stored), num_outputs)
        keep_products_apart(backward)
        self._note_graphs(plan, forward.graph, backward.graph, elsewhere)
        return forward, backward

    def uuid(self) -> str:
        """What tells compile caches one partitioner from another: its source, its settings, and what it was given.

        A cache of cut graphs takes one for all sizes that its guards allow, and a cut keeps to its budget at those of
        its example.
        """
        return f"adacc_hf {_source_digest()} {self.config!r} {self._given!r} {self._example_sizes!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        """One given the same that has decided nothing yet: Inductor's cache pickles all settings for its key."""
        return type(self), (self.config, self._given, None, self._example_sizes)

    def _from_store(self, plan: RegionPlan, joint: JointGraph) -> RegionPlan | None:
        return None if self._store is None else self._store.load(self._decider(plan, joint), plan.digest)

    def _decider(self, plan: RegionPlan, joint: JointGraph) -> str:
        """What tells stored plans of one graph apart: prices differ from device to device.

        Where its sizes are dynamic, those of the example decide too.
        """
        devices = {device_name(node.meta["val"].device) for node in joint.nodes}
        return f"{self.uuid()} {plan.plain_bytes} {sorted(devices)}"

    def _decide(self, joint: JointGraph, plan: RegionPlan, plain: Set[int], behind: Set[int]) -> RegionPlan:
        """`plan` with what the solver chooses, or the reason for not asking it.

        `plain` is what torch would save, `behind` that and what the rest of it is made of, which backward alone has.
        """
        allowed_bytes = self.policy.allowed_bytes(plan.plain_bytes)
        tensors = tuple(
            replace(t, action=Action.RETAIN.value, stored_bytes=t.nbytes) for t in graph_tensors(joint, plain, {}, {})
        )
        if allowed_bytes is not None and allowed_bytes >= plan.plain_bytes:
            return replace(plan, tensors=tensors, reason="everything fits")
        graph = self._graph(joint)
        if allowed_bytes is None:
            choice = least_bytes(graph, self._limits(), of_peak=self._of_peak)
        else:
            choice = self._solve(graph, plan, allowed_bytes)
        if (choice.peak_bytes if self._of_peak else choice.nbytes) >= plan.plain_bytes:
            return replace(plan, tensors=tensors, reason="nothing takes less")
        return replace(
            plan,
            stored_bytes=choice.nbytes,
            peak_bytes=choice.peak_bytes,
            overhead_ms=choice.ms - keeping(graph, behind).ms,
            stored=tuple((joint.nodes[value].name, how) for value, how in choice.stored.items()),
            tensors=graph_tensors(joint, plain, choice.stored, choice.stored_bytes),
        )

    def _plainly(
        self, gm: Any, joint_inputs: Any, kwargs: dict[str, Any], plan: RegionPlan, elsewhere: Set[str]
    ) -> Any:
        forward, backward = functorch.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        self._note_graphs(plan, forward.graph, backward.graph, elsewhere)
        return forward, backward

    def _region(self) -> str:
        """The name of the region that is being partitioned."""
        function, compilation = functorch.compile_number()
        number = self._num_split[compilation]
        self._num_split[compilation] += 1
        return f"{function}.{number}" if number else function

    def _note_graphs(self, plan: RegionPlan, forward: fx.Graph, backward: fx.Graph, elsewhere: Set[str]) -> None:
        self._note(replace(plan, backward_bytes=most_live_bytes(backward, elsewhere)))
        given = {node.name for node in backward.find_nodes(op="placeholder")}
        self._graphs[-1].forward = graph_inputs(forward, set())
        self._graphs[-1].backward = graph_inputs(backward, given - elsewhere)

    def _note(self, plan: RegionPlan) -> None:
        self._graphs.append(_Graph(functorch.graph_number()))
        self.policy = replace(self.policy, regions=(*self.policy.regions, plan))
        log.info("Adacc: %s", plan.summary())

    def _graph(self, joint: JointGraph) -> GraphModel:
        """The program's data: operators priced, values with what keeping and coding them costs."""
        pairs = zip(joint.kind.operators, joint.operators, strict=True)
        times = [self._times.replay_ms(node) if operator.replayable else 0.0 for operator, node in pairs]
        may_replay = Action.RECOMPUTE in self.config.parsed_actions
        operators = tuple(
            replace(operator, ms=ms, replayable=operator.replayable and (may_replay or not operator.inputs))
            for operator, ms in zip(joint.kind.operators, times, strict=True)
        )
        store_ms = {index: keep_ms(node) for index, node in enumerate(joint.nodes)}
        degraded, sensitive = precision_sensitive_nodes(joint), precision_needs(joint)
        indices = range(len(joint.nodes))
        codecs = {index: graph_codec_options(joint, index, self.config, degraded, sensitive.fine) for index in indices}
        live_bytes = [nbytes_of(node) if is_held(node) else 0 for node in joint.nodes]
        kind = replace(joint.kind, operators=operators)
        return graph_model(kind, store_ms, codecs, live_bytes, sensitive.precise)

    def _limits(self) -> SolverLog:
        return SolverLog(gap=self.config.solver_gap, seconds=self.config.solver_seconds)

    def _solve(self, graph: GraphModel, plan: RegionPlan, allowed_bytes: int) -> GraphChoice:
        """The fastest choice within `allowed_bytes`; the smallest one, with a warning, where a share allows too little.

        A region knows nothing of the others: the one of the loss, say, saves little in all and can spare none of it.
        """
        solving = self._limits()
        choice = least_time(graph, allowed_bytes, solving, of_peak=self._of_peak)
        if choice is not None:
            return choice
        choice = least_bytes(graph, solving, of_peak=self._of_peak)
        if self.policy.budget_bytes is not None:
            needed_bytes = min(choice.peak_bytes, plan.plain_bytes)
            raise InfeasibleBudgetError(
                f"memory_budget={self.config.memory_budget!r} is what each compiled region may hold for its backward, "
                f"and region {plan.region} needs at least {format_bytes(needed_bytes)} with "
                f"actions={self.config.actions!r} (torch.compile would give it {format_bytes(plan.plain_bytes)}): give "
                f"at least that, allow more actions, or take a smaller batch",
                needed_bytes,
            )
        log.warning(
            "Adacc: a share of %r of the memory allows %s in a compiled region that torch.compile would give %s, and "
            "the least possible with actions=%r is %s: it is given that",
            self.policy.share,
            format_bytes(allowed_bytes),
            format_bytes(plan.plain_bytes),
            self.config.actions,
            format_bytes(min(choice.nbytes, plan.plain_bytes)),
        )
        return choice


@dataclass
class _Graph:
    """What is known of a region's graph beside its plan."""

    number: int | None
    """Torch's for it, if it has one."""
    forward: tuple[GraphInput, ...] = ()
    backward: tuple[GraphInput, ...] = ()
    """What forward and backward are given."""
    function: weakref.ref[type] | None = None
    """The function that autograd knows it by, once it was called; it holds the code, which may go at any time."""

    def code_bytes(self) -> tuple[int, int] | None:
        """Most that the code of forward and of backward has live; None where it cannot be known, or not yet."""
        function = None if self.function is None else self.function()
        forward = most_live_bytes_of_code(functorch.code_of(function, "compiled_fw"), self.forward)
        backward = most_live_bytes_of_code(functorch.code_of(function, "compiled_bw"), self.backward)
        return None if forward is None or backward is None else (forward, backward)


def _nothing_yet(config: AdaccConfig) -> CompiledPolicy:
    """A policy for the budget of `config`, without regions. Raises ValueError for one that needs steps measured."""
    budget = config.memory_budget
    if budget == "auto":
        raise ValueError(
            "memory_budget='auto': a compiled graph takes a float in (0, 1], the fraction of the bytes that "
            "torch.compile would save, or bytes that each graph may hold for its backward; 'auto' needs the steps of a "
            "run measured: give it to AdaccCallback and train with torch_compile=True"
        )
    if isinstance(budget, float):
        return CompiledPolicy(share=budget)
    return CompiledPolicy(
        share=None, budget_bytes=parse_bytes(budget, "memory_budget") if isinstance(budget, str) else budget
    )


def _codecs(joint: JointGraph, stored: Mapping[int, Choice]) -> dict[str, Codec]:
    return {joint.nodes[value].name: codec_of(how) for value, how in stored.items() if how.action is Action.COMPRESS}


@cache
def _source_digest() -> str:
    """A digest of all that decides: this package's files, the core's and the codecs'."""
    core = Path(__file__).parents[1]
    kernels = Path(get_codec.__code__.co_filename).parent
    files = sorted([*core.rglob("*.py"), *kernels.glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
