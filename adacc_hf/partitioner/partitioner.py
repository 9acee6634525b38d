"""The partitioner that AOTAutograd calls for every compiled region."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from adacc_hf.config import AdaccConfig
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.milp import KindModel
from adacc_hf.partitioner import functorch
from adacc_hf.partitioner.fused_cost import OperatorTimes, device_speed
from adacc_hf.partitioner.graph_codecs import codec_options
from adacc_hf.partitioner.joint_graph import JointGraph, nbytes_of, read_joint_graph, root_of
from adacc_hf.partitioner.program import GraphChoice, graph_model, least_bytes, least_time
from adacc_hf.partitioner.rewrite import compress_saved
from adacc_hf.policy import Action
from adacc_hf.program import SolverLog
from adacc_hf.units import format_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """What was decided for one compiled region."""

    plain_bytes: int
    """What torch's own partitioner would hand to backward, parameters left out."""
    budget_bytes: int
    stored_bytes: int
    overhead_ms: float
    """Replay, storing and codecs, as priced."""
    actions: dict[str, str] = field(default_factory=dict)
    """For each value handed over, by the name of its node: "retain" or the codec."""
    reason: str = ""
    """Why torch's own partition was taken, if it was."""


class AdaccPartitioner(CustomPartitionerFn):
    """Keeps, codes or recomputes every forward value of a region, within `memory_budget`.

    The budget is a fraction in (0, 1] of the bytes that torch's own partitioner would save; each region of a model gets
    that fraction of its own bytes. A region that fits is left as it is. `regions` has one `RegionPlan` per region that
    was partitioned in this process; what comes out of a compile cache is not partitioned again.
    """

    def __init__(self, config: AdaccConfig | None = None, **overrides: Any) -> None:
        self.config = (config or AdaccConfig(memory_budget=0.5)).with_overrides(**overrides)
        _check_budget(self.config.memory_budget)
        self.regions: list[RegionPlan] = []
        self._times = OperatorTimes()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        num_outputs = kwargs["num_fwd_outputs"]
        refusal = functorch.prepare(gm)
        info = functorch.classify(gm, kwargs.get("static_lifetime_input_indices") or (), num_outputs)
        if refusal is None and not info.required_bw_nodes:
            refusal = "it has no backward"
        if refusal is not None:
            return self._plainly(gm, joint_inputs, kwargs, RegionPlan(**_no_bytes(), reason=refusal))
        joint = read_joint_graph(gm, info)
        plain_bytes = _saved_bytes(joint, functorch.plain_saved(gm, info))
        budget_bytes = int(self.config.memory_budget * plain_bytes)
        if budget_bytes >= plain_bytes:
            plan = RegionPlan(
                plain_bytes=plain_bytes, budget_bytes=budget_bytes, stored_bytes=plain_bytes, overhead_ms=0.0
            )
            return self._plainly(gm, joint_inputs, kwargs, replace(plan, reason="everything fits"))
        choice = self._solve(self._model(joint), plain_bytes, budget_bytes)
        self.regions.append(_region_plan(joint, choice, plain_bytes, budget_bytes))
        log.info("Adacc: compiled region: %s", self.regions[-1])
        saved = [joint.nodes[value] for value in choice.stored]
        forward, backward = functorch.extract(
            gm, info, [*info.static_lifetime_input_nodes, *_integer_inputs(info), *saved], num_outputs
        )
        compress_saved(forward, backward, _codecs(joint, choice), num_outputs)
        return forward, backward

    def uuid(self) -> str:
        """What tells compile caches one partitioner from another: its source, and its settings."""
        return f"adacc_hf {_source_digest()} {self.config!r}"

    def _plainly(self, gm: Any, joint_inputs: Any, kwargs: dict[str, Any], plan: RegionPlan) -> Any:
        self.regions.append(plan)
        return functorch.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def _model(self, joint: JointGraph) -> KindModel:
        """The program's data: operators priced, values with what keeping and coding them costs."""
        operators = zip(joint.kind.operators, joint.operators, strict=True)
        times = [self._times.replay_ms(node) if operator.replayable else 0.0 for operator, node in operators]
        may_replay = Action.RECOMPUTE in self.config.parsed_actions
        operators = tuple(
            replace(operator, ms=ms, replayable=operator.replayable and (may_replay or not operator.inputs))
            for operator, ms in zip(joint.kind.operators, times, strict=True)
        )
        keep_ms = {index: _keep_ms(node) for index, node in enumerate(joint.nodes)}
        codecs = {index: codec_options(joint, index, self.config) for index in range(len(joint.nodes))}
        return graph_model(replace(joint.kind, operators=operators), keep_ms, codecs)

    def _solve(self, model: KindModel, plain_bytes: int, budget_bytes: int) -> GraphChoice:
        """The fastest choice within the budget; the smallest one, with a warning, in a region that cannot keep to it.

        A region knows nothing of the others: the one of the loss, say, saves little in all and can spare none of it.
        """
        solving = SolverLog()
        choice = least_time(model, budget_bytes, solving)
        if choice is not None:
            return choice
        choice = least_bytes(model, solving)
        log.warning(
            "Adacc: memory_budget=%r allows %s in a compiled region that torch.compile would give %s, and the least "
            "possible with actions=%r is %s: it is given that",
            self.config.memory_budget,
            format_bytes(budget_bytes),
            format_bytes(plain_bytes),
            self.config.actions,
            format_bytes(choice.nbytes),
        )
        return choice


def _check_budget(budget: Any) -> None:
    if not isinstance(budget, float):
        raise ValueError(
            f"memory_budget={budget!r}: a compiled graph takes a float in (0, 1], the fraction of the bytes that "
            f"torch.compile would save; sizes and 'auto' are for runs without torch.compile"
        )


def _no_bytes() -> dict[str, Any]:
    return {"plain_bytes": 0, "budget_bytes": 0, "stored_bytes": 0, "overhead_ms": 0.0}


def _saved_bytes(joint: JointGraph, saved: Sequence[fx.Node]) -> int:
    """Bytes of the storages of `saved`, each once."""
    return sum(nbytes_of(joint.nodes[value]) for value in {joint.value_of(node) for node in saved} - {None})


def _integer_inputs(info: functorch.NodeInfo) -> list[fx.Node]:
    """Inputs that the batch holds anyway."""
    inputs = [node for node in info.inputs if isinstance(node.meta.get("val"), torch.Tensor)]
    return [n for n in inputs if n not in info.static_lifetime_input_nodes and not n.meta["val"].is_floating_point()]


def _keep_ms(node: fx.Node) -> float:
    """Time to write a value in forward and read it in backward; what a product made is written in any case."""
    is_written = node.op == "placeholder" or not functorch.op_types().is_fusible(root_of(node))
    return device_speed(node.meta["val"].device).moving_ms(nbytes_of(node) * (1 if is_written else 2))


def _region_plan(joint: JointGraph, choice: GraphChoice, plain_bytes: int, budget_bytes: int) -> RegionPlan:
    return RegionPlan(
        plain_bytes=plain_bytes,
        budget_bytes=budget_bytes,
        stored_bytes=choice.nbytes,
        overhead_ms=choice.ms,
        actions={joint.nodes[v].name: choice.codec or "retain" for v, choice in choice.stored.items()},
    )


def _codecs(joint: JointGraph, choice: GraphChoice) -> dict[str, Codec]:
    return {
        joint.nodes[value].name: get_codec(how.codec, **dict(how.options))
        for value, how in choice.stored.items()
        if how.action is Action.COMPRESS
    }


def _source_digest() -> str:
    """A digest of this package's files and of the codecs."""
    here = Path(__file__).parent
    kernels = Path(get_codec.__code__.co_filename).parent
    files = sorted([*here.glob("*.py"), *kernels.glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
