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
        self.has_autocast = False
        prepare(self)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.has_autocast):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


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


def add_number(block: Any) -> None:
    block.register_buffer("n", torch.ones(()))


@case("in-place counter", "NVIDIA/TransformerEngine#3394", add_number)
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


_phase = {"is_backward": False}


@torch.library.custom_op("adacc_verify::best_expert", mutates_args=())
def best_expert(scores: Tensor) -> Tensor:
    """Return the index of each token's best expert. Backward gets the last of equal experts, because kernels of a GPU
    select any of them."""
    return scores.shape[-1] - 1 - scores.flip(-1).argmax(-1) if _phase["is_backward"] else scores.argmax(-1)


@torch.library.custom_op("adacc_verify::row_sums", mutates_args=())
def row_sums(x: Tensor) -> Tensor:
    """Return cumulative sums of rows. Without gradients, they differ by rounding, as if by another kernel."""
    return x.cumsum(-1) * (1 if torch.is_grad_enabled() else 1 + 1e-6)


best_expert.register_fake(lambda scores: scores.new_empty(scores.shape[:-1], dtype=torch.int64))
row_sums.register_fake(torch.empty_like)


def add_experts(block: Any) -> None:
    block.router, block.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    block.router.requires_grad_(False).weight.zero_()  # all experts tie
    block.router.bias.zero_()


def note_backward(model: Any) -> None:
    def begin_backward(_: Any, __: Any, loss: Tensor) -> None:
        loss.register_hook(lambda _: _phase.update(is_backward=True))

    model.register_forward_pre_hook(lambda *_: _phase.update(is_backward=False))
    model.register_forward_hook(begin_backward)


@case("ties in routing", "NVIDIA-NeMo/Automodel#3140", add_experts, note_backward)
def route(block: Any, x: Tensor) -> Tensor:
    normed = block.norm(x)
    index = best_expert(block.router(normed).softmax(-1))[..., None, None]
    results = torch.stack([F.gelu(expert(normed)) for expert in block.experts], -2)
    return x + results.gather(-2, index.expand(-1, -1, 1, WIDTH)).squeeze(-2)


@case("other kernel", "pytorch/pytorch#186572")
def sum_rows(block: Any, x: Tensor) -> Tensor:
    hidden = block.hidden(x)
    return x + block.down(hidden * row_sums(hidden.detach()))


@case("in-place activation", "pytorch/pytorch#96319")
def scale_in_place(block: Any, x: Tensor) -> Tensor:
    hidden = block.up(block.norm(x))
    gate = hidden.tanh()
    return x + block.down(F.gelu(hidden.mul_(2))) + gate[..., :WIDTH]


def at_call(number: int, change: Callable[[Any], Any], is_before: bool) -> Callable[[Any], None]:
    """Return a function that makes a model change its blocks before or after the forward with this number."""

    def prepare(model: Any) -> None:
        @torch.no_grad()
        def count_call(*_: Any) -> None:
            model.num_calls += 1
            for block in model.blocks if model.num_calls == number else ():
                change(block)

        model.num_calls = 0
        (model.register_forward_pre_hook if is_before else model.register_forward_hook)(count_call)

    return prepare


halve_later = at_call(3, lambda block: block.n.fill_(0.5), True)
change_weights = at_call(4, lambda block: block.down.weight.mul_(0.9), False)
case("weight changed", "pytorch/pytorch#197887", prepare=change_weights)(Block.forward)


@case("write after saving", "meta-pytorch/torchrec#2836", add_number, halve_later)
def write_saved(block: Any, x: Tensor) -> Tensor:
    gate = block.up(block.norm(x)).sigmoid()
    result = x + block.down(gate)
    gate.data.mul_(block.n)
    return result


def tie_under_autocast(model: Any) -> None:
    model.has_autocast = True
    for block in model.blocks:
        block.up = model.blocks[0].up


def scale_in_hook(block: Any) -> None:
    def scale(_: nn.Module, __: Any, result: Tensor) -> Tensor:
        block.num_calls += 1
        return result * (1 + 0.1 * block.num_calls)

    block.up.register_forward_hook(scale)


case("autocast cache", "pytorch/pytorch#193338", prepare=tie_under_autocast)(Block.forward)
case("forward hook", "stanfordnlp/pyvene#242", scale_in_hook)(Block.forward)


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


case("accumulation", "pytorch/pytorch#190717", prepare=lambda model: setattr(model, "sizes", ((8, 16), (5, 12))))(drop)


@case("stochastic depth", "cybertronai/gradient-checkpointing#35")
def skip(block: Any, x: Tensor) -> Tensor:
    return x if torch.rand(()) < 0.3 else x + block.down(block.hidden(x)) / 0.7
