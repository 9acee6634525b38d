"""AdamW in the subspaces of compact layers (CompAct, algorithms 2 and 3), as the Trainer takes an optimizer."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.trainer_utils import check_target_module_exists

from adacc_hf.compact.layer import (
    CLASSES,
    PROJECTIONS,
    CompactLayer,
    InputGroup,
    Plain,
    make_compact,
    make_plain,
    mixed,
)
from adacc_hf.run.blocks import find_blocks
from adacc_hf.torch_glue.compat import class_name

log = logging.getLogger(__name__)


class CompactAdamW(torch.optim.AdamW):
    """AdamW, whose step on a compact layer's `core` [m, r] is carried over to its weight [m, n].

    Moments are of the subspace, 2 m r numbers a layer, and stay as they are when every `update_proj_gap` steps another
    subspace is drawn. Weight decay is the weight's. Groups with a "scale" hold the cores of `layers`, in order, and
    count their "steps". The step is fused, which makes no temporaries, unless `fused`, `foreach`, `capturable` or
    `differentiable` say otherwise.
    """

    def __init__(
        self, params: Iterable[Any], layers: Sequence[CompactLayer], update_proj_gap: int = 50, **settings: Any
    ) -> None:
        self.layers = list(layers)
        self.update_proj_gap = update_proj_gap
        if not any(settings.get(other) for other in ("foreach", "capturable", "differentiable")):
            settings = {"fused": True} | settings
        super().__init__(params, **settings)
        # A fused step finds by itself that GradScaler's gradients are infinite, and does nothing. Weights of compact
        # layers would decay all the same, so that GradScaler is to leave such a step out, as it does with others.
        self._step_supports_amp_scaling = False
        # A hook, which a step on stand-ins that tells what state is to come leaves out.
        self.register_step_pre_hook(_check_cores)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of AdamW, and then of the weights of compact layers.

        Raises ValueError where layers have got other cores than those that the optimizer has.
        """
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
            group["weight_decay"] = 0.0  # a core is zero
            # On the host, where what is counted for each parameter may be on a device.
            group["steps"] = group.get("steps", 0) + 1
        for layer, _, _ in stepping:
            layer.hold()
        try:
            _BARE_STEP(self)
        finally:
            for group, decay in zip(groups, decays, strict=True):
                group["weight_decay"] = decay
        for layer, scale, decay in stepping:
            layer.weight.mul_(1.0 - decay)
            layer.take(scale)
        self._begin_periods()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was saved, in the subspace of that step."""
        super().load_state_dict(state_dict)
        self._begin_periods()

    def remove(self) -> None:
        """Make the layers plain again. Harmless when called again."""
        while self.layers:
            make_plain(self.layers.pop())

    def _begin_periods(self) -> None:
        """Draw the subspaces of the period that the next step belongs to."""
        for group, layer in self._grouped_layers():
            layer.group.period = group.get("steps", 0) // self.update_proj_gap

    def _grouped_layers(self) -> Iterator[tuple[dict[str, Any], CompactLayer]]:
        """Each layer with the group that has its core. None of a copy that steps on stand-ins."""
        by_core = {id(layer.core): layer for layer in self.layers}
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in by_core:
                    yield group, by_core[id(parameter)]


def _check_cores(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise ValueError for layers that would not train, because their cores are not the optimizer's."""
    known = {id(core) for group in optimizer.param_groups for core in group["params"]}
    missing = sum(id(layer.core) not in known for layer in optimizer.layers)
    if missing:
        raise ValueError(
            f"CompAct's optimizer does not have the cores of {missing} of {len(optimizer.layers)} layers any more, and "
            f"they would not train: fully_shard, or DeepSpeed, has put others in their places. Let Accelerate (or the "
            f"Trainer) prepare model and optimizer together, or train with DDP"
        )


def _bare(step: Any) -> Callable[..., Any]:
    """`step` without the hooks of an optimizer, which torch puts around that of every class in use."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


_BARE_STEP = _bare(torch.optim.AdamW.step)


# How the Trainer takes it: which layers are made compact, and with what.

ALL_LINEAR = "all-linear"
ATTENTION_OUTPUT = re.compile(
    r"(.*\.)?((self_attn|attn|attention|self_attention)\.(o_proj|out_proj|c_proj|dense|out_lin)|"
    r"attention\.output\.dense|(SelfAttention|EncDecAttention)\.o)"
)
"""Attention's output projection, by the names of Transformers' models: fused attention holds its input anyway."""


class CompactFactory:
    """Makes a model's linear layers compact and returns the optimizer for all of it.

    `Trainer(optimizer_cls_and_kwargs=(CompactFactory, {"target_modules": "all-linear", "rank": 0.25}))`.
    """

    def __call__(
        self,
        model: nn.Module,
        target_modules: str | Collection[str] = ALL_LINEAR,
        rank: float | int = 0.25,
        update_proj_gap: int = 50,
        scale: float = 0.25,
        share_inputs: bool = True,
        projection: str = "gaussian",
        seed: int = 0,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        **adamw: Any,
    ) -> CompactAdamW:
        """The optimizer for `model`, whose targets are compact from now on, until its `remove()`.

        Args:
            target_modules: "all-linear", which is every linear layer of the blocks but attention's output projection;
                or what `TrainingArguments(optim_target_modules=...)` takes: a regular expression or parts of names.
            rank: a part of each layer's inputs (float, above 0 and at most 1), or a number of them (int).
            update_proj_gap: steps after which another subspace is drawn.
            scale: the paper's alpha: how much of a step reaches the weight.
            share_inputs: whether the layers that read one input have one projection (q, k and v; gate and up).
            projection: "gaussian", or "orthonormal", of less noise, which takes a QR decomposition each time.
            seed: of all projections.
            lr, weight_decay, adamw: as torch.optim.AdamW has them, for all parameters.

        Raises ValueError for settings out of range, and for weights that cannot be trained so.
        """
        _check(rank, update_proj_gap, scale, projection)
        layers = dict(_targets(model, target_modules))
        if not layers:
            raise ValueError(
                f"target_modules={target_modules!r} names no linear layer of {type(model).__name__} that is trained: "
                f"give 'all-linear', a regular expression or parts of the names that model.named_modules() shows"
            )
        ranks = {name: _rank_of(name, layer, rank) for name, layer in layers.items()}
        groups: dict[str, InputGroup] = {}
        made: list[CompactLayer] = []
        for name, layer in layers.items():
            key = f"{name.rpartition('.')[0]} {ranks[name]} of {_inputs(layer)}" if share_inputs else name
            if key not in groups:
                groups[key] = InputGroup(mixed(seed, key), projection == "orthonormal")
            made.append(make_compact(layer, ranks[name], groups[key]))
        try:
            return CompactAdamW(
                _parameter_groups(model, made, scale, weight_decay), made, update_proj_gap, lr=lr, **adamw
            )
        except BaseException:
            for compact in made:
                make_plain(compact)
            raise


def parse_rank(text: str) -> float | int:
    """A rank as it is given on a command line: digits are a number of inputs, a decimal is a part of them."""
    return int(text) if text.isdigit() else float(text)


def _check(rank: float | int, gap: int, scale: float, projection: str) -> None:
    if isinstance(rank, bool) or not (0 < rank <= 1 if isinstance(rank, float) else isinstance(rank, int) and rank > 0):
        raise ValueError(
            f"rank={rank!r} must be a part of a layer's inputs, above 0.0 and at most 1.0, or a number of them"
        )
    if isinstance(gap, bool) or not isinstance(gap, int) or gap < 1:
        raise ValueError(f"update_proj_gap={gap!r} must be a number of steps, 1 or more")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale!r} must be a number above 0; the paper pretrains with 0.25")
    if projection not in PROJECTIONS:
        raise ValueError(f"projection={projection!r} must be one of {', '.join(PROJECTIONS)}")


def _targets(model: nn.Module, wanted: str | Collection[str]) -> Iterator[tuple[str, Plain]]:
    """Names and layers that are to be compact. Raises ValueError for weights that cannot be."""
    if any(hasattr(module, "peft_config") for module in model.modules()):
        raise ValueError("CompAct trains whole weights, and the model has PEFT adapters: use one or the other")
    is_all = isinstance(wanted, str) and wanted.replace("_", "-") == ALL_LINEAR
    blocks = tuple(f"{name}." for name, _ in find_blocks(model)) if is_all else ()
    get_head = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    left: list[str] = []
    for name, layer in model.named_modules():
        is_wanted = name.startswith(blocks) if is_all else check_target_module_exists(wanted, name)
        if not is_wanted or not isinstance(layer, (nn.Linear, Conv1D)):
            continue
        if not (layer.weight.requires_grad or _is_quantized(layer.weight)):
            continue
        if layer is head or (is_all and ATTENTION_OUTPUT.fullmatch(name)):
            left.append(re.sub(r"\d+", "*", name))
            continue
        _refuse(name, layer, uses)
        yield name, layer
    if left:
        log.warning("CompAct: trained in full: %s", ", ".join(dict.fromkeys(left)))


def _refuse(name: str, module: Plain, uses: Mapping[int, int]) -> None:
    """Raise ValueError where the weight of `module` cannot be trained in a subspace, with the way out."""
    weight = module.weight
    where = f"CompAct cannot train {name} ({class_name(module)})"
    if hasattr(weight, "ds_id") or hasattr(weight, "to_local"):
        raise ValueError(
            f"{where}: its weight is in parts on several ranks (ZeRO 3, tensor parallelism, FSDP before there was an "
            f"optimizer): train with DDP, or with FSDP2 and this optimizer made first, as the Trainer does"
        )
    if _is_quantized(weight):
        raise ValueError(f"{where}: its weight is quantized, and gets no step; train adapters on it (PEFT) instead")
    if type(module) not in CLASSES:
        raise ValueError(f"{where}: it takes nn.Linear and Conv1D themselves; leave it out of target_modules")
    if uses[id(weight)] > 1:
        raise ValueError(f"{where}: another module has the same weight (tied); leave both out of target_modules")


def _is_quantized(weight: Tensor) -> bool:
    is_wrapped = hasattr(weight, "__tensor_flatten__") and not hasattr(weight, "to_local")
    return not weight.is_floating_point() or is_wrapped or hasattr(weight, "quant_state")


def _inputs(layer: Plain) -> int:
    return layer.weight.shape[1 if isinstance(layer, nn.Linear) else 0]


def _rank_of(name: str, layer: Plain, rank: float | int) -> int:
    inputs = _inputs(layer)
    if isinstance(rank, float):
        return max(1, round(rank * inputs))
    if rank > inputs:
        raise ValueError(
            f"rank={rank} is more than the {inputs} inputs of {name}: give at most that, or a part as a float"
        )
    return rank


def _parameter_groups(
    model: nn.Module, layers: list[CompactLayer], scale: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Cores; and the rest as the Trainer groups it: biases and norms do not decay."""
    cores = [layer.core for layer in layers]
    known = {id(core) for core in cores}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    decayed, others = [p for p in rest if p.ndim > 1], [p for p in rest if p.ndim <= 1]
    groups = [
        {"params": cores, "scale": scale, "weight_decay": weight_decay},
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
