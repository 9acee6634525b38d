"""Recorder of tapes: a dispatch mode that records the operators and saved tensors of one call of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.tape.function_recording import FunctionRecorder
from adacc_hf.tape.inputs import PLACES, argument_tensors, attached_tensors
from adacc_hf.tape.operator_effects import (
    MOVES_STORAGE,
    WRAPPED,
    RankUse,
    RngUse,
    depends_on_data,
    watched_reads,
    written_tensors,
)
from adacc_hf.tape.replay import share_elements, view
from adacc_hf.tape.tape import (
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
    short_name,
    tensor_refs,
)
from adacc_hf.torch_glue.compat import Cache, attention_of, cast_source, class_name, only_reads_cache
from adacc_hf.torch_glue.private import (
    COMPILED_MODULE,
    TO_COPY,
    HigherOrderOperator,
    TorchDispatchMode,
    compiled_call,
    schema_of,
    storage_key,
)
from adacc_hf.torch_glue.rng_state import RandomStates, generator_state
from adacc_hf.torch_glue.second_run import checksum
from adacc_hf.torch_glue.tensors import Checksum, is_fake, is_plain, local_of, runs_on_parts, wraps_others

_NO_OPERATORS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.prim.device.default}
"""Operators that are not recorded, because they create no storage. `prim.device` returns a fake tensor's device."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Classes of dropout modules. Their rates are part of the identity of a block's tapes, because dropout at rate zero
runs no operator."""
_CONSTANT = torch.ops.aten.lift_fresh.default
"""The operator that `torch.tensor()` runs on each tensor that it creates."""
_READ_NO_ELEMENT = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.rand_like.default,
    torch.ops.aten.randn_like.default,
}
"""Operators that read only the layout of their first argument, and none of its elements."""
CACHE = "it reads a key-value cache, whose tensors a recording cannot locate"
SPARSE = "a tensor is sparse or quantized, so its storage does not show its elements"
PYTHON_RANDOM = "it draws from Python's or numpy's random generators, on which any of its operators may depend"


class Recorder(FunctionRecorder, TorchDispatchMode):
    """Dispatch mode that records every operator that creates or changes a storage, and every tensor that autograd
    saves.

    Weak references keep the addresses of all storages in use, so that an address identifies one storage. The tensors
    that autograd saves stay available to check that replay gives the same bits, as rule R7 requires. Of other results,
    which the block frees, only checksums stay. An `autograd.Function` may become one operator (function_recording.py).
    """

    base_of: Callable[[Any], torch.Tensor] = staticmethod(torch.Tensor.detach)  # makes the tensor stored in `bases`
    supports_higher_order_operators = True

    def __init__(
        self,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rng_use: type[RngUse] | None = None,
        keeps_results: bool = False,
    ) -> None:
        super().__init__()
        self.block = block
        self.keeps_results = keeps_results
        self.rng_use = rng_use or RngUse
        self._checksums: dict[int, Checksum] = {}
        """Checksums of the results that autograd has not saved, by value."""
        self._num_examined = 0
        """Number of values of which `_release_results` has kept the tensor or a checksum."""
        self._alive: list[torch.UntypedStorage | StorageWeakRef] = []
        """Storages that no tensor in `bases` keeps alive (of tensors that wrap others), and weak references to freed
        ones. Otherwise a new storage could get the same key."""
        has_cache = any(isinstance(argument, Cache) for argument in (*args, *kwargs.values()))
        self.untrusted: str | None = CACHE if has_cache and only_reads_cache(block) else None
        """The reason why the tape must not be used, or None."""
        self._autocast = [str(torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
        self._stand_in = torch.empty(0)
        """Tensor that is recorded in place of a tensor without a storage."""
        self._modules: list[str] = []
        """Paths of the submodules that are running, the innermost last."""
        self._sharing: dict[int, list[tuple[Source, Geometry]]] = {}
        """Sources and geometries of further existing tensors on the storages of `_externals`, by storage key."""
        for path, tensor in argument_tensors(args, kwargs):
            self._expect(tensor, Source("argument", path))
        self._is_fake = any(map(is_fake, block.parameters()))
        self._parameters = {id(parameter): name for name, parameter in block.named_parameters()}
        for name, parameter in block.named_parameters(remove_duplicate=False):
            self._expect(parameter, Source("parameter", (name,)))
        for name, buffer in block.named_buffers(remove_duplicate=False):
            self._expect(buffer, Source("buffer", (name,)))
        for source, tensor in attached_tensors(block):
            self._expect(tensor, source)
        devices = [tensor.device for tensor, _ in self._externals.values()]
        self._device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
        self._generator_state = generator_state(self._device)
        """The generator's state when the last tensor was saved, or when the call began. None if an operator has drawn
        random numbers since then. A call under a plan, which sees no operators, captures it at these moments too."""
        state = self._generator_state
        self._fake_state = state if state is not None and is_fake(state) else None
        """The random generator's state if the block's tensors are fake, so that it never changes. None otherwise."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled code stays compiled. By default, torch disables it under a dispatch mode."""
        return True

    def refer(self, tensor: torch.Tensor) -> TensorRef:
        """Return a reference to `tensor` for the tape: a view of the latest (or a new) value of its storage."""
        if not has_storage(tensor):
            self.untrusted = self.untrusted or SPARSE
            tensor = self._stand_in
        key = storage_key(tensor.untyped_storage())
        if key not in self._current and key not in self._externals:
            self._note_cached_cast(tensor)
        if key not in self._current:
            base, source = self._externals.get(key, (tensor, Source("unknown", ())))
            # Before `detach`, which gives some tensors another storage.
            self._current[key] = self._add(base, source, None, str(source))
        if self.untrusted is None and (tensor.is_conj() or tensor.is_neg()):
            self.untrusted = "a tensor is conjugated or negated lazily, so its storage does not show its elements"
        return TensorRef(self._current[key], geometry_of(tensor), tensor.dtype)

    def made_value(self, tensor: torch.Tensor) -> int | None:
        """Return the value that `tensor` views, or None if its storage existed before the call or is not recorded."""
        key = storage_key(local_of(tensor).untyped_storage())
        return None if key in self._externals else self._current.get(key)

    def save(self, tensor: torch.Tensor) -> int:
        """Record on the tape that autograd saves `tensor`. Return the tensor's index among the saved tensors."""
        self.slots.append(self.refer(local_of(tensor)))
        self._hold(local_of(tensor))
        self._generator_state = generator_state(self._device) if self._fake_state is None else self._fake_state
        if self._is_in_function:
            self._saved_inside.append(tensor)
        else:
            self._note_slot()
        return len(self.slots) - 1

    def was_written_later(self, ref: TensorRef) -> bool:
        """Return True if the block has changed elements of the tensor `ref`, which it has made, in place since then."""
        value = self.values[ref.value]
        if not value.overwritten or value.source is not None:
            return False
        storage = self._storages[ref.value]
        later_writes = [written for new, written in self._written.items() if new > ref.value]
        return any(self._storages[write.value] == storage and share_elements(ref, write) for write in later_writes)

    def tape(self) -> Tape:
        """Return the tape of the recorded call. Call this method after the block has returned."""
        self._check_attached()
        has_freed = any(v.is_freed(self.bases[v.index]) for v in self.values if v.index not in self._checksums)
        if self.untrusted is None and has_freed:
            self.untrusted = "memory of tensors that backward reads is freed (FSDP inside the block)"
        tape = self._unsealed()
        if tape.untrusted is None and self.reads:
            tape.untrusted = f"{self.reads[0]} reads data into Python or makes a size that depends on data"
        parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.block.named_parameters()]
        dropouts = [(name, m.p) for name, m in self.block.named_modules() if isinstance(m, DROPOUTS)]
        tape.seal([parameters, attention_of(self.block), dropouts, self._autocast])
        return tape

    def _unsealed(self) -> Tape:
        return Tape(
            block_class=class_name(self.block),
            values=self.values,
            operators=self.operators,
            slots=self.slots,
            function_slots=frozenset(self.function_slots),
            untrusted=self.untrusted,
            sharing=tuple(self._shared()),
            checksums=self._checksums,
        )

    def _shared(self) -> Iterator[tuple[int, Source, Geometry]]:
        """Yield the items of `Tape.sharing`."""
        for value in self.values if self._sharing else ():
            if value.source is not None:
                for source, geometry in self._sharing.get(self._storages[value.index], ()):
                    if source.place != "argument":
                        yield value.index, source, geometry

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self.untrusted = self.untrusted or f"the operators inside torch's {func} cannot be recorded"
            return func(*args, **kwargs)
        if self._is_paused:
            self._note_paused(args, kwargs)
            return func(*args, **kwargs)
        if any(map(runs_on_parts, types)):
            return NotImplemented  # the operators on the wrapped tensors are dispatched here next
        arguments = leaves(args, kwargs)
        if func in _NO_OPERATORS or not all(map(self._has_memory, arguments)):
            return func(*args, **kwargs)
        if func is TO_COPY and self._autocast_keeps(args[0], kwargs):
            return func(*args, **kwargs)  # recorded at its first read, like a cast that an earlier call cached
        if func is _CONSTANT and self._is_new_number(args[0]):
            constant = func(*args, **kwargs)
            options = {"dtype": constant.dtype, "device": constant.device}
            self._note(torch.ops.aten.full.default, (list(constant.shape), constant.item()), options, [], constant)
            return constant
        self._release_results()
        recorded_args = map_tensors(args, torch.Tensor, self.refer)
        recorded_kwargs = map_tensors(kwargs, torch.Tensor, self.refer)
        rng_use = self.rng_use(func, args, kwargs)
        ranks = RankUse(func)
        self._in_operator = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._in_operator = False
        is_random, is_collective = rng_use.happened(), ranks.happened()
        if is_collective:  # drop process groups, which no digest can distinguish
            recorded_args, recorded_kwargs = tuple(tensor_refs((recorded_args, recorded_kwargs))), {}
        if depends_on_data(func, args):
            self.reads.append(str(func))
        if self.untrusted is None and schema_of(func).name in MOVES_STORAGE:
            self.untrusted = f"{func} puts another storage under a tensor"
        if all(has_storage(leaf) for leaf in arguments if isinstance(leaf, torch.Tensor)):
            written = written_tensors(func, args, kwargs)
            self._note(func, recorded_args, recorded_kwargs, written, result, is_random, is_collective)
        self._generator_state = None if is_random else self._generator_state
        return result

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        written: list[torch.Tensor],
        result: Any,
        is_random: bool = False,
        is_collective: bool = False,
    ) -> None:
        """Add an operator or Function that has run to the tape, and a value for each storage created or changed."""
        index = len(self.operators)
        is_dropout = is_random and func is torch.ops.aten.native_dropout.default
        original_args = args
        if is_dropout or func in _READ_NO_ELEMENT:  # dropout's mask reads no element of its input
            args = (Blank(args[0].geometry, args[0].dtype, self.values[args[0].value].device), *args[1:])
        module = self._modules[-1] if self._modules else ""
        name = f"{module or 'block'}:{short_name(func)}"
        mutations = [self._next_version(tensor, index, name) for tensor in written]
        fresh = [
            (position, self._make(tensor, index, name))
            for position, tensor in enumerate(leaves(map_tensors(result, torch.Tensor, local_of)))
            if isinstance(tensor, torch.Tensor) and self._has_memory(tensor) and not self._is_known(tensor)
        ]
        if not fresh and not mutations:
            return
        operator = TapeOperator(index, func, args, kwargs, tuple(fresh), tuple(mutations), is_random, module)
        operator.is_collective = is_collective
        operator.generator = self._state_before(operator, name) if is_random else None
        self.operators.append(operator)
        if is_dropout:
            self._derive_dropout(operator, original_args[0])

    def _release_results(self) -> None:
        """Replace the results of the latest operators by checksums, so that the block frees them as it does in
        training. Keep what autograd has saved, and what replay could not compute again to check later operators."""
        if self._is_in_function or self._is_fake or self.keeps_results or self.untrusted is not None:
            return
        saved = {slot.value for slot in self.slots}
        for value in self.values[self._num_examined :]:
            base, producer = self.bases[value.index], value.producer
            operator = None if producer is None else self.operators[producer]
            if operator is None or operator.allocates or not operator.may_run_again or value.index in saved:
                continue
            if value.nbytes and is_plain(base) and storage_key(base.untyped_storage()) == self._storages[value.index]:
                self._checksums[value.index] = checksum(base)
                self._alive.append(StorageWeakRef(base.untyped_storage()))
                self.bases[value.index] = base.new_empty(0)
        self._num_examined = len(self.values)

    def _hold(self, tensor: torch.Tensor) -> None:
        """Keep the value of `tensor` instead of its checksum."""
        if not self._checksums or not has_storage(tensor):
            return
        value = self._current.get(storage_key(tensor.untyped_storage()))
        if value is not None and self._checksums.pop(value, None) is not None:
            with self.paused():
                self.bases[value] = view(tensor.detach(), self.values[value].ref)

    def _state_before(self, drawn: TapeOperator, name: str) -> int | None:
        """Add the state that the default generator had before the random operator `drawn` to the tape, and return its
        index. Return None if a call under a plan cannot capture it, or if the numbers may depend on inputs that a plan
        may compress with loss. Values from another generator are not recomputed (rule R7)."""
        state, device = self._generator_state, self.values[drawn.results()[0]].device
        has_own_generator = any(isinstance(leaf, torch.Generator) for leaf in leaves(drawn.args, drawn.kwargs))
        reads = {ref.value for ref in tensor_refs((drawn.args, drawn.kwargs))} - {old for old, _ in drawn.mutations}
        is_fill = not reads and len(drawn.mutations) <= 1  # a random ReLU changes both its noise and its input
        may_run_again = is_fill or drawn.is_attention
        if state is None or device != self._device or has_own_generator or not may_run_again:
            return None
        state = state.clone() if self._fake_state is not None and device.type == "cpu" else state  # own memory
        index = len(self.values)
        ref = TensorRef(index, geometry_of(state), state.dtype)
        source = Source("generator", (len(self.slots),))
        nbytes = state.nbytes if device.type == "cpu" else 0  # the state of a GPU's generator is in host memory
        self.values.append(TapeValue(index, nbytes, ref, state.device, source, None, f"{name} {source}"))
        self._storages.append(storage_key(state.untyped_storage()))
        self.bases.append(state)
        return index

    def _is_new_number(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is a new tensor with a single number, which replay can create again."""
        return (
            type(tensor) is torch.Tensor
            and tensor.numel() == 1
            and tensor.device.type != "meta"
            and not self._is_known(tensor)
        )

    def _autocast_keeps(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Return True if a cast of `tensor`, with the arguments `kwargs`, may come from autocast, which caches it."""
        is_own = bool(self._autocast) and id(tensor) in self._parameters
        return is_own and kwargs.keys() == {"dtype"} and tensor.requires_grad and torch.is_grad_enabled()

    def _note_cached_cast(self, tensor: torch.Tensor) -> None:
        """Record, at its first read in the block, the operator of autocast's cached cast of a parameter."""
        name = self._parameters.get(id(cast_source(tensor))) if self._autocast else None
        if name is not None:
            parameter = self.refer(self.block.get_parameter(name))
            self._note(TO_COPY, (parameter,), {"dtype": tensor.dtype}, [], tensor)

    def _derive_dropout(self, dropout: TapeOperator, input_ref: TensorRef) -> None:
        """Split a recorded dropout in two (rule R5): its mask, and an operator that computes input * mask * scale."""
        output_values = dict(dropout.outputs)
        probability = dropout.args[1]
        scale = _dropout_scale(probability, self.values[output_values[0]])
        self.values[output_values[0]].producer = len(self.operators)
        dropout.outputs = tuple((position, value) for position, value in dropout.outputs if position != 0)
        self.operators.append(
            TapeOperator(
                len(self.operators),
                torch.ops.aten.native_dropout_backward.default,
                (input_ref, self.values[output_values[1]].ref, scale),
                {},
                ((0, output_values[0]),),
                (),
                False,
                dropout.module,
            )
        )

    def _expect(self, tensor: torch.Tensor, source: Source) -> None:
        """Register an existing tensor that the block may read. It gets a value on the tape when it is first read."""
        local = local_of(tensor)
        if has_storage(local):
            key = storage_key(local.untyped_storage())
            if key in self._externals:
                self._sharing.setdefault(key, []).append((source, geometry_of(local)))
            else:
                self._externals[key] = local.detach(), source

    def _has_memory(self, leaf: Any) -> bool:
        """Return False if `leaf` is a meta or fake tensor, with which DTensors infer shapes, but the block is not."""
        return not isinstance(leaf, torch.Tensor) or self._is_fake or not (leaf.is_meta or is_fake(leaf))

    def _check_attached(self) -> None:
        """Set the source of each attached tensor that the recorded call has replaced to "unknown"."""
        attached = [value for value in self.values if value.place in PLACES]
        current: dict[Any, torch.Tensor] = dict(attached_tensors(self.block)) if attached else {}
        for value in attached:
            tensor = current.get(value.source)
            if tensor is None or storage_key(tensor.untyped_storage()) != self._storages[value.index]:
                value.source = Source("unknown", ())

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if not has_storage(tensor):
            return True
        key = storage_key(tensor.untyped_storage())
        return key in self._current or key in self._externals

    def _make(self, tensor: torch.Tensor, operator: int, name: str) -> int:
        """Add a value for the storage of `tensor`, which the `operator` has created, and return its index."""
        if self.untrusted is None and wraps_others(tensor):
            self.untrusted = WRAPPED
        return self._add(tensor, None, operator, name)

    def _next_version(self, tensor: torch.Tensor, operator: int, name: str) -> tuple[int, int]:
        """Add a value for the storage of `tensor`, which an operator has changed in place, and return (old value, new
        value). The new one covers the same part of the storage as the old one, even if `tensor` is a smaller view."""
        old = self.refer(tensor).value
        self.values[old].overwritten = True
        with self.paused():  # a Function is noted while this mode is active
            new = self._add(view(tensor.detach(), self.values[old].ref), None, operator, name)
        self._written[new] = TensorRef(old, geometry_of(tensor), tensor.dtype)
        return old, new

    def _add(self, tensor: torch.Tensor, source: Source | None, producer: int | None, name: str) -> int:
        index = len(self.values)
        storage = tensor.untyped_storage()
        ref = TensorRef(index, geometry_of(tensor), tensor.dtype)
        self.values.append(TapeValue(index, storage.nbytes(), ref, tensor.device, source, producer, name))
        base = self.base_of(tensor)
        if storage_key(base.untyped_storage()) != storage_key(storage):
            self._alive.append(storage)
        self.bases.append(base)
        self._storages.append(storage_key(storage))
        self._current[storage_key(storage)] = index
        return index

    def _enter_module(self, name: str, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # torch.cond traces its branches, and refuses this change in them
            self._modules.append(name)

    def _leave_module(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._modules.pop()

    @contextmanager
    def watching_reads(self) -> Iterator[None]:
        """Record reads of tensors into Python, and detect draws from Python's and numpy's generators, inside the `with`
        block. Reads inside a user-defined operator, which replay runs again as a whole, are not recorded."""
        before = RandomStates()
        with watched_reads(lambda method: None if self._in_operator else self.reads.append(method)):
            yield
        if before.have_advanced():
            self.untrusted = self.untrusted or PYTHON_RANDOM

    @contextmanager
    def naming_modules(self) -> Iterator[None]:
        """Record which submodule runs each operator, except compiled ones, which hooks would recompile."""
        modules = dict(self.block.named_modules())
        compiled = tuple(  # by torch.compile, as a wrapper or in place
            f"{name}."
            for name, module in modules.items()
            if name.rpartition(".")[2] == COMPILED_MODULE or compiled_call(module) is not None
        )
        with ExitStack() as stack:
            for name, module in modules.items():
                if name and not f"{name}.".startswith(compiled):
                    stack.callback(module.register_forward_pre_hook(partial(self._enter_module, name)).remove)
                    stack.callback(module.register_forward_hook(self._leave_module).remove)
            yield


def _dropout_scale(probability: float, dropped: TapeValue) -> float:
    """Return the factor by which dropout multiplies the elements that it does not zero.

    CUDA computes the reciprocal in float32, except for float64. For one rate in seven, it differs from the double.
    """
    if probability >= 1.0:
        return 0.0
    if dropped.device.type != "cuda" or dropped.ref.dtype is torch.float64:
        return 1.0 / (1.0 - probability)
    return float(np.float32(1.0) / np.float32(1.0 - probability))
