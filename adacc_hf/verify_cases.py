"""Small models for `adacc verify --methods`: code that methods of recomputation get wrong, in the spirit of public
threads.

Each model has an embedding, three blocks and an output layer. A case changes the block, or the model, in a few lines.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from adacc_hf.torch_glue.compat import GradientCheckpointingLayer, PretrainedConfig, PreTrainedModel

WIDTH, VOCABULARY, NUM_BLOCKS = 32, 50, 3


class Block(GradientCheckpointingLayer):
    """Residual block of a norm and two linear layers. `build` adds what a case needs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.num_calls, self.scale = 0, 1.0
        self.build()

    def build(self) -> Any: ...

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.hidden(x))


class Model(PreTrainedModel):
    """Language model of a few blocks, whose forward returns the loss of predicting its own tokens."""

    config_class = PretrainedConfig
    supports_gradient_checkpointing = True

    def __init__(self, block_class: type[Block], prepare: Callable[[Model], Any]) -> None:
        super().__init__(PretrainedConfig())
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(block_class() for _ in range(NUM_BLOCKS))
        self.sizes: tuple[tuple[int, int], ...] = ((8, 16),)
        """(sequences, tokens) of each micro-batch of a step."""
        self.has_autocast = self.has_losses = False
        prepare(self)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, ids: Tensor) -> Tensor:
        losses: list[Tensor] = []
        with torch.autocast("cpu", torch.bfloat16, enabled=self.has_autocast):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x, losses) if self.has_losses else block(x)
            return sum(losses, F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()))


class Case(NamedTuple):
    """Code to train under each method."""

    thread: str
    """Public thread on this kind of code, as OWNER/REPOSITORY#NUMBER."""
    make: Callable[[], Model]


CASES: dict[str, Case] = {}
"""The cases by name, in the order of the table."""


def case(
    name: str,
    thread: str,
    build: Callable[[Any], Any] = Block.build,
    prepare: Callable[[Any], Any] = lambda model: None,
) -> Callable[[Any], Any]:
    """Return a decorator that adds a case to CASES, from the forward of its block. `build` adds parts to the block, and
    `prepare` changes the model."""

    def add(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        block_class = type(f"{name.title().replace(' ', '')}Block", (Block,), {"build": build, "forward": forward})
        CASES[name] = Case(thread, lambda: Model(block_class, prepare))
        return forward

    return add


@case("dropout", "pytorch/pytorch#190758")
def drop(block: Any, x: Tensor) -> Tensor:
    return x + F.dropout(block.down(F.dropout(block.hidden(x), 0.1)), 0.1)


@case("RReLU", "pytorch/pytorch#193671")
def rrelu_last(block: Any, x: Tensor) -> Tensor:
    return F.rrelu(x + block.down(block.hidden(x)), training=True)


@case("in-place counter", "NVIDIA/TransformerEngine#3394", lambda block: block.register_buffer("n", torch.zeros(())))
def count(block: Any, x: Tensor) -> Tensor:
    block.n.add_(1)
    return x + block.down(block.hidden(x) / block.n)


def add_code(block: Any) -> None:
    block.register_buffer("code", torch.randn(8, WIDTH))


@case("EMA codebook", "lucidrains/vector-quantize-pytorch#49", add_code)
def quantize(block: Any, x: Tensor) -> Tensor:
    flat = x.detach().flatten(0, 1)
    nearest = torch.cdist(flat, block.code).argmin(-1)
    code, one_hot = block.code[nearest].view_as(x), F.one_hot(nearest, 8).float()
    block.code.data.lerp_(one_hot.T @ flat / one_hot.sum(0).clamp(min=1)[:, None], 0.1)
    return x + block.down(block.hidden(x * code))


def add_experts(block: Any) -> None:
    block.router, block.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    nn.init.zeros_(block.router.weight)  # all experts tie


@case("ties in routing", "NVIDIA-NeMo/Automodel#3156", add_experts)
def route(block: Any, x: Tensor) -> Tensor:
    flat, result = block.norm(x).flatten(0, 1), x.flatten(0, 1)
    weights, indices = block.router(flat * torch.empty_like(flat).uniform_(0.9, 1.1)).softmax(-1).topk(2)
    for number, expert in enumerate(block.experts):
        token, rank = torch.where(indices == number)
        result = result.index_add(0, token, F.gelu(expert(flat[token])) * weights[token, rank, None])
    return result.view_as(x)


def tie_under_autocast(model: Any) -> None:
    model.has_autocast = True
    for block in model.blocks:
        block.up = model.blocks[0].up


def scale_in_hooks(block: Any, is_forward: bool) -> None:
    def scale(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        block.num_calls += 1
        return outputs * (1 + 0.1 * block.num_calls) if is_forward else (inputs[0] / block.num_calls,)

    block.up.register_forward_hook(scale) if is_forward else block.up.register_full_backward_hook(scale)


case("autocast cache", "pytorch/pytorch#193338", prepare=tie_under_autocast)(Block.forward)
case("forward hook", "stanfordnlp/pyvene#242", lambda block: scale_in_hooks(block, True))(Block.forward)
case("backward hook", "pytorch/pytorch#4594", lambda block: scale_in_hooks(block, False))(Block.forward)


def add_lora(block: Any) -> None:
    block.requires_grad_(False)
    block.a, block.b = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)


def scale_in_forward(model: Any) -> None:
    def set_scale(scale: float) -> None:
        for block in model.blocks:
            block.scale = scale

    model.register_forward_pre_hook(lambda *_: set_scale(3.0))
    model.register_forward_hook(lambda *_: set_scale(1.0))


@case("LoRA scale", "huggingface/peft#2832", add_lora, scale_in_forward)
def adapt(block: Any, x: Tensor) -> Tensor:
    return x + block.down(block.hidden(x)) + block.b(block.a(F.dropout(x, 0.1)) * block.scale)


@case("numpy, random", "pytorch/pytorch#14253")
def add_noise(block: Any, x: Tensor) -> Tensor:
    noise = torch.from_numpy(numpy.random.randn(*x.shape)).to(x)
    return x + block.down(block.hidden(x + noise)) * random.uniform(0.5, 1)


def add_generator(block: Any) -> None:
    block.generator = torch.Generator().manual_seed(0)


@case("own generator", "pytorch/pytorch#14518", add_generator)
def mask(block: Any, x: Tensor) -> Tensor:
    hidden = block.hidden(x)
    return x + block.down(hidden * torch.empty_like(hidden).bernoulli_(0.8, generator=block.generator))


@case("BatchNorm", "pytorch/pytorch#96136", lambda block: setattr(block, "batch_norm", nn.BatchNorm1d(WIDTH)))
def normalize(block: Any, x: Tensor) -> Tensor:
    return x + block.batch_norm(block.down(block.hidden(x)).transpose(1, 2)).transpose(1, 2)


def share_block(model: Any) -> None:
    model.blocks = nn.ModuleList([model.blocks[0]] * NUM_BLOCKS)


case("spectral norm", "pytorch/pytorch#62293", lambda block: spectral_norm(block.up))(Block.forward)
case("shared block", "pytorch/pytorch#81296", prepare=share_block)(drop)


@case("list argument", "NVIDIA/Megatron-LM#1514", prepare=lambda model: setattr(model, "has_losses", True))
def append_loss(block: Any, x: Tensor, losses: list[Tensor]) -> Tensor:
    hidden = block.hidden(x)
    losses.append(hidden.square().mean())
    return x + block.down(hidden) / len(losses)


@case("data-dependent", "pytorch/torchtitan#1117")
def repeat(block: Any, x: Tensor) -> Tensor:
    while x.norm() < 80:
        x = x + F.dropout(block.down(block.hidden(x)), 0.1) + 0.1 * x
    return x


class RandomMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = torch.rand_like(x) < 0.8
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.mask


@case("custom Function", "pytorch/pytorch#102600")
def mask_by_function(block: Any, x: Tensor) -> Tensor:
    return x + block.down(RandomMask.apply(block.hidden(x)))


@case("own checkpoint", "pytorch/pytorch#90105")
def nest(block: Any, x: Tensor) -> Tensor:
    return x + checkpoint(lambda y: F.dropout(block.down(block.hidden(y)), 0.1), x, use_reentrant=False)


case("accumulation", "pytorch/pytorch#190717", prepare=lambda model: setattr(model, "sizes", ((8, 16), (5, 12))))(drop)


@case("stochastic depth", "cybertronai/gradient-checkpointing#35")
def skip(block: Any, x: Tensor) -> Tensor:
    return x if torch.rand(()) < 0.3 else x + block.down(block.hidden(x)) / 0.7
