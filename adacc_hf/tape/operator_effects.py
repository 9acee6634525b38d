"""Effects of operators (in-place writes, random draws, communication, reads of data into Python), and code that hides
operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adacc_hf.tape.tape import TapeOperator, leaves
from adacc_hf.torch_glue.private import TensorBase, collective_counts, schema_of, storage_key, tree_leaves
from adacc_hf.torch_glue.watchers import Watchers

COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
)
"""Namespaces of collective operators, which communicate with other ranks."""
_LOCAL = frozenset({"aten", "prim", "prims"})
"""Namespaces whose operators never communicate with other ranks."""
MOVES_STORAGE = {"aten::set_", "aten::resize_", "aten::resize_as_"}
"""Names of the operators that replace a tensor's storage by another."""
_STATISTICS = ("running_mean", "running_var")
"""Arguments that batch norms write to, although the schema of `native_batch_norm` does not declare it."""


def moves_storage(operator: TapeOperator) -> bool:
    """Return True if the operator replaces a tensor's storage."""
    return not operator.is_function and schema_of(operator.target).name in MOVES_STORAGE


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensor arguments that the recorded operator may write to, one per storage."""
    written: dict[int, torch.Tensor] = {}
    is_collective = func.namespace == "c10d"  # any operator of torch.distributed may
    is_training = operator_argument(func, args, kwargs, ("training",)) is not False
    for position, argument in enumerate(schema_of(func).arguments):
        is_declared = argument.alias_info is not None and argument.alias_info.is_write
        may_write = is_declared or is_collective or (argument.name in _STATISTICS and is_training)
        argument_value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in leaves(argument_value) if may_write else ():
            if isinstance(tensor, torch.Tensor):
                written.setdefault(storage_key(tensor.untyped_storage()), tensor)
    return list(written.values())


class RngUse:
    """Detector of random draws by one operator, by the random generator's state before and after the operator.

    The tag `nondeterministic_seeded` does not suffice. Fused attention has the tag, but draws only with dropout.
    Operators from outside torch may lack the tag.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = leaves(args, kwargs)
        self._has_own_generator = any(isinstance(leaf, torch.Generator) for leaf in arguments)
        self._device = torch.device("cpu")
        self._before: bytes | tuple[int, int] | None = None
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            devices = [leaf for leaf in arguments if isinstance(leaf, torch.device)]  # a requested device comes first
            devices += [leaf.device for leaf in arguments if isinstance(leaf, torch.Tensor)]
            self._device = devices[0] if devices else self._device
            self._before = self._state()

    def happened(self) -> bool:
        """Return True if the operator has drawn random numbers. Call this after the operator."""
        return self._has_own_generator or (self._before is not None and self._state() != self._before)

    def _state(self) -> bytes | tuple[int, int]:
        """Return the default generator's state, without synchronizing the device or keeping a tensor."""
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            generator = torch.cuda.default_generators[index]
            return generator.initial_seed(), generator.get_offset()
        return TensorBase.numpy(torch.get_rng_state()).tobytes()  # bypasses the watched Tensor.numpy


class DeclaredRngUse(RngUse):
    """Detector of random draws on fake tensors, by the operator's tag and the call's dropout probability."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        may_draw = torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in DESCRIBED
        self._is_random = may_draw and operator_argument(func, args, kwargs, _PROBABILITIES) != 0

    def happened(self) -> bool:
        return self._is_random


DESCRIBED = ("aten", "adacc_hf")
"""Namespaces of operators whose tags tell if they draw random numbers: torch's, and CompAct's random projection."""
_PROBABILITIES = ("dropout_p", "p")
"""Names that operators use for the argument with the dropout probability."""


def operator_argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the argument of an operator call that has one of `names`, or None."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name in names:
            return args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
    return None


class RankUse:
    """Detector of communication with other ranks by one operator. An operator that communicates inside, such as
    DeepSpeed's `dim_zero_all_to_all`, changes the number of collectives that a process group has run."""

    def __init__(self, func: Any) -> None:
        self._is_declared = func.namespace in COLLECTIVES
        self._before = None if self._is_declared or func.namespace in _LOCAL else collective_counts()

    def happened(self) -> bool:
        """Return True if the operator communicates with other ranks. Call this after the operator."""
        return self._is_declared or (self._before is not None and self._before != collective_counts())


# Reasons why operators do not show all that a block does: compiled code, tensors that wrap others.

COMPILED = "torch.compile compiled a part of it, whose operators cannot be recorded"

WRAPPED = "it makes tensors that consist of others (float8 training) and have no storage of their own"
CHANGED_UNSEEN = "it changes tensors saved for backward in place, behind autograd's back (`.data`)"
HIDDEN = (COMPILED, WRAPPED)
"""Reasons, as values of `Tape.untrusted`, for which a tape's operators cannot be run one by one."""

_NODE = "CompiledFunctionBackward"
"""Name of the autograd node of a graph that torch.compile has compiled, with any backend."""


def runs_compiled_code(result: Any, inputs: Any) -> bool:
    """Return True if compiled code took part in computing `result` from `inputs`. Both are nested containers of
    tensors."""
    visited = {leaf.grad_fn for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
    nodes = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        if node.name() == _NODE:
            return True
        visited.add(node)
        nodes += [next_node for next_node, _ in node.next_functions]
    return False


# Data that a block reads into Python, such as the lengths at which attention over images splits its tokens. Other data
# may run other operators, so the block's tape is not trusted (rule R8).

_METHODS = ("tolist", "numpy")
"""Tensor methods that read data into Python without an operator, so that dispatch modes do not see the read."""
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

NoteRead = Callable[[str], None]


def depends_on_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if data determines the shape of the result of the operator `func`, or a Python number that it
    returns."""
    if schema_of(func).name == "aten::index":  # only a mask among the indices decides the size
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return not _TAGS.isdisjoint(func.tags)


def _patch_methods() -> Callable[[], None]:
    """Patch `Tensor.tolist` and `Tensor.numpy` to report calls to a callback of the thread, and return a function that
    removes the patch. A torch function mode would make torch.compile recompile parts of a block."""
    before = {method: torch.Tensor.__dict__.get(method) for method in _METHODS}

    def watched_method(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note = _READS.current()
            if note is not None:
                note(f"Tensor.{method}")
            return original(tensor, *args, **kwargs)

        return call

    def undo() -> None:
        for method, function in before.items():
            if function is None:
                delattr(torch.Tensor, method)
            else:
                setattr(torch.Tensor, method, function)

    for method, function in before.items():
        setattr(torch.Tensor, method, watched_method(method, function or getattr(TensorBase, method)))
    return undo


_READS = Watchers[NoteRead](_patch_methods)
watched_reads = _READS.watching
"""Context manager `watched_reads(note)`. Inside the `with` block, `note(method name)` is called each time this thread
converts a tensor to a list or a numpy array."""
