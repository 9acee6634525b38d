"""Private names of torch that the package uses, imported or registered one by one (tested: torch 2.11, 2.13, 2.14.1).

If a release of torch drops a private module or function, the import of this file fails. A dropped attribute of torch's
objects would cause an error later, or seem to be absent from every object. So each attribute is registered here with
its class, and tests/adacc_hf/torch_glue/test_private.py checks that it exists. Private names that only the compiler
uses are in compiler/functorch.py, and Transformers' private names in `compat` and callbacks/trainer_*.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass, TensorBase
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "ATTRIBUTES", "BACKWARD_HOOKS", "BUFFERS", "CHECKPOINTED", "COMPILED_MODULE", "CONTEXT_CLASS", "GLOBAL_HOOKS",
    "GLOBAL_PRE_HOOKS", "GRADIENT_HOOKS", "GROUPED_PRODUCT", "LOCAL_TENSOR", "MODULES", "PARAMETERS",
    "SHARDED_SIZE", "SOFTMAX", "SPEC", "TO_COPY", "VIEWED", "DataDependentOutputException",
    "DisableTorchFunctionSubclass", "DynamicOutputShapeException", "FakeTensorMode", "OpOverload", "TensorBase",
    "TorchDispatchMode", "attention_operator", "attention_priority",
    "before_profilers_start", "buffers_of", "collective_counts", "compiled_call", "coo_indices", "coo_values",
    "current_autograd_node", "eval_frame_callback", "forward_hooks", "forward_pre_hooks", "functions_unprofiled",
    "input_metadata", "is_profiling", "is_traceable_wrapper_subclass", "keeps_graph", "make_wrapper_subclass",
    "modules_of", "no_dispatch", "op_name", "outer_hooks", "parameters_of", "private_name", "schema_of",
    "sequence_number", "sleep_on_gpu", "storage_key", "storage_use_count", "transform_level", "tree_leaves",
    "tree_map", "tree_map_only", "unset_fake_temporarily", "unwritten_originals", "version_of", "viewed_tensor",
    "whole_gradients", "without_modes",
]  # fmt: skip

ATTRIBUTES: list[tuple[str, str]] = []
"""(class or module, attribute) for each private attribute that was registered by `private_name`."""


def private_name(owner: str, attribute: str) -> str:
    """Register a private attribute of torch or Transformers that this package uses. Return its name, `attribute`.

    `owner` is the name of the class or module that has the attribute. A test checks that the attribute exists in each
    release.
    """
    ATTRIBUTES.append((owner, attribute))
    return attribute


def _attribute_getter(owner: str, attribute: str) -> Callable[[Any], Any]:
    """Register a private attribute, and return a function that gets it from an object, as fast as attribute access."""
    return attrgetter(private_name(owner, attribute))


# Tensors and storages.

version_of = _attribute_getter("Tensor", "_version")
"""Function that returns autograd's version counter of a tensor: the number of in-place writes to its storage."""
VIEWED = private_name("Tensor", "_base")
"""Name of the attribute of a tensor that is the tensor that autograd knows it as a view of, or None."""
viewed_tensor = attrgetter(VIEWED)
"""Function that returns the tensor that autograd knows a tensor as a view of, or None."""
storage_key = _attribute_getter("UntypedStorage", "_cdata")
"""Function that returns a key of a storage, unique while the storage is alive.

In contrast to `data_ptr()`, this key is also unique for storages without memory."""
coo_indices, coo_values = Tensor._indices, Tensor._values
"""Functions that return the indices and the values of a sparse COO tensor, also of an uncoalesced tensor, for which the
public methods raise an error."""
GRADIENT_HOOKS = (private_name("Tensor", "_backward_hooks"), private_name("Tensor", "_post_accumulate_grad_hooks"))
"""Names of the attributes in which a parameter stores hooks that run before and after its gradient is accumulated."""
make_wrapper_subclass = Tensor._make_wrapper_subclass
"""Constructor for a tensor of a given subclass of Tensor that has a shape but no memory."""


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of references to `storage` from tensors and Python objects."""
    return torch._C._storage_Use_Count(storage_key(storage))


_STATE_OF_FSDP2 = _attribute_getter("FSDPModule", "_get_fsdp_state")
_GROUPS_OF_FSDP2 = private_name("FSDPState", "_fsdp_param_groups")
_GROUP_OF_FSDP2 = private_name("FSDPState", "_fsdp_param_group")


def whole_gradients(module: Any) -> list[Tensor]:
    """Return the whole gradients that an FSDP2 module holds until ranks exchange them. Submodules hold their own."""
    state = _STATE_OF_FSDP2(module)()
    # Older releases of torch have one group at most.
    groups = filter(None, getattr(state, _GROUPS_OF_FSDP2, None) or [getattr(state, _GROUP_OF_FSDP2)])
    parameters = [p for group in groups for p in group.fsdp_params if hasattr(p, "unsharded_param")]
    gradients = (g for p in parameters for g in (p.unsharded_param.grad, p.unsharded_accumulated_grad))
    return [gradient for gradient in gradients if gradient is not None]


LOCAL_TENSOR, SPEC = private_name("DTensor", "_local_tensor"), private_name("DTensor", "_spec")
"""Names of two attributes of a DTensor: the local tensor of this rank, and the spec (mesh, placements, shape)."""
SHARDED_SIZE = private_name("FlatParameter", "_sharded_size")
"""Name of an attribute that only FSDP's flat parameters have."""

# Modules.

PARAMETERS, BUFFERS, MODULES = (private_name("Module", name) for name in ("_parameters", "_buffers", "_modules"))
"""Names of the attributes in which a module stores its own parameters, buffers and child modules, each a dict by
name."""
parameters_of, buffers_of, modules_of = map(attrgetter, (PARAMETERS, BUFFERS, MODULES))
"""Functions that return a module's dict of parameters, of buffers, and of child modules, faster than the public
methods."""
forward_pre_hooks = _attribute_getter("Module", "_forward_pre_hooks")
forward_hooks = _attribute_getter("Module", "_forward_hooks")
"""Functions that return a module's forward hooks, or forward pre-hooks, as a dict by id."""
BACKWARD_HOOKS = (private_name("Module", "_backward_hooks"), private_name("Module", "_backward_pre_hooks"))
"""Names of the attributes in which a module stores hooks that run in its backward, each a dict by id."""
GLOBAL_PRE_HOOKS, GLOBAL_HOOKS = nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks
"""Forward pre-hooks and forward hooks that torch runs for every module."""
attention_priority = torch._C._get_sdp_priority_order
"""Function that returns the order in which torch prefers the kernels of fused attention."""
COMPILED_MODULE = private_name("OptimizedModule", "_orig_mod")
"""Name under which the wrapper that torch.compile returns contains the original module."""
compiled_call = _attribute_getter("Module", "_compiled_call_impl")
"""Function that returns the compiled call of a module on which `Module.compile` was called, or None for any other
module."""

_SET_ORIGINAL = private_name("torch.nn.utils.parametrize", "_maybe_set")
_set_original = getattr(parametrize, _SET_ORIGINAL)


def _set_changed_original(original: Tensor, new: Tensor) -> None:
    if original is not new:
        _set_original(original, new)


class UnwrittenOriginals:
    """Context in which parameters that are parametrized without a `right_inverse` are not written to.

    `register_parametrization` would set such a parameter to itself. This changes no bits, but increases the version
    counter like a write. PEFT's `target_parameters` parametrizes parameters in each forward. Several threads may be
    inside the context at once.
    """

    def __init__(self) -> None:
        self._lock, self._depth = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            setattr(parametrize, _SET_ORIGINAL, _set_changed_original)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                setattr(parametrize, _SET_ORIGINAL, _set_original)


unwritten_originals = UnwrittenOriginals()


CHECKPOINTED = private_name("CheckpointWrapper", "_checkpoint_wrapped_module")
"""Name under which torch's activation-checkpoint wrapper contains the original module."""

# Autograd.

sequence_number = methodcaller(private_name("Node", "_sequence_nr"))
"""Function that returns the sequence number of an autograd node, in order of creation. The function raises RuntimeError
if the node was freed."""
input_metadata = _attribute_getter("Node", "_input_metadata")
"""Function that returns shape, dtype and device of each gradient that an autograd node expects."""
current_autograd_node = torch._C._current_autograd_node
"""Function that returns the node whose backward torch's engine is running in this thread, or None."""
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Function that returns True if the backward running in this thread was called with retain_graph."""
CONTEXT_CLASS = private_name("Function", "_backward_cls")
"""Name of the attribute in which an `autograd.Function` stores the class of its contexts (`ctx`). Each call of the
Function looks up this attribute."""
outer_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
"""Function that returns the innermost active pair of saved-tensor hooks, or None. This package calls it once per call
of a block."""


# Process groups.

collective_count = methodcaller(private_name("ProcessGroup", "_get_sequence_number_for_group"))
"""Function that returns the number of collective operators that a process group has run. The function raises
RuntimeError if the group's backend does not count."""


def collective_counts() -> list[Any]:
    """Return the number of collective operators that each process group has run so far.

    If the backend of a group does not count, the group's entry is an object that equals no other entry.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    counts: list[Any] = []
    for group in torch.distributed.distributed_c10d._world.pg_map:
        try:
            counts.append(collective_count(group))
        except RuntimeError:  # the backend has no such counter
            counts.append(object())
    return counts


# Operators.

schema_of = _attribute_getter("OpOverload", "_schema")
"""Function that returns the schema of an operator: names, defaults and aliases of its arguments."""
op_name = _attribute_getter("OpOverload", "_opname")
"""Function that returns the name of an operator without its namespace and overload."""
TO_COPY = torch.ops.aten._to_copy.default
"""ATen operator for a cast, a move to another device, or both."""
SOFTMAX = torch.ops.aten._softmax
GROUPED_PRODUCT = getattr(torch.ops.aten, private_name("torch.ops.aten", "_grouped_mm"))
"""ATen operator for matrix products of groups of rows, each group with a matrix of its own, such as an expert's."""

_ATTENTION = {
    kind: private_name("torch.ops.aten", f"_scaled_dot_product_{rest}")
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


def attention_operator(kind: str) -> Any:
    """Return torch's fused-attention operator of this `kind`, with all its overloads.

    `kind` is "math", "efficient", "flash", "cpu" or "cudnn"; or "flash_backward" or "cpu_backward".
    """
    return getattr(torch.ops.aten, _ATTENTION[kind])


# State of the running process: Dynamo, torch.func, profilers, GPU stream.

eval_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Function that returns the callback that Python calls for each function while Dynamo is active. If Dynamo is inactive,
the callback is None or False."""


_STARTS = tuple(private_name("torch.autograd.profiler", name) for name in ("_prepare_profiler", "_enable_profiler"))
"""Names of the functions that start a session of one of torch's profilers."""


transform_level = torch._C._functorch.maybe_current_level
"""Function that returns how many torch.func transforms (grad, vmap, jvp) are nested here, or None outside transforms.
Tensors inside a transform have no storage."""


def is_profiling() -> bool:
    """Return True if one of torch's profilers is running in any thread, or is in its warm-up."""
    if torch.autograd.profiler._is_profiler_enabled:
        return True
    if torch.profiler.profiler.PROFILER_STEP_NAME not in torch.autograd.profiler.KinetoStepTracker._step_dict:
        return False  # no torch.profiler.profile with a schedule exists
    return any(type(obj) is torch.profiler.profile and _is_profiler_prepared(obj) for obj in gc.get_objects())


def _is_profiler_prepared(profiler: torch.profiler.profile) -> bool:
    session = profiler.profiler
    if session is None or not session.entered:
        return False
    is_in_cycle = profiler.current_action is not torch.profiler.ProfilerAction.NONE
    has_more_cycles = profiler.acc_events and profiler.step_rec_fn is not None  # in the same session
    return session.kineto_results is None or (has_more_cycles and is_in_cycle)


@contextmanager
def before_profilers_start(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` whenever one of torch's profilers is about to prepare or start a session inside the `with` block."""
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


@contextmanager
def functions_unprofiled() -> Iterator[None]:
    """Let torch's profilers that start inside the `with` block record memory, and no functions.

    When a recorded function (such as FSDP's forward) returns, the profiler writes into the event of the call. If
    another session has begun since, the event's memory is freed already, and the write destroys other data.
    """
    start: Any = torch.autograd.profiler._enable_profiler
    scopes = {torch._C._profiler.RecordScope.LITE_INTERPRETER}  # which no function has here
    torch.autograd.profiler._enable_profiler = partial(start, scopes=scopes)
    try:
        yield
    finally:
        torch.autograd.profiler._enable_profiler = start


def sleep_on_gpu(cycles: int) -> None:
    """Keep the current GPU's stream busy for `cycles` cycles of the GPU's clock."""
    torch.cuda._sleep(cycles)
