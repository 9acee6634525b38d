"""What is used of torch that is not public, each under a name of its own (tested: torch 2.11, 2.13, 2.15).

A release that drops a module or a function fails here, when this is imported. Attributes of torch's objects would fail
later, or seem to be missing from every object: so they are named once, here, with the class that has them, and
tests/adacc_hf/torch_glue/test_private_names.py looks for each. What the compiler alone uses is in
compiler/functorch.py, and what is Transformers' in `compat` and callbacks/trainer.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass, TensorBase
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.nn.modules import module as nn_module
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "ATTRIBUTES", "BUFFERS", "CHECKPOINTED", "COMPILED_MODULE", "GLOBAL_HOOKS", "GLOBAL_PRE_HOOKS", "GRADIENT_HOOKS",
    "LOCAL_TENSOR", "MODULES", "PARAMETERS", "SHARDED_SIZE", "SOFTMAX", "SPEC", "TO_COPY",
    "DataDependentOutputException", "DisableTorchFunctionSubclass", "FakeTensorMode", "OpOverload",
    "SingleLevelFunction", "TensorBase", "TorchDispatchMode", "attention_name", "attention_operator",
    "attention_priority", "before_profilers_start", "buffers_of", "compiled_call", "coo_indices", "coo_values",
    "current_autograd_node", "eval_frame_callback", "forward_hooks", "forward_pre_hooks", "input_metadata",
    "is_profiling", "is_traceable_wrapper_subclass", "keeps_graph", "make_wrapper_subclass", "modules_of", "named",
    "no_dispatch", "op_name", "outer_hooks", "parameters_of", "schema_of", "sequence_number", "sleep_on_gpu",
    "storage_key", "storage_owners", "transform_level", "tree_leaves", "tree_map", "tree_map_only",
    "unset_fake_temporarily", "version_of",
]  # fmt: skip

ATTRIBUTES: list[tuple[str, str]] = []
"""(class or module, attribute) of all that `named` was told of."""


def named(owner: str, attribute: str) -> str:
    """`attribute`, noted as one that objects of class `owner` have."""
    ATTRIBUTES.append((owner, attribute))
    return attribute


def _reader(owner: str, attribute: str) -> Callable[[Any], Any]:
    """What reads `attribute`, which costs about as much as to write it out: no function of Python's comes between."""
    return attrgetter(named(owner, attribute))


# Tensors and storages.

version_of = _reader("Tensor", "_version")
"""How often a tensor's storage was written in place, as autograd sees it."""
storage_key = _reader("UntypedStorage", "_cdata")
"""What tells storages apart as long as they live, those without memory too: `data_ptr()` of these is 0."""
coo_indices, coo_values = Tensor._indices, Tensor._values
"""Parts of a sparse COO tensor, of one that is not coalesced too, where the public methods raise."""
GRADIENT_HOOKS = (named("Tensor", "_backward_hooks"), named("Tensor", "_post_accumulate_grad_hooks"))
"""Where a parameter has its hooks: those called before its gradient is there, and after."""
make_wrapper_subclass = Tensor._make_wrapper_subclass
"""A tensor of a given class that has a shape and no memory."""


def storage_owners(storage: torch.UntypedStorage) -> int:
    """How many tensors and Python objects hold `storage`."""
    return torch._C._storage_Use_Count(storage_key(storage))


LOCAL_TENSOR, SPEC = named("DTensor", "_local_tensor"), named("DTensor", "_spec")
"""The part of a DTensor that this rank has, and what makes it one again."""
SHARDED_SIZE = named("FlatParameter", "_sharded_size")
"""Only parameters under FSDP have it."""

# Modules.

PARAMETERS, BUFFERS, MODULES = (named("Module", name) for name in ("_parameters", "_buffers", "_modules"))
"""The attributes in which a module has its own parameters, buffers and children by name, each a dict."""
parameters_of, buffers_of, modules_of = map(attrgetter, (PARAMETERS, BUFFERS, MODULES))
forward_pre_hooks, forward_hooks = (attrgetter(named("Module", f"_forward_{name}")) for name in ("pre_hooks", "hooks"))
GLOBAL_PRE_HOOKS, GLOBAL_HOOKS = nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks
"""Hooks on forward that all modules have."""
attention_priority = torch._C._get_sdp_priority_order
"""Which kernels fused attention prefers, of those that it may take."""
COMPILED_MODULE = named("OptimizedModule", "_orig_mod")
"""The name of the module inside the one that torch.compile makes of it."""
compiled_call = _reader("Module", "_compiled_call_impl")
"""What `Module.compile` has made; None before."""
CHECKPOINTED = named("CheckpointWrapper", "_checkpoint_wrapped_module")
"""The name of the module inside torch's activation-checkpoint wrapper."""

# Autograd.

sequence_number = methodcaller(named("Node", "_sequence_nr"))
"""The number of a node, in the order in which they were made. Raises RuntimeError for one whose owner is gone."""
input_metadata = _reader("Node", "_input_metadata")
"""The shape, dtype and device of each gradient that a node takes."""
current_autograd_node = torch._C._current_autograd_node
"""The node whose backward torch's engine runs in this thread, or None."""
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs in this thread was called with retain_graph."""


outer_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
"""The innermost pair of saved-tensor hooks that is active now, or None; called once in each call of a block."""


# Operators.

schema_of = _reader("OpOverload", "_schema")
"""The names, defaults and aliases of an operator's arguments."""
op_name = _reader("OpOverload", "_opname")
"""The name of an operator without its namespace and overload."""
TO_COPY = torch.ops.aten._to_copy.default
"""A cast, a move to another device, or both."""
SOFTMAX = torch.ops.aten._softmax

_ATTENTION = {
    kind: named("torch.ops.aten", f"_scaled_dot_product_{rest}")
    for kind, rest in (
        ("math", "attention_math"),
        ("efficient", "efficient_attention"),
        ("flash", "flash_attention"),
        ("flash_backward", "flash_attention_backward"),
        ("cpu", "flash_attention_for_cpu"),
        ("cpu_backward", "flash_attention_for_cpu_backward"),
        ("cudnn", "cudnn_attention"),
    )
}


def attention_name(kind: str) -> str:
    """The name of the operator that is fused attention of that kind, as `op_name` gives it."""
    return _ATTENTION[kind]


def attention_operator(kind: str) -> Any:
    """The operator that is fused attention of that kind, whichever overload."""
    return getattr(torch.ops.aten, _ATTENTION[kind])


# What runs now.

eval_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What Dynamo has Python call for each function: None or False where it looks at none."""


_STARTS = tuple(named("torch.autograd.profiler", name) for name in ("_prepare_profiler", "_enable_profiler"))
"""The functions by which any profiler of torch's prepares and starts its session, of which a process has one."""


transform_level = torch._C._functorch.maybe_current_level
"""How many transforms of torch.func (grad, vmap, jvp) are under way, whose tensors have no storage; None for none."""


def is_profiling() -> bool:
    """Return True if a profiler of torch's is at work, in any thread, or has warmed up to be at work soon."""
    if torch.autograd.profiler._is_profiler_enabled:
        return True
    if torch.profiler.profiler.PROFILER_STEP_NAME not in torch.autograd.profiler.KinetoStepTracker._step_dict:
        return False  # else one with a schedule was made, and not left yet
    return any(type(thing) is torch.profiler.profile and _is_prepared(thing) for thing in gc.get_objects())


def _is_prepared(profiler: torch.profiler.profile) -> bool:
    session = profiler.profiler
    if session is None or not session.entered:
        return False
    is_in_cycle = profiler.current_action is not torch.profiler.ProfilerAction.NONE
    has_more_cycles = profiler.acc_events and profiler.step_rec_fn is not None  # with the same session
    return session.kineto_results is None or (has_more_cycles and is_in_cycle)


@contextmanager
def before_profilers_start(call: Callable[[], None]) -> Iterator[None]:
    """While open, `call` is called before any profiler of torch's prepares or starts its session."""
    before = {name: getattr(torch.autograd.profiler, name) for name in _STARTS}

    def start(name: str, *args: Any, **kwargs: Any) -> Any:
        call()
        return before[name](*args, **kwargs)

    for name in _STARTS:
        setattr(torch.autograd.profiler, name, partial(start, name))
    try:
        yield
    finally:
        for name in _STARTS:
            setattr(torch.autograd.profiler, name, before[name])


def sleep_on_gpu(cycles: int) -> None:
    """Keep the current GPU's stream busy for so many cycles of its clock."""
    torch.cuda._sleep(cycles)
