"""Backend "adacc" of torch.compile, and installation of Adacc's partitioner into torch for all compiled models.

The partitioner is installed in Inductor's configuration, as `torch._inductor.config.custom_partitioner_fn`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.compiler.compiled_policy import PlanStore
from adacc_hf.compiler.functorch import compile_by_inductor, functorch_config, hint, inductor_config, options_of_mode
from adacc_hf.compiler.partitioner import GRAPH_SETTINGS, AdaccPartitioner


def adacc(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one region (graph) of a model. torch.compile calls this function.

    Usage: `torch.compile(model, backend="adacc", options={"memory_budget": 0.5})`.

    `options` are the fields of `AdaccConfig` in `GRAPH_SETTINGS`, and Inductor's settings
    (`torch._inductor.list_options()`). `mode` is one of Inductor's modes, which torch accepts only without options. A
    `memory_budget` that is a float is a fraction of the bytes that plain torch.compile would store for backward. A
    budget in bytes, such as "300MiB", bounds the memory that the region holds for its backward at any time: stored and
    recomputed values. Parameters, gradients, optimizer state and other regions are not included. Each region may use
    the whole budget, because the other regions and the number of calls are unknown when a region is compiled. With
    graph breaks, or with blocks compiled one by one, the whole model can therefore exceed the budget. AdaccCallback
    with `torch_compile=True` counts calls, measures steps, and keeps the whole step within a budget.

    Raises ValueError for an unknown option or a value out of range. Raises InfeasibleBudgetError if the region cannot
    stay within a budget in bytes; Dynamo shows this error as the cause of its BackendCompilerFailed.
    """
    adacc_options, inductor_options = _split_backend_options(options or {})
    config = AdaccConfig(**{"memory_budget": 0.5, **adacc_options})
    sizes = tuple(hint(size) for size in inputs if isinstance(size, torch.SymInt))
    partitioner = AdaccPartitioner(config, store=PlanStore(), example_sizes=sizes)
    mode_options = {} if mode is None else options_of_mode(mode)
    settings = {**mode_options, **inductor_options, "custom_partitioner_fn": partitioner}
    return compile_by_inductor(module, inputs, settings)


def _split_backend_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the `options` of torch.compile into fields of `AdaccConfig` and settings of Inductor. Raises ValueError for
    an unknown option."""
    if not isinstance(options, Mapping):
        raise ValueError(
            f"options={options!r} is of type {type(options).__name__}: give a dict, options={{'memory_budget': 0.5}}"
        )
    adacc_options = {name: value for name, value in options.items() if name in GRAPH_SETTINGS}
    inductor_options = {name: value for name, value in options.items() if name not in GRAPH_SETTINGS}
    unknown = [name for name in inductor_options if name not in inductor_config.get_config_copy()]
    if unknown:
        raise ValueError(
            f"options={unknown!r} are unknown to backend 'adacc': choose from {', '.join(GRAPH_SETTINGS)}, or from "
            f"Inductor's settings (torch._inductor.list_options())"
        )
    return adacc_options, inductor_options


# Installation of the partitioner in torch's settings, for models that other code compiles.


class InstalledPartitioner:
    """Installation of a partitioner for every graph that Inductor compiles, until `remove` is called.

    Installing and removing drop all compiled code, which torch compiles again at the next call. AOTAutograd's cache is
    off while the partitioner is installed, because the cache would return partitioned graphs without plans. Inductor's
    cache of generated code stays on (see `PlanStore`). Raises ValueError if a custom partitioner is already registered
    with torch.
    """

    def __init__(self, partitioner: AdaccPartitioner) -> None:
        if inductor_config.custom_partitioner_fn is not None:
            raise ValueError(
                f"torch._inductor.config.custom_partitioner_fn={inductor_config.custom_partitioner_fn!r} is set, and "
                f"Adacc needs this setting for its own partitioner: set it to None"
            )
        self.partitioner = partitioner
        inductor_config.custom_partitioner_fn = partitioner
        self._cache_was_on, functorch_config.enable_autograd_cache = functorch_config.enable_autograd_cache, False
        self._num_counted = 0
        self.compile_again()

    def compile_again(self) -> None:
        """Drop all compiled code, so that torch compiles each function again at the function's next call."""
        self._num_counted = 0
        torch.compiler.reset()

    def count_calls(self, loss: Tensor) -> None:
        """Count how often the forward that computed `loss` called each compiled graph, and record the counts. Do
        nothing if no graph was compiled since the last count."""
        num_regions = len(self.partitioner.policy.regions)
        if loss.grad_fn is not None and num_regions != self._num_counted:
            self.partitioner.count_calls(loss)
            self._num_counted = num_regions

    def remove(self) -> None:
        """Uninstall the partitioner. Further calls have no effect."""
        if inductor_config.custom_partitioner_fn is self.partitioner:
            inductor_config.custom_partitioner_fn = None
            functorch_config.enable_autograd_cache = self._cache_was_on
            self.compile_again()
