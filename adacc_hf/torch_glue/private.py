"""Private names of torch that the package uses, imported or registered one by one (tested: torch 2.11, 2.13, 2.14.1).

If a release of torch drops a private module or function, the import of this file fails. A dropped attribute of torch's
objects would cause an error later, or seem to be absent from every object. So each attribute is registered here with
its class, and tests/adacc_hf/torch_glue/test_private.py checks that it exists. Private names that only the compiler
uses are in compiler/functorch.py, and Transformers' private names in `compat` and callbacks/trainer_*.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass, TensorBase
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.modules import module as nn_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from adacc_hf.torch_glue.watchers import Watchers, patched

__all__ = [  # names of torch, which other files import from here
    "DataDependentOutputException", "DisableTorchFunctionSubclass", "DynamicOutputShapeException", "FakeTensorMode",
    "HigherOrderOperator", "OpOverload", "TensorBase", "TorchDispatchMode", "is_traceable_wrapper_subclass",
    "no_dispatch", "num_dispatch_modes", "tree_leaves", "tree_map", "tree_map_only", "unset_fake_temporarily",
    "without_modes",
]  # fmt: skip

ATTRIBUTES: list[tuple[str, str]] = []  # (class or module, attribute) that `private_name` has registered


def private_name(owner: str, attribute: str) -> str:
    """Register a private attribute of the class or module `owner`, and return its name. A test checks that the
    attribute exists."""
    ATTRIBUTES.append((owner, attribute))
    return attribute


def _attribute_getter(owner: str, attribute: str) -> Callable[[Any], Any]:
    """Register a private attribute, and return a function that gets it from an object, as fast as attribute access."""
    return attrgetter(private_name(owner, attribute))


# Tensors and storages.

version_of = _attribute_getter("Tensor", "_version")  # number of in-place writes to the tensor's storage
VIEWED = private_name("Tensor", "_base")
viewed_tensor = attrgetter(VIEWED)  # the tensor that autograd knows a tensor as a view of, or None
storage_key = _attribute_getter("UntypedStorage", "_cdata")
"""Return a key of a storage, unique while the storage is alive, also for storages without memory."""
coo_indices, coo_values = Tensor._indices, Tensor._values  # the public methods need a coalesced tensor
GRADIENT_HOOKS = (private_name("Tensor", "_backward_hooks"), private_name("Tensor", "_post_accumulate_grad_hooks"))
make_wrapper_subclass = Tensor._make_wrapper_subclass  # a tensor of a subclass, with a shape but no memory


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of references to `storage` from tensors and Python objects."""
    return torch._C._storage_Use_Count(storage_key(storage))


_STATE_OF_FSDP2 = _attribute_getter("FSDPModule", "_get_fsdp_state")
_GROUPS_OF_FSDP2 = private_name("FSDPState", "_fsdp_param_groups")
_GROUP_OF_FSDP2 = private_name("FSDPState", "_fsdp_param_group")


def whole_gradients(module: Any) -> list[Tensor]:
    """Return the unsharded gradients that an FSDP2 module, without its submodules, holds until ranks exchange them."""
    state = _STATE_OF_FSDP2(module)()
    # Older releases of torch have one group at most.
    groups = filter(None, getattr(state, _GROUPS_OF_FSDP2, None) or [getattr(state, _GROUP_OF_FSDP2)])
    parameters = [p for group in groups for p in group.fsdp_params if hasattr(p, "unsharded_param")]
    gradients = (g for p in parameters for g in (p.unsharded_param.grad, p.unsharded_accumulated_grad))
    return [gradient for gradient in gradients if gradient is not None]


active_ddp_module = DistributedDataParallel._get_active_ddp_module  # the module whose forward is running, or None
LOCAL_TENSOR, SPEC = private_name("DTensor", "_local_tensor"), private_name("DTensor", "_spec")
SHARDED_SIZE = private_name("FlatParameter", "_sharded_size")  # only FSDP's flat parameters have it

# Modules.

# A module's own dicts by name, read faster than by the public methods.
PARAMETERS, BUFFERS, MODULES = (private_name("Module", name) for name in ("_parameters", "_buffers", "_modules"))
parameters_of, buffers_of, modules_of = map(attrgetter, (PARAMETERS, BUFFERS, MODULES))
# A module's dicts of hooks by id.
forward_pre_hooks = _attribute_getter("Module", "_forward_pre_hooks")
forward_hooks = _attribute_getter("Module", "_forward_hooks")
BACKWARD_HOOKS = (private_name("Module", "_backward_hooks"), private_name("Module", "_backward_pre_hooks"))
GLOBAL_PRE_HOOKS, GLOBAL_HOOKS = nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks
attention_priority = torch._C._get_sdp_priority_order  # of the kernels of fused attention
UNDISABLED = private_name("disabled function", "_torchdynamo_orig_callable")  # without Dynamo's wrapper
COMPILED_MODULE = private_name("OptimizedModule", "_orig_mod")
compiled_call = _attribute_getter("Module", "_compiled_call_impl")  # None unless `Module.compile` was called

_SET_ORIGINAL = private_name("torch.nn.utils.parametrize", "_maybe_set")
_set_original = getattr(parametrize, _SET_ORIGINAL)


def _set_changed_original(original: Tensor, new: Tensor) -> None:
    if original is not new:
        _set_original(original, new)


def _patch_set_original() -> Callable[[], None]:
    setattr(parametrize, _SET_ORIGINAL, _set_changed_original)
    return partial(setattr, parametrize, _SET_ORIGINAL, _set_original)


_UNWRITTEN = Watchers[None](_patch_set_original)
unwritten_originals = partial(_UNWRITTEN.watching, None)
"""Return a context in which parameters that are parametrized without a `right_inverse` are not set to themselves, which
would increase their version counters. PEFT's `target_parameters` parametrizes parameters in each forward."""


CHECKPOINTED = private_name("CheckpointWrapper", "_checkpoint_wrapped_module")

# Autograd.

sequence_number = methodcaller(private_name("Node", "_sequence_nr"))  # RuntimeError if the node was freed
input_metadata = _attribute_getter("Node", "_input_metadata")  # of each gradient that a node expects
current_autograd_node = torch._C._current_autograd_node  # whose backward the engine is running in this thread
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # True in a backward with retain_graph
CONTEXT_CLASS = private_name("Function", "_backward_cls")  # class of the contexts (`ctx`), looked up by each call
outer_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
"""Return the innermost active pair of saved-tensor hooks, or None."""


# Process groups.

collective_count = methodcaller(private_name("ProcessGroup", "_get_sequence_number_for_group"))


def collective_counts() -> list[Any]:
    """Return the number of collective operators that each process group has run so far. If a group's backend does not
    count, its entry is an object that equals no other entry."""
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
op_name = _attribute_getter("OpOverload", "_opname")  # without namespace and overload
TO_COPY = torch.ops.aten._to_copy.default  # a cast, a move to another device, or both
SOFTMAX, UNSAFE_VIEW = torch.ops.aten._softmax, torch.ops.aten._unsafe_view
GROUPED_PRODUCT = getattr(
    torch.ops.aten, private_name("torch.ops.aten", "_grouped_mm")
)  # a matrix for each group of rows

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
    """Return torch's fused-attention operator of this `kind` (a key of `_ATTENTION`), with all its overloads."""
    return getattr(torch.ops.aten, _ATTENTION[kind])


# State of the running process: Dynamo, torch.func, profilers, GPU stream.

eval_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None or False if Dynamo is inactive
_STARTS = tuple(private_name("torch.autograd.profiler", name) for name in ("_prepare_profiler", "_enable_profiler"))


def is_transformed() -> bool:
    """Return True inside a torch.func transform, or inside a level of forward-mode AD (`forward_ad.dual_level`)."""
    return torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0


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


def before_profilers_start(call: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `call` whenever one of torch's profilers is about to prepare or start a session inside the `with` block."""

    def start(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call()
        return original(*args, **kwargs)

    profiler = torch.autograd.profiler
    return patched([(profiler, name, partial(start, getattr(profiler, name))) for name in _STARTS])


def functions_unprofiled() -> AbstractContextManager[None]:
    """Let torch's profilers that start inside the `with` block record memory, and no functions.

    When a recorded function (such as FSDP's forward) returns, the profiler writes into the event of the call. If
    another session has begun since, the event's memory is freed already, and the write destroys other data.
    """
    start: Any = torch.autograd.profiler._enable_profiler
    scopes = {torch._C._profiler.RecordScope.LITE_INTERPRETER}  # which no function has here
    return patched([(torch.autograd.profiler, "_enable_profiler", partial(start, scopes=scopes))])


def sleep_on_gpu(cycles: int) -> None:
    """Keep the current GPU's stream busy for `cycles` cycles of the GPU's clock."""
    torch.cuda._sleep(cycles)
