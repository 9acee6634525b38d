"""Small models, and training steps through partitioned graphs that run operator by operator."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from trainer_builders import *  # noqa: F403 - compiled runs of a Trainer

from adacc_hf.compiler import functorch
from adacc_hf.compiler.joint_graph import JointGraph, read_joint_graph
from adacc_hf.estimate.fake_device import fake_tensors


class Attention(nn.Module):
    """Layer norm, attention with dropout and a gated product, the parts of a transformer block."""

    def __init__(
        self, width: int = 32, heads: int = 4, dropout: float = 0.1, is_fused: bool = False, sharpness: float = 1.0
    ) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up, self.gate, self.down = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.heads = heads
        with torch.no_grad():
            self.qkv.weight[: 2 * width] *= sharpness

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        if self.is_fused:
            context = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p)
        else:
            context = self.dropout((q @ k.transpose(-1, -2) / width**0.5).softmax(-1)) @ v
        x = x + context.transpose(1, 2).reshape(batch, length, width)
        return x + self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


@dataclass(frozen=True)
class Step:
    """Results of one training step: loss, gradients and both graphs."""

    loss: Tensor
    gradients: list[Tensor]
    forward: fx.GraphModule
    backward: fx.GraphModule

    def saved(self, num_outputs: int = 1) -> list[Any]:
        """Return the example tensors of the nodes that forward passes to backward."""
        results = self.forward.graph.find_nodes(op="output")[0].args[0][num_outputs:]
        return [node.meta["val"] for node in results if node.op == "call_function"]


TrainStep = Callable[[Any], Step]
TrainFunction = Callable[..., list[Tensor]]


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Drop compiled code before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def train_step(fresh_dynamo: None) -> TrainStep:
    """A function that trains the small model for a step. The given partitioner cuts its uncompiled graphs."""

    def train(
        partition: Any,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.1,
        dynamic: bool = False,
        device: str = "cpu",
        is_fused: bool = False,
        sharpness: float = 1.0,
    ) -> Step:
        torch._dynamo.reset()
        graphs: list[fx.GraphModule] = []

        def keep(graph: fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return make_boxed_func(graph)

        torch.manual_seed(0)
        blocks = (Attention(dropout=dropout, is_fused=is_fused, sharpness=sharpness) for _ in range(2))
        model = nn.Sequential(*blocks).to(device, dtype)
        x = torch.randn(4, 16, 32, dtype=dtype).to(device)
        backend = aot_autograd(
            fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=select_decomp_table()
        )
        loss = torch.compile(model, backend=backend, dynamic=dynamic)(x).square().mean()
        loss.backward()
        return Step(loss.detach(), [p.grad for p in model.parameters()], *graphs)

    return train


@pytest.fixture
def joint_graph_of(fresh_dynamo: None) -> Callable[..., JointGraph]:
    """`joint_graph_of(module, *inputs)`: the joint graph of its forward and of the backward of its outputs' sum."""

    def read(module: nn.Module, *inputs: Tensor) -> JointGraph:
        graphs: list[JointGraph] = []

        def partition(module: Any, inputs: Any, **kwargs: Any) -> Any:
            num_outputs = kwargs["num_fwd_outputs"]
            info = functorch.classify(module, kwargs.get("static_lifetime_input_indices") or (), num_outputs)
            held_inputs = functorch.held_inputs(module, info, num_outputs)
            graphs.append(read_joint_graph(module, info, held_inputs))
            return min_cut_rematerialization_partition(module, inputs, **kwargs)

        def keep(module: fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(module)

        decompositions = select_decomp_table()
        backend = aot_autograd(
            fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=decompositions
        )
        torch.compile(module, backend=backend)(*inputs).sum().backward()
        return graphs[0]

    return read


@pytest.fixture
def attention_graph(joint_graph_of: Callable[..., JointGraph]) -> Callable[..., JointGraph]:
    """`attention_graph(is_fused)`: the joint graph of one small block without dropout."""

    def read(is_fused: bool) -> JointGraph:
        block = Attention(dropout=0.0, is_fused=is_fused)
        return joint_graph_of(block, torch.randn(2, 8, 32, requires_grad=True))

    return read


@pytest.fixture
def train_function(fresh_dynamo: None) -> TrainFunction:
    """A function that returns the gradients of a function's mean square, with graphs cut by a partitioner and run
    uncompiled."""

    def train(
        partition: Any, function: Callable[..., Tensor], inputs: list[Tensor], dynamic: bool | None = None
    ) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        backend = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph),
            partition_fn=partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,  # as in Inductor: inputs are written to inside the graph
        )
        compiled = function if partition is None else torch.compile(function, backend=backend, dynamic=dynamic)
        leaves = [one.clone().requires_grad_(one.is_floating_point() or one.is_complex()) for one in inputs]
        compiled(*leaves).square().mean().backward()
        return [leaf.grad for leaf in leaves if leaf.requires_grad]

    return train


@dataclass(frozen=True)
class CodedValue:
    """A value that is encoded in forward, in bfloat16, and the operators before and after it."""

    forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Function of an input and a square matrix that returns the value and a result computed from the value."""
    is_passed_over: bool
    """True if a kernel of a GPU handles it element by element, false if by groups of elements too."""
    is_read_by_product: bool = True


WIDTH = 1024
CODED_VALUES = {
    "made by an operator on elements": CodedValue(lambda x, w: _with(x.relu() * 2, lambda v: v @ w), True),
    "read by an operator on elements": CodedValue(lambda x, w: _with(x @ w, lambda v: F.gelu(v) @ w), True, False),
    "made and read by products": CodedValue(lambda x, w: _with(x @ w, lambda v: v @ w), False),
    "made by a norm": CodedValue(lambda x, w: _with(_normed(x), lambda v: v @ w), False),
    "read by a norm": CodedValue(lambda x, w: _with(x.relu() * 2, lambda v: _normed(v) @ w), False, False),
}


def _with(value: Tensor, make: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    return value, make(value)


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,))


@pytest.fixture(params=CODED_VALUES)
def coded_value(request: pytest.FixtureRequest) -> CodedValue:
    return CODED_VALUES[request.param]


@pytest.fixture
def forward_graph() -> Callable[[Callable[..., Any], str], fx.Graph]:
    """`forward_graph(function, device)`: a graph of the operators that Inductor lowers, on fake tensors."""

    def trace(function: Callable[..., Any], device: str) -> fx.Graph:
        with fake_tensors(device):
            inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((8, 512, WIDTH), (WIDTH, WIDTH))]
            module = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
        module.graph.eliminate_dead_code()
        return module.graph

    return trace
