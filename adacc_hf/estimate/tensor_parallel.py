"""One rank's part of a fake model under Transformers' tensor parallelism (`DistributedConfig(tp_size=N)`).

The model's own plan (`tp_plan`) names a style for each layer. A layer of a style has a shard of the weight, and
collectives before and after its forward. Here the weights are cut to the shard's sizes, and collectives on fake tensors
allocate their results, as DTensor's do on a rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from adacc_hf.torch_glue.memory import distinct_bytes
from adacc_hf.torch_glue.private import all_gather, all_reduce, parameters_of

GROUP = "ranks of a tensor"
"""Name of a process group that does not exist. Collectives on fake tensors exchange nothing, so no group is needed."""


class _SumGradient(torch.autograd.Function):
    """Identity whose backward sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_reduce(gradient.contiguous(), GROUP)


class _Sum(torch.autograd.Function):
    """Sum over the ranks, whose gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return all_reduce(tensor.contiguous(), GROUP)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.view_as(gradient)


class _Gather(torch.autograd.Function):
    """Concatenation of the ranks' shards of the last dimension."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        by_rank = all_gather(tensor.contiguous(), num_ranks, GROUP)
        return torch.cat(by_rank.chunk(num_ranks), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.chunk(ctx.num_ranks, dim=-1)[0].clone(memory_format=torch.contiguous_format), None


class _Scatter(torch.autograd.Function):
    """This rank's shard of the last dimension. Backward gathers the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return tensor.chunk(num_ranks, dim=-1)[0].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        by_rank = all_gather(gradient.contiguous(), ctx.num_ranks, GROUP)
        return torch.cat(by_rank.chunk(ctx.num_ranks), dim=-1), None


class _LookUp(torch.autograd.Function):
    """Embedding whose vocabulary is sharded. Each rank looks up its own tokens, and the ranks sum their rows.

    In backward, DTensor computes the gradient of the whole vocabulary on each rank, and keeps it as the parameter's
    gradient. The optimizer reads this rank's shard.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, num_ranks: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_ranks, ctx.shard_rows = num_ranks, weight.shape[0]
        is_absent = ids < 0  # on a real rank, outside of its part of the vocabulary
        rows = nn.functional.embedding(ids.masked_fill(is_absent, 0), weight)
        return all_reduce(rows.masked_fill_(is_absent.unsqueeze(-1), 0), GROUP)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        num_rows = ctx.num_ranks * ctx.shard_rows
        whole = torch.ops.aten.embedding_dense_backward(gradient, ids, num_rows, -1, False)
        return None, whole[: ctx.shard_rows], None


Forward = Callable[[Tensor], Tensor]


def _colwise(layer: nn.Module, num_ranks: int) -> Forward:
    forward = _own_forward(layer)
    return lambda input: forward(_SumGradient.apply(input))


def _colwise_gather(layer: nn.Module, num_ranks: int) -> Forward:
    forward = _own_forward(layer)
    return lambda input: _Gather.apply(forward(_SumGradient.apply(input)), num_ranks)


def _rowwise(layer: nn.Module, num_ranks: int) -> Forward:
    forward = _own_forward(layer)
    return lambda input: _Sum.apply(forward(input))


def _rowwise_split(layer: nn.Module, num_ranks: int) -> Forward:
    forward = _own_forward(layer)
    return lambda input: _Sum.apply(forward(_Scatter.apply(input, num_ranks)))


def _vocabulary(layer: nn.Module, num_ranks: int) -> Forward:
    return lambda ids: _LookUp.apply(ids, layer.weight, num_ranks)


def _own_forward(layer: nn.Module) -> Forward:
    return partial(type(layer).forward, layer)


@dataclass(frozen=True)
class _Style:
    """Style of a layer in a plan: the dimension of the weight that is sharded, and the forward of a rank."""

    dimension: int | None
    """Sharded dimension of the weight. None if each rank has the whole weight."""
    shards_bias: bool
    forward: Callable[[nn.Module, int], Forward] | None
    """Function that returns the forward of a layer on one of N ranks. None if the layer's own forward runs."""


_STYLES: Mapping[str, _Style] = {
    "colwise": _Style(0, True, _colwise),
    "colwise_gather_output": _Style(0, True, _colwise_gather),
    "colwise_rep": _Style(0, True, _colwise_gather),
    "packed_colwise": _Style(0, True, _colwise),
    "rowwise": _Style(1, False, _rowwise),
    "rowwise_split_input": _Style(1, False, _rowwise_split),
    "rowwise_rep": _Style(1, False, _rowwise_split),
    "embedding_rowwise": _Style(0, False, _vocabulary),
    "replicated_with_grad_allreduce": _Style(None, False, None),  # sums gradients in place
    "replicate": _Style(None, False, None),
}
"""Styles of Transformers that are planned, by their names in a plan."""


def shard_model(model: PreTrainedModel, num_ranks: int) -> int:
    """Replace the weights of `model` by one rank's shards, and add the collectives of the model's `tp_plan`.

    Return the bytes of gradients that a rank holds in addition to those of its shards. Raises ValueError if the model
    has no plan or a plan with an unknown style, or if `num_ranks` does not divide the attention heads and every sharded
    dimension.
    """
    styles = _layer_styles(model, num_ranks)
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in styles}
    sizes = {
        layers[name].weight.shape[style.dimension] for name, style in styles.items() if style.dimension is not None
    }
    _check_sizes(model.config, sizes, num_ranks)
    shards: dict[Tensor, nn.Parameter] = {}  # tied layers share a shard
    for name, style in styles.items():
        layer = layers[name]
        for parameter_name, parameter in list(parameters_of(layer).items()):
            dimension = 0 if parameter_name == "bias" and style.shards_bias else style.dimension
            is_whole = parameter_name == "bias" and not style.shards_bias
            if parameter is not None and dimension is not None and not is_whole:
                if parameter not in shards:
                    shards[parameter] = _shard(parameter, dimension, num_ranks)
                parameters_of(layer)[parameter_name] = shards[parameter]
        if style.forward is not None:
            # A layer whose forward is replaced has no chunked head, as on a rank of Transformers.
            layer.__dict__["forward"] = style.forward(layer, num_ranks)
    # Autograd adds the gradient of another layer that has the same weight, and the sum is a shard.
    weights = [layer.weight for layer in layers.values() if isinstance(layer, nn.Linear)]
    embeddings = [layers[name].weight for name, style in styles.items() if style.forward is _vocabulary]
    untied = [embedding for embedding in embeddings if all(weight is not embedding for weight in weights)]
    return (num_ranks - 1) * distinct_bytes(untied)


def _layer_styles(model: PreTrainedModel, num_ranks: int) -> dict[str, _Style]:
    """Return the style of each layer of `model` that its plan names, by the layer's name."""
    plan = model.tp_plan
    if not plan:
        raise ValueError(
            f"--tp={num_ranks}: {type(model).__name__} has no plan for tensor parallelism (tp_plan): use --fsdp N or "
            f"--zero 3 N, which need none"
        )
    styles = {}
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None:
            continue
        if style not in _STYLES:
            raise ValueError(
                f"--tp={num_ranks}: the plan of {type(model).__name__} has the style {style} for {name}, and only "
                f"{', '.join(_STYLES)} are planned: use --fsdp N or --zero 3 N"
            )
        kind = nn.Embedding if _STYLES[style].forward is _vocabulary else nn.Linear
        if _STYLES[style].dimension is not None and type(module).forward is not kind.forward:
            raise ValueError(
                f"--tp={num_ranks}: {name} is of {type(module).__name__}, and only {kind.__name__} is planned for "
                f"{style}: use --fsdp N or --zero 3 N"
            )
        styles[name] = _STYLES[style]
    return styles


def _check_sizes(config: PretrainedConfig, sizes: set[int], num_ranks: int) -> None:
    text_config = config.get_text_config()
    counts = (getattr(text_config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    heads = {count for count in counts if count is not None}
    common = math.gcd(*sizes, *heads)
    if common % num_ranks:
        allowed = [str(number) for number in range(2, common + 1) if common % number == 0]
        choice = f"choose {' or '.join(allowed)}" if allowed else "use --fsdp N or --zero 3 N"
        raise ValueError(
            f"--tp={num_ranks} does not divide the model's attention heads {sorted(heads)} and the sizes "
            f"{sorted(sizes)} of its layers: {choice}"
        )


def _shard(parameter: nn.Parameter, dimension: int, num_ranks: int) -> nn.Parameter:
    shape = list(parameter.shape)
    shape[dimension] //= num_ranks
    return nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
