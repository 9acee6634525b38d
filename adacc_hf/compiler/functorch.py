"""Interface to torch's compiler.

Most of the torch names used for this are private, so all of them are in this module (tested: torch 2.11, 2.13, 2.14.1).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
from torch._functorch.partitioners import NodeInfo, min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx.experimental import symbolic_shapes
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from adacc_hf.artifacts.exact_recompute_rules import walk_back
from adacc_hf.torch_glue.private import OpOverload, op_name, private_name, schema_of

__all__ = [  # names of torch, which other files import from here
    "CustomPartitionerFn", "NodeInfo", "cache_dir", "functorch_config", "inductor_config",
    "min_cut_rematerialization_partition", "select_decomp_table",
]  # fmt: skip

_FUNCTION = private_name("CompiledFunctionBackward", "_forward_cls")
"""Attribute of an autograd node: the autograd function whose backward the node runs."""
_GRAPH_NUMBER = private_name("CompiledFunction", "_aot_id")
"""Attribute of a compiled graph's autograd function: the number that AOTAutograd gave to the joint graph."""

op_types = cache(partitioners.get_default_op_list)
if hasattr(symbolic_shapes, "optimization_hint"):
    _number_of = symbolic_shapes.optimization_hint
else:  # before torch 2.12, whose partitioner uses 4096 for data-dependent sizes
    _number_of = partial(symbolic_shapes.size_hint, fallback=4096)  # type: ignore[attr-defined]


def hint(size: int | torch.SymInt) -> int:
    """Return `size` as an integer. For a dynamic size, this is the size in the traced example."""
    return int(_number_of(size))


def compile_by_inductor(module: fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """Compile `module` by Inductor with Inductor's `settings`."""
    from torch._inductor.compile_fx import compile_fx  # takes seconds

    compiled = compile_fx(module, inputs, config_patches=settings)
    assert callable(compiled)  # only settings for ahead-of-time compilation return files
    return compiled


def options_of_mode(mode: str) -> dict[str, Any]:
    """Return the Inductor settings that a `mode` of torch.compile stands for."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def recompile_limit() -> int:
    """Return the number of compilations of one function after which Dynamo runs the function eagerly."""
    return torch._dynamo.config.recompile_limit


def compile_number() -> tuple[str, str]:
    """Return two identifiers from Dynamo: of the function that is being compiled, and of this compilation. Return ("",
    "") outside a compilation."""
    compiling = CompileContext.current_compile_id()
    return ("", "") if compiling is None else (str(compiling.frame_id), str(compiling))


def graph_number() -> int | None:
    """Return AOTAutograd's number of the joint graph that is being partitioned, or None if it has no number.
    `graph_calls` yields the same numbers."""
    tracing = TracingContext.try_get()
    names = None if tracing is None else tracing.aot_graph_name
    return int(names[0].partition("_")[0]) if names else None


def graph_calls(result: torch.Tensor) -> Iterator[int]:
    """Yield the graph's number for each compiled-graph call that contributed to `result`. Each call is one autograd
    node."""
    _, nodes = walk_back(
        [result.grad_fn], lambda node: None if node is None else [before for before, _ in node.next_functions]
    )
    for node in nodes:
        number = getattr(getattr(node, _FUNCTION, None), _GRAPH_NUMBER, None)
        if number is not None:
            yield number


def size_node(graph: fx.Graph, size: torch.SymInt) -> fx.Node:
    """Insert nodes into `graph` that compute a dynamic size from its size inputs. Return the node of the size."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    bound = {symbolic_shapes.is_symbol_binding_fx_node(node): node for node in graph.find_nodes(op="placeholder")}
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in bound.items() if symbol is not None}
    result = sympy_interp(PythonReferenceAnalysis, proxies, size.node.expr).node
    result.meta["val"] = size
    return result


def prepare(module: fx.GraphModule) -> str | None:
    """Simplify a joint graph as torch's partitioner does. Return None, or the reason why only torch's own partitioner
    can partition the graph."""
    module.graph.eliminate_dead_code()
    module.recompile()
    if functorch_config.cse:
        module.graph = fx_graph_cse(module.graph)
    _copy_written_inputs(module.graph)
    if partitioners.has_recomputable_ops(module):
        return "it has regions under torch.utils.checkpoint"
    if module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        return "it has nested regions, which store parameters together with activations"
    partitioners.force_save_collectives(module)
    partitioners.force_save_effectful_ops(module)
    partitioners.force_save_bw_mutation_src(module)
    return None


def _copy_written_inputs(graph: fx.Graph) -> None:
    """Insert a copy of each input that the graph overwrites when forward ends, and let all readers use the copy.
    Without the copy, backward would recompute from the new value, as it does under torch's own partitioner."""
    for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written = write.args[0]
        if written.op != "placeholder" or write.meta.get("partitioner_tag") == "must_be_in_backward":
            continue
        readers = [user for user in written.users if user is not write and user.op != "output"]
        if not readers:
            continue
        with graph.inserting_before(min(readers)):
            copied = graph.call_function(torch.ops.aten.clone.default, (written,))
        example = written.meta["val"]
        with example.fake_mode:
            copied.meta["val"] = example.clone()
        copied.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
        copied.meta["partitioner_tag"] = "is_forward"
        for reader in readers:
            reader.replace_input_with(written, copied)


def classify(module: fx.GraphModule, static_inputs: Sequence[int], num_fwd_outputs: int) -> NodeInfo:
    """Classify the nodes of a joint graph as needed by forward or by backward. Also set each node's distance from
    backward (`dist_from_bw`), which torch's min-cut partitioner reads."""
    info = partitioners.classify_nodes(module, list(static_inputs), num_fwd_outputs)
    unreachable = int(1e9)
    for node in reversed(module.graph.nodes):
        if node.op != "output" and not info.is_required_fw(node):
            node.dist_from_bw = 0
        else:
            distances = [user.dist_from_bw + 1 for user in node.users]
            node.dist_from_bw = unreachable if node.op == "output" else min(distances, default=unreachable)
    return info


def held_inputs(module: fx.GraphModule, info: NodeInfo, num_fwd_outputs: int) -> list[fx.Node]:
    """Return the inputs that stay allocated until backward: parameters, buffers and inputs without gradient."""
    gradients = module.graph.find_nodes(op="output")[0].args[0][num_fwd_outputs:]
    differentiable = {primal for primal, gradient in zip(info.inputs, gradients, strict=False) if gradient is not None}
    tensors = [node for node in info.inputs if isinstance(node.meta.get("val"), torch.Tensor)]
    return [node for node in tensors if node in info.static_lifetime_input_nodes or node not in differentiable]


def plain_saved(module: fx.GraphModule, info: NodeInfo) -> list[fx.Node]:
    """Return the tensors that torch's partitioner would store for backward by default."""
    chosen = partitioners.choose_saved_values_set(module.graph, info, memory_budget=1)
    return [node for node in chosen if isinstance(node.meta.get("val"), torch.Tensor)]


def extract(
    module: fx.GraphModule, info: NodeInfo, saved: Sequence[fx.Node], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward module of a joint graph. Forward saves the tensors in `saved` and all dynamic
    sizes for backward."""
    sizes = [node for node in info.required_fw_nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    forward, backward = partitioners._extract_fwd_bwd_modules(
        module,
        list(saved),
        saved_sym_nodes=sizes,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=info.static_lifetime_input_nodes,
    )
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    return forward, partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)


def is_random(node: fx.Node) -> bool:
    """Return True if the node draws random numbers or computes seeds for other nodes."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return False
    if target.namespace == "prims" and op_name(target).startswith("inductor_"):
        return True
    return torch.Tag.nondeterministic_seeded in target.tags and _node_argument(node, "dropout_p") != 0.0


def _node_argument(node: fx.Node, name: str) -> Any:
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == name:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
            return argument.default_value if value is None else value
    return None


def must_be_saved(node: fx.Node) -> bool:
    return node.meta.get("recompute") is torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def must_run_in_forward(node: fx.Node) -> bool:
    """Return True if the compiled forward must run the node even if only backward reads the result."""
    return must_be_saved(node) and node.meta.get("partitioner_tag") == "is_forward"


def short_name(node: fx.Node) -> str:
    """Return the name of the node's operator without its overload, such as "mul", or "" without an operator."""
    return op_name(node.target).strip("_") if isinstance(node.target, OpOverload) else ""


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def maker_of(node: fx.Node) -> fx.Node:
    """Return the node whose operator computes `node`. For a getitem, return the node that returns the tuple."""
    return node.all_input_nodes[0] if is_getitem(node) else node


def is_view(node: fx.Node) -> bool:
    """Return True if the node is a view of its first input, by torch's list of views or by the operator's schema."""
    target: Any = node.target
    return op_types().is_view(node) or (isinstance(target, OpOverload) and target.is_view)


def has_unknown_sizes(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's sizes depend on data and are therefore unknown before the graph runs."""
    return bool(symbolic_shapes.free_unbacked_symbols(tensor))


def makes_sizes(node: fx.Node) -> bool:
    """Return True if the node returns data-dependent sizes. Replaying the node would create new size symbols."""
    return bool(node.meta.get("unbacked_bindings"))
