"""AdamW for linear layers that train in random subspaces (CompAct, algorithms 2 and 3), and its factory."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.trainer_utils import check_target_module_exists

from adacc_hf.compact.layer import CLASSES, CompactLayer, InputGroup, Plain, derive_seed, make_compact, make_plain
from adacc_hf.run.block_search import find_blocks
from adacc_hf.torch_glue.compat import class_name
from adacc_hf.torch_glue.zero3 import is_partitioned

log = logging.getLogger(__name__)


class CompactAdamW(torch.optim.AdamW):
    """AdamW for models with compact layers, which are linear layers that train in random subspaces.

    The optimizer updates each layer's `core` [m, r], and adds the update to the layer's weight [m, n].

    The moments of `core` take 2 m r numbers per layer. Another subspace is drawn every `update_proj_gap` steps, and the
    moments are kept for the new subspace. Weight decay applies to the weight. The parameter group of the cores contains
    the additional entries "scale" and "steps" (a count). The step is fused, and so allocates no temporaries, unless
    `fused=False`, `foreach`, `capturable` or `differentiable` is set.
    """

    def __init__(
        self, params: Iterable[Any], layers: Sequence[CompactLayer], update_proj_gap: int = 50, **settings: Any
    ) -> None:
        self.layers = list(layers)
        self.update_proj_gap = update_proj_gap
        if not any(settings.get(other) for other in ("foreach", "capturable", "differentiable")):
            settings = {"fused": True} | settings
        super().__init__(params, **settings)
        # A fused step handles infinite gradients of GradScaler itself, and then does nothing. But the weights of
        # compact layers would still decay, so GradScaler must skip these steps, as for optimizers that are not fused.
        self._step_supports_amp_scaling = False
        # In a hook, because the trial step that predicts the size of the optimizer's state must not run the check.
        self.register_step_pre_hook(_check_cores)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run a step of AdamW, and update the weights of compact layers. Raises ValueError if the optimizer lacks the
        `core` of a compact layer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [group for group in self.param_groups if "scale" in group]
        stepping = [
            (layer, group["scale"], group["lr"] * group["weight_decay"])
            for group, layer in self._grouped_layers()
            if layer.core.grad is not None
        ]
        decays = [group["weight_decay"] for group in groups]
        for group in groups:
            group["weight_decay"] = 0.0  # because cores are zero
            # Counted on the host, because AdamW's own step counts may be on a device.
            group["steps"] = group.get("steps", 0) + 1
        for layer, _, _ in stepping:
            layer.allocate_core()
        try:
            _ADAMW_STEP(self)
        finally:
            for group, decay in zip(groups, decays, strict=True):
                group["weight_decay"] = decay
        for layer, scale, decay in stepping:
            layer.weight.mul_(1.0 - decay)
            layer.apply_core(scale)
        self._begin_periods()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer, and continue in the subspace that was in use when the state was saved."""
        super().load_state_dict(state_dict)
        self._begin_periods()

    def remove(self) -> None:
        """Convert the compact layers back to plain layers. Further calls have no effect."""
        while self.layers:
            make_plain(self.layers.pop())

    def _begin_periods(self) -> None:
        """Set the period of each group of compact layers for the next step."""
        for group, layer in self._grouped_layers():
            layer.group.period = group.get("steps", 0) // self.update_proj_gap

    def _grouped_layers(self) -> Iterator[tuple[dict[str, Any], CompactLayer]]:
        """Yield (parameter group with the core, layer) for each compact layer whose `core` this optimizer trains. A
        copy that measures the memory of the optimizer's state trains other parameters, and yields nothing."""
        by_core = {id(layer.core): layer for layer in self.layers}
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in by_core:
                    yield group, by_core[id(parameter)]


def _check_cores(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise ValueError, as a hook before each step, if the optimizer lacks the `core` of any compact layer."""
    parameter_ids = {id(core) for group in optimizer.param_groups for core in group["params"]}
    num_missing = sum(id(layer.core) not in parameter_ids for layer in optimizer.layers)
    if num_missing:
        raise ValueError(
            f"CompAct's optimizer does not have the cores of {num_missing} of {len(optimizer.layers)} layers any more, "
            f"and these layers would not train: fully_shard or DeepSpeed has replaced the cores. Let Accelerate (or "
            f"the Trainer) prepare model and optimizer together, or train with DDP"
        )


_ADAMW_STEP: Any = torch.optim.AdamW.step
if getattr(_ADAMW_STEP, "hooked", False):
    _ADAMW_STEP = _ADAMW_STEP.__wrapped__  # without the wrapper that torch adds to run optimizer hooks


# Factory for the Trainer: selection of layers, and their settings.

ALL_LINEAR = "all-linear"
ATTENTION_OUTPUT = re.compile(
    r"(.*\.)?((self_attn|attn|attention|self_attention)\.(o_proj|out_proj|c_proj|dense|out_lin)|"
    r"attention\.output\.dense|(SelfAttention|EncDecAttention)\.o)"
)
"""Pattern of the names of attention's output projection in Transformers' models. This layer is not made compact,
because fused attention saves the layer's input for its own backward anyway."""


class CompactFactory:
    """Factory of CompAct's optimizer, which also makes linear layers of the model compact.

    A compact layer saves a random projection of its input, and trains in the subspace of this projection.

    Usage: `Trainer(optimizer_cls_and_kwargs=(CompactFactory, {"target_modules": "all-linear", "rank": 0.25}))`.
    """

    def __call__(
        self,
        model: nn.Module,
        target_modules: str | Collection[str] = ALL_LINEAR,
        rank: float | int = 0.25,
        update_proj_gap: int = 50,
        scale: float = 0.25,
        seed: int = 0,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        **adamw: Any,
    ) -> CompactAdamW:
        """Make the target layers compact, until the optimizer's `remove()` is called, and return the optimizer. Layers
        that read the same input share a projection (q, k and v; gate and up).

        Args:
            target_modules: "all-linear" for every linear layer of the blocks except attention's output projection, or
                a value as in `TrainingArguments(optim_target_modules=...)`: a regular expression, or parts of names.
            rank: a fraction of each layer's inputs (float, above 0 and at most 1), or a number of inputs (int).
            update_proj_gap: number of steps after which another subspace is drawn.
            scale: the paper's alpha, the factor of the weight's update.
            seed: seed of all projections.
            lr, weight_decay, adamw: as in torch.optim.AdamW, for all parameters.

        Raises ValueError for settings out of range, and for layers whose weights are not supported.
        """
        _check_compact_settings(rank, update_proj_gap, scale)
        layers = dict(_target_layers(model, target_modules))
        if not layers:
            raise ValueError(
                f"target_modules={target_modules!r} names no linear layer of {type(model).__name__} that is trained: "
                f"use 'all-linear', a regular expression, or parts of the names in model.named_modules()"
            )
        ranks = {name: _subspace_rank(name, layer, rank) for name, layer in layers.items()}
        groups: dict[str, InputGroup] = {}
        compact_layers: list[CompactLayer] = []
        for name, layer in layers.items():
            key = f"{name.rpartition('.')[0]} {ranks[name]} of {_num_layer_inputs(layer)}"
            if key not in groups:
                groups[key] = InputGroup(derive_seed(seed, key))
            compact_layers.append(make_compact(layer, ranks[name], groups[key]))
        try:
            parameter_groups = _parameter_groups(model, compact_layers, scale, weight_decay)
            return CompactAdamW(parameter_groups, compact_layers, update_proj_gap, lr=lr, **adamw)
        except BaseException:
            for compact in compact_layers:
                make_plain(compact)
            raise


def parse_rank(text: str, option: str) -> float | int:
    """Parse CompAct's rank from a command-line `option`: a number of inputs, or a fraction of them. Raises ValueError
    for another text."""
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise ValueError(
            f"{option}={text} must be a fraction of a layer's inputs, such as 0.25, or a number of them"
        ) from None


def _check_compact_settings(rank: float | int, gap: int, scale: float) -> None:
    if isinstance(rank, bool) or not (0 < rank <= 1 if isinstance(rank, float) else isinstance(rank, int) and rank > 0):
        raise ValueError(
            f"rank={rank!r} must be a fraction of a layer's inputs, above 0.0 and at most 1.0, or a number of inputs"
        )
    if isinstance(gap, bool) or not isinstance(gap, int) or gap < 1:
        raise ValueError(f"update_proj_gap={gap!r} must be a number of steps, 1 or more")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale!r} must be a number above 0; the paper pretrains with 0.25")


def _target_layers(model: nn.Module, target_modules: str | Collection[str]) -> Iterator[tuple[str, Plain]]:
    if any(hasattr(module, "peft_config") for module in model.modules()):
        raise ValueError("CompAct trains full weights, but the model has PEFT adapters: use one or the other")
    is_all = isinstance(target_modules, str) and target_modules.replace("_", "-") == ALL_LINEAR
    blocks = tuple(f"{name}." for name, _ in find_blocks(model)) if is_all else ()
    get_head = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    full_layers: list[str] = []
    for name, layer in model.named_modules():
        is_target = name.startswith(blocks) if is_all else check_target_module_exists(target_modules, name)
        if not is_target or not isinstance(layer, (nn.Linear, Conv1D)):
            continue
        if not (layer.weight.requires_grad or _is_quantized_weight(layer.weight)):
            continue
        if layer is head or (is_all and ATTENTION_OUTPUT.fullmatch(name)):
            full_layers.append(re.sub(r"\d+", "*", name))
            continue
        _check_weight(name, layer, uses)
        yield name, layer
    if full_layers:
        log.warning(
            "CompAct: layers not compact, trained in full: %s. The reason: fused attention stores the input of its "
            "output projection in any case, and the head is not compressed. To train other layers in full too, name "
            "the compact ones in target_modules",
            ", ".join(dict.fromkeys(full_layers)),
        )


def _check_weight(name: str, module: Plain, uses: Mapping[int, int]) -> None:
    weight = module.weight
    where = f"CompAct cannot train {name} ({class_name(module)})"
    if is_partitioned(weight) or hasattr(weight, "to_local"):
        raise ValueError(
            f"{where}: its weight is sharded over several ranks (ZeRO 3, tensor parallelism, or FSDP applied before "
            f"this optimizer was created): train with DDP, or with FSDP2 applied after this optimizer, as the Trainer "
            f"does"
        )
    if _is_quantized_weight(weight):
        raise ValueError(f"{where}: its weight is quantized and not trained; train adapters on it (PEFT) instead")
    if type(module) not in CLASSES:
        raise ValueError(f"{where}: only nn.Linear and Conv1D are supported; leave it out of target_modules")
    if uses[id(weight)] > 1:
        raise ValueError(f"{where}: another module has the same weight (tied); leave both out of target_modules")


def _is_quantized_weight(weight: Tensor) -> bool:
    is_wrapped = hasattr(weight, "__tensor_flatten__") and not hasattr(weight, "to_local")
    return not weight.is_floating_point() or is_wrapped or hasattr(weight, "quant_state")


def _num_layer_inputs(layer: Plain) -> int:
    return layer.weight.shape[1 if isinstance(layer, nn.Linear) else 0]


def _subspace_rank(name: str, layer: Plain, rank: float | int) -> int:
    """Return the dimension of the layer's subspace. `rank` is a fraction of the inputs, or a number of inputs."""
    inputs = _num_layer_inputs(layer)
    if isinstance(rank, float):
        return max(1, round(rank * inputs))
    if rank > inputs:
        raise ValueError(
            f"rank={rank} is more than the {inputs} inputs of {name}: use at most that, or a fraction as a float"
        )
    return rank


def _parameter_groups(
    model: nn.Module, layers: list[CompactLayer], scale: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Return the parameter groups that the Trainer would make for the optimizer (matrices, with weight decay; biases
    and norms, without), and one more group for the cores."""
    cores = [layer.core for layer in layers]
    core_ids = {id(core) for core in cores}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in core_ids]
    decayed, others = [p for p in rest if p.ndim > 1], [p for p in rest if p.ndim <= 1]
    groups = [
        {"params": cores, "scale": scale, "weight_decay": weight_decay},
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
