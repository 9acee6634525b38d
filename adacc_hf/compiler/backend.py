"""The backend of torch.compile that is called "adacc", and our partitioner as torch's own setting."""

from __future__ import annotations

import logging
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
    """Compile one region: `torch.compile(model, backend="adacc", options={"memory_budget": 0.5})`.

    `options` are the fields of `AdaccConfig` in `GRAPH_SETTINGS`, and settings of Inductor's
    (`torch._inductor.list_options()`); `mode` is one of Inductor's, which torch takes in place of options only. A
    `memory_budget` that is a float is a fraction of what torch.compile would save. One in bytes, such as "300MiB",
    bounds what the region holds for its backward at any time: what it stores, with what is recomputed meanwhile;
    parameters, gradients, the optimizer and other regions are not in it.
    A region is compiled without knowing the others or how often it is called, so each gets the whole of it: with graph
    breaks, or with blocks compiled one by one, that is not the model's budget. AdaccCallback with `torch_compile=True`
    counts calls and measures steps, and keeps the whole step to a budget.

    Raises ValueError for an option that there is not, or a value out of range, and InfeasibleBudgetError, which Dynamo
    shows as the cause of its BackendCompilerFailed, for bytes that the region cannot keep to.
    """
    ours, inductors = _split(options or {})
    config = AdaccConfig(**{"memory_budget": 0.5, **ours})
    sizes = tuple(hint(size) for size in inputs if isinstance(size, torch.SymInt))
    partitioner = AdaccPartitioner(config, store=PlanStore(), example_sizes=sizes)
    of_mode = {} if mode is None else options_of_mode(mode)
    return compile_by_inductor(module, inputs, {**of_mode, **inductors, "custom_partitioner_fn": partitioner})


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that graphs are cut by, and those that are settings of Inductor's."""
    if not isinstance(options, Mapping):
        raise ValueError(
            f"options={options!r} is a {type(options).__name__}, not a dict: write options={{'memory_budget': 0.5}}"
        )
    ours = {name: value for name, value in options.items() if name in GRAPH_SETTINGS}
    rest = {name: value for name, value in options.items() if name not in GRAPH_SETTINGS}
    unknown = [name for name in rest if name not in inductor_config.get_config_copy()]
    if unknown:
        raise ValueError(
            f"options={unknown!r} have no meaning for backend 'adacc': choose from {', '.join(GRAPH_SETTINGS)}, or "
            f"from Inductor's settings, which torch._inductor.list_options() names"
        )
    return ours, rest


# The partitioner as torch's setting, for models that are compiled by someone else.

log = logging.getLogger(__name__)


class InstalledPartitioner:
    """Cuts every region that Inductor compiles, until it is removed.

    Code that was compiled before is dropped, and so is what was compiled meanwhile when it is removed: torch compiles
    it again when it is called. AOTAutograd's cache, which would bring back partitioned graphs without their plans, is
    off meanwhile; Inductor's, which has the code of each graph, is not (see `PlanStore`). Raises ValueError if torch
    has a partitioner of the user's.
    """

    def __init__(self, partitioner: AdaccPartitioner) -> None:
        if inductor_config.custom_partitioner_fn is not None:
            raise ValueError(
                f"torch._inductor.config.custom_partitioner_fn={inductor_config.custom_partitioner_fn!r} is set: Adacc "
                f"is such a partitioner itself, and two cannot cut one graph; set it to None"
            )
        self.partitioner = partitioner
        inductor_config.custom_partitioner_fn = partitioner
        self._cache_was_on, functorch_config.enable_autograd_cache = functorch_config.enable_autograd_cache, False
        self._num_counted = 0
        self._num_seen = 0
        self.compile_again()

    def compile_again(self) -> None:
        """Let everything be compiled anew at its next call."""
        self._num_counted = self._num_seen = 0
        torch.compiler.reset()

    def count_calls(self, loss: Tensor) -> None:
        """Let the policy know how often each region is called, if regions were compiled since it was counted last."""
        num_regions = len(self.partitioner.policy.regions)
        if loss.grad_fn is not None and num_regions != self._num_counted:
            self.partitioner.count_calls(loss)
            self._num_counted = num_regions

    def look_at_code(self) -> None:
        """After a step whose calls were counted: let the policy know what the code has live, if there is new code."""
        num_regions = len(self.partitioner.policy.regions)
        if num_regions == self._num_counted != self._num_seen:
            self.partitioner.look_at_code()
            self._num_seen = num_regions

    def remove(self) -> None:
        """Harmless when removed already."""
        if inductor_config.custom_partitioner_fn is self.partitioner:
            inductor_config.custom_partitioner_fn = None
            functorch_config.enable_autograd_cache = self._cache_was_on
            self.compile_again()
