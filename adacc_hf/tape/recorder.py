"""Recording a tape: one call of a block under a dispatch mode and saved-tensor hooks, and what cannot be seen so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from adacc_hf.tape.data_reads import Read, deciding_tensors, judge, watched_reads
from adacc_hf.tape.function_recording import FunctionRecorder
from adacc_hf.tape.inputs import PLACES, argument_tensors, held_tensors
from adacc_hf.tape.replay import share_elements, view
from adacc_hf.tape.tape import (
    COLLECTIVES,
    Blank,
    Geometry,
    Source,
    Tape,
    TapeOperator,
    TapeValue,
    TensorRef,
    geometry_of,
    has_storage,
    leaves,
    map_tensors,
    tensor_refs,
)
from adacc_hf.torch_glue.compat import attention_of, cast_from, class_name, has_cache, keeps_cache
from adacc_hf.torch_glue.private import (
    COMPILED_MODULE,
    TO_COPY,
    TensorBase,
    TorchDispatchMode,
    compiled_call,
    op_name,
    schema_of,
    storage_key,
    tree_leaves,
)
from adacc_hf.torch_glue.rng_state import PythonStates, generator_state
from adacc_hf.torch_glue.tensors import is_fake, local_of, runs_on_parts, storage_of, wraps_others

_NO_OPERATORS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.prim.device.default}
"""The last is how a tensor without memory is asked for its device."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Modules whose rate tells blocks apart: at a rate of zero they run no operator."""
_CONSTANT = torch.ops.aten.lift_fresh.default
"""What torch.tensor() puts its new tensor through."""
_MOVES_STORAGE = {"aten::set_", "aten::resize_", "aten::resize_as_"}
"""Operators that put another storage under a tensor."""
_READ_NO_ELEMENT = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.rand_like.default,
    torch.ops.aten.randn_like.default,
}
"""Operators that read of their first argument how it lies, and no element."""
CACHE = "it reads a key-value cache, in which no record shows where tensors are"
DICE = "it draws from Python's or numpy's random generators, on which any of its operators may depend"


class Recorder(FunctionRecorder, TorchDispatchMode):
    """Notes every operator that makes or changes a storage, and every tensor that autograd saves.

    It keeps all storages alive while it records, so that one address means one storage, and so that the originals are
    at hand for verification (rule R7). An `autograd.Function` may become one operator (function_recording.py).
    """

    def __init__(
        self,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rng_use: type[RngUse] | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.rng_use = rng_use or RngUse
        self.values: list[TapeValue] = []
        self.bases: list[torch.Tensor] = []
        """The base tensor of each value, detached."""
        self._storages: list[int] = []
        """Where each value's storage is."""
        self._alive: list[torch.UntypedStorage] = []
        """Storages that no base holds, as of tensors that consist of others: another storage may not take their key."""
        self.operators: list[TapeOperator] = []
        self.slots: list[TensorRef] = []
        self._written: dict[int, TensorRef] = {}
        """For each version that an operator made of the one before, what of that it wrote to."""
        self.untrusted: str | None = CACHE if keeps_cache(block) and has_cache(partial(block, **kwargs), args) else None
        self.reads: list[Read] = []
        self._in_operator = False
        self._autocast = [str(torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
        self._current: dict[int, int] = {}
        self._stand_in = torch.empty(0)
        """For tensors without a storage."""
        self._modules: list[str] = []
        self._externals: dict[int, tuple[torch.Tensor, Source]] = {}
        self._sharing: dict[int, list[tuple[Source, Geometry]]] = {}
        """By storage, where else a tensor on it stands than in `_externals`."""
        self._arguments: dict[int, list[tuple[tuple[Any, ...], torch.Tensor]]] = {}
        """By storage."""
        for path, tensor in argument_tensors(args, kwargs):
            self._expect(tensor, Source("argument", path))
            self._arguments.setdefault(storage_key(storage_of(tensor)), []).append((path, tensor))
        self._is_fake = any(map(is_fake, block.parameters()))
        self._parameters = {id(parameter): name for name, parameter in block.named_parameters()}
        for name, parameter in block.named_parameters(remove_duplicate=False):
            self._expect(parameter, Source("parameter", (name,)))
        for name, buffer in block.named_buffers(remove_duplicate=False):
            self._expect(buffer, Source("buffer", (name,)))
        for source, tensor in held_tensors(block):
            self._expect(tensor, source)
        devices = [tensor.device for tensor, _ in self._externals.values()]
        self._device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
        self._generator_state = generator_state(self._device)
        """What the generator's state was when a tensor was saved last, or when the call began; None once somebody has
        drawn since. A plan takes it at these moments too, when no mode shows it any operator."""
        state = self._generator_state
        self._fake_state = state if state is not None and is_fake(state) else None
        """That of tensors without memory, which never moves."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled runs compiled in recorded calls too, as in all others. By itself torch would not do so."""
        return True

    def refer(self, tensor: torch.Tensor) -> TensorRef:
        """The reference to `tensor` in the state it is in now."""
        if not has_storage(tensor):
            self.untrusted = self.untrusted or "a tensor is sparse or quantized, so that no storage shows what it holds"
            tensor = self._stand_in
        key = storage_key(tensor.untyped_storage())
        if key not in self._current and key not in self._externals:
            self._note_cached_cast(tensor)
        if key not in self._current:
            base, source = self._externals.get(key, (tensor, Source("unknown", ())))
            self._current[key] = self._add(base, source, None, str(source))  # detached, some have another storage
        if self.untrusted is None and (tensor.is_conj() or tensor.is_neg()):
            self.untrusted = "a tensor is conjugated or negated lazily, which its storage does not show"
        return TensorRef(self._current[key], geometry_of(tensor), tensor.dtype)

    def made_value(self, tensor: torch.Tensor) -> int | None:
        """The value that `tensor` views, if the block made its storage."""
        key = storage_key(local_of(tensor).untyped_storage())
        return None if key in self._externals else self._current.get(key)

    def save(self, tensor: torch.Tensor) -> int:
        """Note that autograd saves `tensor`; return the slot's index."""
        self._save(tensor)
        if self._is_in_function:
            self._saved_inside.append(tensor)
        return len(self.slots) - 1

    def _save(self, tensor: torch.Tensor) -> None:
        self.slots.append(self.refer(local_of(tensor)))
        self._generator_state = generator_state(self._device) if self._fake_state is None else self._fake_state

    def was_written_later(self, ref: TensorRef) -> bool:
        """Whether `ref`, of a storage that the block made, has elements that the block changed in place afterwards."""
        record = self.values[ref.value]
        if not record.overwritten or record.source is not None:
            return False
        storage = self._storages[ref.value]
        later = [written for new, written in self._written.items() if new > ref.value]
        return any(self._storages[w.value] == storage and share_elements(ref, w) for w in later)

    def tape(self) -> Tape:
        """The record of all that ran. Call it after the block has returned."""
        self._check_held()
        if self.untrusted is None and any(map(is_freed, self.bases, self.values)):
            self.untrusted = "memory is taken away from tensors that backward reads (FSDP inside the block)"
        tape = self._unsealed()
        if tape.untrusted is None:
            tape.reads, more = judge(tape, self.reads, self._arguments_of)
            tape.untrusted = None if more is None else str(more)
        parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.block.named_parameters()]
        dropouts = [(name, m.p) for name, m in self.block.named_modules() if isinstance(m, DROPOUTS)]
        tape.seal([parameters, attention_of(self.block), dropouts, self._autocast])
        return tape

    def _arguments_of(self, value: int) -> list[tuple[tuple[Any, ...], torch.Tensor]]:
        return self._arguments.get(self._storages[value], [])

    def _unsealed(self) -> Tape:
        return Tape(
            block_class=class_name(self.block),
            values=self.values,
            operators=self.operators,
            slots=self.slots,
            function_slots=frozenset(self.function_slots),
            untrusted=self.untrusted,
            sharing=tuple(self._shared()),
        )

    def _shared(self) -> Iterator[tuple[int, Source, Geometry]]:
        """Yield (value, source, geometry) of each tensor that stands elsewhere on the storage of a value.

        Which arguments share a storage is part of a call's key, and is left out.
        """
        for value in self.values if self._sharing else ():
            if value.source is not None:
                for source, geometry in self._sharing.get(self._storages[value.index], ()):
                    if source.place != "argument":
                        yield value.index, source, geometry

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            self._note_paused(args, kwargs)
            return func(*args, **kwargs)
        if any(map(runs_on_parts, types)):
            return NotImplemented  # what it runs on the parts comes here next
        given = leaves(args, kwargs)
        if func in _NO_OPERATORS or not all(map(self._has_memory, given)):
            return func(*args, **kwargs)
        if func is TO_COPY and self._autocast_keeps(args[0], kwargs):
            return func(*args, **kwargs)  # noted where it is first read, as one is that an earlier call has left there
        if func is _CONSTANT and self._is_new_number(args[0]):
            return self._note_number(func(*args, **kwargs))
        recorded_args = map_tensors(args, torch.Tensor, self.refer)
        recorded_kwargs = map_tensors(kwargs, torch.Tensor, self.refer)
        if func.namespace in COLLECTIVES:  # the rest are groups of ranks, which no digest can tell apart
            recorded_args, recorded_kwargs = tuple(tensor_refs((recorded_args, recorded_kwargs))), {}
        rng_use = self.rng_use(func, args, kwargs)
        self._in_operator = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._in_operator = False
        drew = rng_use.happened()
        self._check_trust(func, args)
        if all(has_storage(leaf) for leaf in given if isinstance(leaf, torch.Tensor)):
            written = written_tensors(func, args, kwargs)
            self._note(func, recorded_args, recorded_kwargs, written, result, drew)
        self._generator_state = None if drew else self._generator_state
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor], result: Any, drew: bool) -> None:
        index = len(self.operators)
        is_dropout = drew and func is torch.ops.aten.native_dropout.default
        given = args
        if is_dropout or func in _READ_NO_ELEMENT:  # of dropout's input the mask needs no element
            args = (Blank(args[0].geometry, args[0].dtype, self.values[args[0].value].device), *args[1:])
        module = self._modules[-1] if self._modules else ""
        name = f"{module or 'block'}:{op_name(func).strip('_')}"
        mutations = [self._next_version(tensor, index, name) for tensor in written]
        fresh = [
            (position, self._make(tensor, index, name))
            for position, tensor in enumerate(_local_leaves(result))
            if isinstance(tensor, torch.Tensor) and self._has_memory(tensor) and not self._is_known(tensor)
        ]
        if not fresh and not mutations:
            return
        operator = TapeOperator(index, func, args, kwargs, tuple(fresh), tuple(mutations), drew, module)
        operator.generator = self._state_before(operator, name) if drew else None
        self.operators.append(operator)
        if is_dropout:
            self._derive_dropout(operator, given[0])

    def _state_before(self, drawn: TapeOperator, name: str) -> int | None:
        """A value for the state that the default generator was in before an operator drew from it.

        None if no plan could take it then, or if what was drawn may follow from data too, which may be stored with
        loss: unless it is attention, or an `autograd.Function`, whose data no codec may change then, all that it reads
        is what it fills. That it is the right one is verified: the operator may have drawn from elsewhere.
        """
        state, device = self._generator_state, self.values[drawn.made()[0]].device
        has_own_generator = any(isinstance(leaf, torch.Generator) for leaf in leaves(drawn.args, drawn.kwargs))
        reads = {ref.value for ref in tensor_refs((drawn.args, drawn.kwargs))} - {old for old, _ in drawn.mutations}
        is_filled = not reads and len(drawn.mutations) <= 1  # a random ReLU changes its noise and its input
        may_run_again = is_filled or drawn.is_attention or drawn.is_function
        if state is None or device != self._device or has_own_generator or not may_run_again:
            return None
        index = len(self.values)
        ref = TensorRef(index, geometry_of(state), state.dtype)
        source = Source("generator", (len(self.slots),))
        nbytes = state.nbytes if device.type == "cpu" else 0  # a GPU's lies on the host
        self.values.append(TapeValue(index, nbytes, ref, state.device, source, None, f"{name} {source}"))
        self._storages.append(storage_key(state.untyped_storage()))
        self.bases.append(state)
        return index

    def _is_new_number(self, tensor: torch.Tensor) -> bool:
        """Whether a constant is one number that replay can make anew."""
        return (
            type(tensor) is torch.Tensor
            and tensor.numel() == 1
            and tensor.device.type != "meta"
            and not self._is_known(tensor)
        )

    def _note_number(self, constant: torch.Tensor) -> torch.Tensor:
        """Note a number out of Python as if an operator had made it; returns it."""
        kwargs = {"dtype": constant.dtype, "device": constant.device}
        self._note(torch.ops.aten.full.default, (list(constant.shape), constant.item()), kwargs, [], constant, False)
        return constant

    def _autocast_keeps(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether a cast of `tensor` may be one of a parameter that autocast keeps for later calls."""
        is_own = bool(self._autocast) and id(tensor) in self._parameters
        return is_own and kwargs.keys() == {"dtype"} and tensor.requires_grad and torch.is_grad_enabled()

    def _note_cached_cast(self, tensor: torch.Tensor) -> None:
        """Note the cast of a parameter that autocast keeps, whether this call made it or an earlier one did.

        At its first reader in both cases: autocast casts a product's weight before its input, and only if it has to.
        """
        name = self._parameters.get(id(cast_from(tensor))) if self._autocast else None
        if name is not None:
            parameter = self.refer(self.block.get_parameter(name))
            index = len(self.operators)
            module = self._modules[-1] if self._modules else ""
            value = self._make(tensor, index, f"{module or 'block'}:to_copy")
            kwargs = {"dtype": tensor.dtype}
            self.operators.append(TapeOperator(index, TO_COPY, (parameter,), kwargs, ((0, value),), (), False, module))

    def _derive_dropout(self, dropout: TapeOperator, input_ref: TensorRef) -> None:
        """Give dropout's result an operator of its own: input * mask * scale; only the mask is random (rule R5)."""
        made = dict(dropout.outputs)
        probability = dropout.args[1]
        scale = _dropout_scale(probability, self.values[made[0]])
        self.values[made[0]].producer = len(self.operators)
        dropout.outputs = tuple((position, value) for position, value in dropout.outputs if position != 0)
        self.operators.append(
            TapeOperator(
                len(self.operators),
                torch.ops.aten.native_dropout_backward.default,
                (input_ref, self.values[made[1]].ref, scale),
                {},
                ((0, made[0]),),
                (),
                False,
                dropout.module,
            )
        )

    def _check_trust(self, func: Any, args: tuple[Any, ...]) -> None:
        for tensor in deciding_tensors(func, args):
            self._read(tensor, str(func))
        if self.untrusted is None and schema_of(func).name in _MOVES_STORAGE:
            self.untrusted = f"{func} puts another storage under a tensor"

    def _read(self, tensor: torch.Tensor, by: str) -> None:
        """Note that Python has seen the data of `tensor`, or that it decided a size."""
        self.reads.append(Read(self.refer(tensor).value, by))

    def _expect(self, tensor: torch.Tensor, source: Source) -> None:
        """Name what the block may read. It gets a value when it is read: unused arguments are no part of the tape."""
        local = local_of(tensor)
        if has_storage(local):
            key = storage_key(local.untyped_storage())
            if key in self._externals:
                self._sharing.setdefault(key, []).append((source, geometry_of(local)))
            else:
                self._externals[key] = local.detach(), source

    def _has_memory(self, leaf: Any) -> bool:
        """Whether `leaf` is no tensor without memory, on which DTensors find out shapes, if the block's own have it."""
        return not isinstance(leaf, torch.Tensor) or self._is_fake or not (leaf.is_meta or is_fake(leaf))

    def _check_held(self) -> None:
        """Trust what else hangs on the block only where it is after the call what it was before."""
        found = [(value, value.source) for value in self.values if value.source is not None]
        looked_up = [(value, source) for value, source in found if source.place in PLACES]
        now = dict(held_tensors(self.block)) if looked_up else {}
        for value, source in looked_up:
            tensor = now.get(source)
            if tensor is None or storage_key(tensor.untyped_storage()) != self._storages[value.index]:
                value.source = Source("unknown", ())

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if not has_storage(tensor):
            return True
        key = storage_key(tensor.untyped_storage())
        return key in self._current or key in self._externals

    def _make(self, tensor: torch.Tensor, operator: int, name: str) -> int:
        if self.untrusted is None and wraps_others(tensor):
            self.untrusted = WRAPPED
        return self._add(tensor, None, operator, name)

    def _next_version(self, tensor: torch.Tensor, operator: int, name: str) -> tuple[int, int]:
        """Give the storage that `tensor` views a new version; its base stays as it was."""
        old = self.refer(tensor).value
        self.values[old].overwritten = True
        new = self._add(view(tensor.detach(), self.values[old].ref), None, operator, name)
        self._written[new] = TensorRef(old, geometry_of(tensor), tensor.dtype)
        return old, new

    def _add(self, tensor: torch.Tensor, source: Source | None, producer: int | None, name: str) -> int:
        index = len(self.values)
        storage = tensor.untyped_storage()
        ref = TensorRef(index, geometry_of(tensor), tensor.dtype)
        self.values.append(TapeValue(index, storage.nbytes(), ref, tensor.device, source, producer, name))
        base = tensor.detach()
        if storage_key(base.untyped_storage()) != storage_key(storage):
            self._alive.append(storage)
        self.bases.append(base)
        self._storages.append(storage_key(storage))
        self._current[storage_key(storage)] = index
        return index

    def _enter_module(self, name: str, *_: Any) -> None:
        self._modules.append(name)

    def _leave_module(self, *_: Any) -> None:
        self._modules.pop()

    @contextmanager
    def watching_reads(self) -> Iterator[None]:
        """While open, what the block turns into lists and arrays is noted, and what it draws from Python's generators.

        No operator tells of either. What an operator of the user's own reads is its own affair: replay has it run
        again, and compares.
        """
        before = PythonStates()
        with watched_reads(lambda tensor, by: None if self._in_operator else self._read(tensor, by)):
            yield
        if before.have_moved():
            self.untrusted = self.untrusted or DICE

    @contextmanager
    def naming_modules(self) -> Iterator[None]:
        """While open, operators are noted with the path of the submodule that runs them.

        What is compiled has no hooks inside: it would be compiled once more with them.
        """
        modules = dict(self.block.named_modules())
        compiled = tuple(f"{name}." for name, module in modules.items() if _is_compiled(name, module))
        with ExitStack() as stack:
            for name, module in modules.items():
                if name and not f"{name}.".startswith(compiled):
                    stack.callback(module.register_forward_pre_hook(partial(self._enter_module, name)).remove)
                    stack.callback(module.register_forward_hook(self._leave_module).remove)
            yield


def _is_compiled(name: str, module: nn.Module) -> bool:
    """Whether torch.compile was told to compile what the module at path `name` runs, as a wrapper or in place."""
    return name.rpartition(".")[2] == COMPILED_MODULE or compiled_call(module) is not None


def moves_storage(operator: TapeOperator) -> bool:
    """Whether an operator puts another storage under a tensor."""
    return not operator.is_function and schema_of(operator.target).name in _MOVES_STORAGE


def is_freed(base: torch.Tensor, value: TapeValue) -> bool:
    """Whether the memory of a recorded tensor was taken away."""
    return base.untyped_storage().nbytes() < value.nbytes


def _local_leaves(result: Any) -> list[Any]:
    return [local_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(result)]


def _dropout_scale(probability: float, dropped: TapeValue) -> float:
    """What dropout multiplies by what it keeps. CUDA's takes the reciprocal in the type that it computes in: of halves
    and float32 that is float32, where it differs from the one in double precision for one rate in seven."""
    if probability >= 1.0:
        return 0.0
    if dropped.device.type != "cuda" or dropped.ref.dtype is torch.float64:
        return 1.0 / (1.0 - probability)
    return float(np.float32(1.0) / np.float32(1.0 - probability))


def _may_write(func: Any) -> bool:
    """Whether an operator may write its arguments, as its schema declares. Those of torch.distributed declare nothing:
    any of theirs may be written."""
    return schema_of(func).is_mutable or func.namespace == "c10d"


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensor arguments that the operator may write, one per storage."""
    written: dict[int, torch.Tensor] = {}
    for position, argument in enumerate(schema_of(func).arguments if _may_write(func) else ()):
        is_declared = argument.alias_info is not None and argument.alias_info.is_write
        if not is_declared and func.namespace != "c10d":
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in leaves(given):
            if isinstance(tensor, torch.Tensor):
                written.setdefault(storage_key(tensor.untyped_storage()), tensor)
    return list(written.values())


# Which operators draw random numbers (rule R5).


class RngUse:
    """Finds out whether one operator draws random numbers, by the state of the generator before and after.

    The tag alone says too much: fused attention carries it, and draws only with dropout. Operators from outside torch
    may lack it.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = leaves(args, kwargs)
        self._own_generator = any(isinstance(leaf, torch.Generator) for leaf in given)
        self._device = torch.device("cpu")
        self._before: bytes | tuple[int, int] | None = None
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            devices = [leaf for leaf in given if isinstance(leaf, torch.device)]  # one that is asked for comes first
            devices += [leaf.device for leaf in given if isinstance(leaf, torch.Tensor)]
            self._device = devices[0] if devices else self._device
            self._before = self._state()

    def happened(self) -> bool:
        return self._own_generator or (self._before is not None and self._state() != self._before)

    def _state(self) -> bytes | tuple[int, int]:
        """The default generator's state; reading it does not synchronise, and no tensor of it stays."""
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            generator = torch.cuda.default_generators[index]
            return generator.initial_seed(), generator.get_offset()
        return TensorBase.numpy(torch.get_rng_state()).tobytes()  # blocks' own calls of .numpy() are watched


# What no operator of a block shows: code that torch.compile has made of a part of it, and what tensors consist of.

COMPILED = "a part of it runs as code that torch.compile made, whose operators no record shows"

WRAPPED = "it makes tensors that consist of others (float8 training), which no storage shows"
CHANGED_UNSEEN = "it changes in place, behind autograd's back (`.data`), what it saved for backward"
HIDDEN = (COMPILED, WRAPPED)
"""Reasons for which a tape's operators cannot be run one by one."""

_NODE = "CompiledFunctionBackward"
"""What autograd calls the one node of a compiled graph, whatever its backend."""


def runs_compiled_code(result: Any, given: Any) -> bool:
    """Whether compiled code took part in making `result` out of `given`, both trees of tensors."""
    seen = {leaf.grad_fn for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)}
    nodes = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == _NODE:
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False
