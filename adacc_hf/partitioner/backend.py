"""The backend of torch.compile that is called "adacc": Inductor with our partitioner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from adacc_hf.config import AdaccConfig
from adacc_hf.partitioner.functorch import hint
from adacc_hf.partitioner.partitioner import GRAPH_SETTINGS, AdaccPartitioner
from adacc_hf.partitioner.plan_store import PlanStore


def adacc(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one region: `torch.compile(model, backend="adacc", options={"memory_budget": 0.5})`.

    `options` are the fields of `AdaccConfig` in `GRAPH_SETTINGS`, and settings of Inductor's
    (`torch._inductor.list_options()`); `mode` is one of Inductor's, which torch takes in place of options only. A
    `memory_budget` that is a float is a fraction of what torch.compile would save. One in bytes, such as "300MiB",
    bounds what the region holds for its backward at any time: what it stores, with what is remade meanwhile;
    parameters, gradients, the optimizer and other regions are not in it.
    A region is compiled without knowing the others or how often it is called, so each gets the whole of it: with graph
    breaks, or with blocks compiled one by one, that is not the model's budget. AdaccCallback with `torch_compile=True`
    counts calls and measures steps, and keeps the whole step to a budget.

    Raises ValueError for an option that there is not, or a value out of range, and InfeasibleBudgetError, which Dynamo
    shows as the cause of its BackendCompilerFailed, for bytes that the region cannot keep to.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    ours, inductors = _split(options or {})
    config = AdaccConfig(**{"memory_budget": 0.5, **ours})
    sizes = tuple(hint(size) for size in inputs if isinstance(size, torch.SymInt))
    partitioner = AdaccPartitioner(config, store=PlanStore(), example_sizes=sizes)
    of_mode = {} if mode is None else list_mode_options(mode)
    return compile_fx(module, inputs, config_patches={**of_mode, **inductors, "custom_partitioner_fn": partitioner})


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that graphs are cut by, and those that are settings of Inductor's."""
    from torch._inductor import config as inductor

    if not isinstance(options, Mapping):
        raise ValueError(
            f"options={options!r} is a {type(options).__name__}, not a dict: write options={{'memory_budget': 0.5}}"
        )
    ours = {name: value for name, value in options.items() if name in GRAPH_SETTINGS}
    rest = {name: value for name, value in options.items() if name not in GRAPH_SETTINGS}
    unknown = [name for name in rest if name not in inductor.get_config_copy()]
    if unknown:
        raise ValueError(
            f"options={unknown!r} have no meaning for backend 'adacc': choose from {', '.join(GRAPH_SETTINGS)}, or "
            f"from Inductor's settings, which torch._inductor.list_options() names"
        )
    return ours, rest
