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


Collective = Callable[[Tensor, int], Tensor]
"""Function of (a rank's tensor, number of ranks)."""


def _copied(tensor: Tensor, num_ranks: int) -> Tensor:
    return tensor.view_as(tensor)


def _summed(tensor: Tensor, num_ranks: int) -> Tensor:
    return all_reduce(tensor.contiguous(), GROUP)


def _gathered(shard: Tensor, num_ranks: int) -> Tensor:
    """Return the concatenation of the ranks' shards of the last dimension."""
    return torch.cat(all_gather(shard.contiguous(), num_ranks, GROUP).chunk(num_ranks), dim=-1)


def _own_shard(tensor: Tensor, num_ranks: int) -> Tensor:
    return tensor.chunk(num_ranks, dim=-1)[0].clone(memory_format=torch.contiguous_format)


def _differentiable(forward: Collective, backward: Collective) -> Collective:
    """Return `forward` with `backward` as the collective of its gradient."""

    class CollectiveFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, num_ranks: int) -> Tensor:
            ctx.num_ranks = num_ranks
            return forward(tensor, num_ranks)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return backward(gradient, ctx.num_ranks), None

    return CollectiveFunction.apply


_sum_gradient = _differentiable(_copied, _summed)
_sum = _differentiable(_summed, _copied)
_gather = _differentiable(_gathered, _own_shard)
_scatter = _differentiable(_own_shard, _gathered)


class _LookUp(torch.autograd.Function):
    """Embedding whose vocabulary is sharded. As DTensor, backward computes the whole gradient on each rank."""

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


@dataclass(frozen=True)
class _Style:
    """Style of a layer in a plan: the dimension of the weight that is sharded, and collectives around the forward."""

    dimension: int | None = None
    """Sharded dimension of the weight. None if each rank has the whole weight."""
    shards_bias: bool = False
    before: Collective = _copied
    after: Collective = _copied
    is_embedding: bool = False

    def forward_of(self, layer: Any, num_ranks: int) -> Callable[[Tensor], Tensor]:
        """Return the forward of `layer` on a rank."""
        if self.is_embedding:
            return lambda ids: _LookUp.apply(ids, layer.weight, num_ranks)
        own_forward = partial(type(layer).forward, layer)

        def forward(states: Tensor) -> Tensor:
            states = states if self.before is _copied else self.before(states, num_ranks)
            states = own_forward(states)
            return states if self.after is _copied else self.after(states, num_ranks)

        return forward


_COLWISE = _Style(0, shards_bias=True, before=_sum_gradient)
_COLWISE_GATHER = _Style(0, shards_bias=True, before=_sum_gradient, after=_gather)
_ROWWISE_SPLIT = _Style(1, before=_scatter, after=_sum)
_STYLES: Mapping[str, _Style] = {
    "colwise": _COLWISE,
    "packed_colwise": _COLWISE,
    "colwise_gather_output": _COLWISE_GATHER,
    "colwise_rep": _COLWISE_GATHER,
    "rowwise": _Style(1, after=_sum),
    "rowwise_split_input": _ROWWISE_SPLIT,
    "rowwise_rep": _ROWWISE_SPLIT,
    "embedding_rowwise": _Style(0, is_embedding=True),
    "replicated_with_grad_allreduce": _Style(),  # sums gradients in place
    "replicate": _Style(),
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
        if style.dimension is not None:
            # A layer whose forward is replaced has no chunked head, as on a rank of Transformers.
            layer.__dict__["forward"] = style.forward_of(layer, num_ranks)
    # Autograd adds the gradient of another layer that has the same weight, and the sum is a shard.
    weights = [layer.weight for layer in layers.values() if isinstance(layer, nn.Linear)]
    embeddings = [layers[name].weight for name, style in styles.items() if style.is_embedding]
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
        kind = nn.Embedding if _STYLES[style].is_embedding else nn.Linear
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
