"""Measurement of the memory that a step takes, and of the memory of a device.

Meters count live bytes over time, as the allocator does, temporaries and all threads included.

Other functions return the static memory of a step and the memory available on a device, and detect out-of-memory
errors.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.profiler import profile

from adacc_hf.artifacts.errors import ProfilerConflictError
from adacc_hf.torch_glue.cpu_allocations import MARK_BYTES, allocator_readings, count_all_threads
from adacc_hf.torch_glue.distributed import gradients_of
from adacc_hf.torch_glue.host_memory import free_host_bytes
from adacc_hf.torch_glue.private import (
    BACKWARD_HOOKS,
    before_profilers_start,
    functions_unprofiled,
    is_profiling,
    storage_key,
    tree_leaves,
)
from adacc_hf.torch_glue.tensors import parts_with_memory, without_gradient_hooks

FRAGMENTATION_SHARE = 0.1
"""Share of a GPU's memory reserved for fragmentation in torch's caching allocator, unless its segments are expandable.

tests/emulated_cuda/fragments.py fills an emulated GPU, on which `AdaccConfig.memory_margin` alone is not enough. The
share has not been measured on a GPU yet.
"""
FRAGMENTATION_HINT = (
    f'memory_budget="auto" reserves {FRAGMENTATION_SHARE:.0%} of the GPU for memory fragmentation; set '
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before training to use this memory too"
)

HEAP_SHARE = 0.25
"""Share of a CPU's free memory reserved for what the C library's heap keeps besides the live storages: 19 to 29 % of
the memory that training added in measured runs (GPT-2 with peaks of 0.35 to 1.3 GiB, glibc 2.36)."""

MEASURABLE = ("cpu", "cuda")
"""Types of the devices for which there is a memory meter."""
UNMEASURABLE = (
    "memory on device {} cannot be measured: train on cpu or cuda (use_cpu=True in TrainingArguments), or train "
    "without adacc_hf"
)
"""Error message for devices for which there is no memory meter."""

_FAILED_ALLOCATION_MESSAGES = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "NVRTC_ERROR_OUT_OF_MEMORY",
    "HIP out of memory",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Messages of failed allocations that are plain RuntimeErrors, and not torch.OutOfMemoryError. They come from torch's
CPU allocator, and from libraries that allocate memory themselves (cuBLAS, cuDNN, Triton, the kernel loader)."""


def refuse_unmeasurable(model: nn.Module) -> None:
    """Raise ValueError if `model` is on a device whose memory cannot be measured, such as MPS, XPU or NPU."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type not in MEASURABLE:
        raise ValueError(UNMEASURABLE.format(device))


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` says that the device or the machine ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FAILED_ALLOCATION_MESSAGES)


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Live bytes when a memory meter was marked, and the maximum of the live bytes until the next mark.

    All numbers of bytes are relative to the start of the meter.
    """

    label: tuple[Any, ...]
    live_bytes: int
    """Live bytes at the mark."""
    max_bytes: int
    """Maximum of the live bytes from the mark to the next mark."""


class MemoryMeter(AbstractContextManager["MemoryMeter"]):
    """Context manager that measures the live bytes of one device at marks, which the caller sets, and between marks.

    `points` is set on exit.
    """

    points: list[MemoryPoint]
    is_open = False

    def mark(self, label: tuple[Any, ...], dying_bytes: int = 0) -> None:
        """Set a mark named `label`. `dying_bytes` are bytes that will be freed immediately after the mark.

        `CpuMemoryMeter` does not count these bytes in the maximum that follows the mark. Outside the meter's `with`
        block, do nothing, because code that reports freed tensors may call this method at any time.
        """
        if self.is_open:
            self._mark(label, dying_bytes)

    def _mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        raise NotImplementedError

    @property
    def peak_bytes(self) -> int:
        """Maximum of the live bytes over the whole measurement."""
        return max(point.max_bytes for point in self.points)

    @staticmethod
    def for_device(device: torch.device) -> MemoryMeter:
        """Return a meter for `device`. Raise ValueError for a device type other than cpu and cuda."""
        if device.type == "cpu":
            return CpuMemoryMeter()
        if device.type == "cuda":
            return CudaMemoryMeter(device)
        raise ValueError(UNMEASURABLE.format(device))


_session_lock = threading.RLock()
"""Lock held while a CPU meter's profiler runs, because a process can have only one profiler session."""

_BUSY = (
    "another torch profiler {}. A process can have one at a time, and CPU memory is measured with one. Stop the other "
    "profiler first (with torch.profiler.schedule: measure before its warm-up or after its last step), or profile in "
    "another process"
)


class CpuMemoryMeter(MemoryMeter):
    """Memory meter for the CPU, which reads allocator events from torch's profiler.

    Meters of other threads wait until this meter is closed. Inside the `with` block of another meter of this thread,
    the other meter stands still: its peaks do not include what happens in the inner block, and it goes on with the live
    bytes that the inner block leaves.

    On entry, raise ProfilerConflictError if another profiler is running. If another profiler starts during the
    measurement, the measurement ends, and the meter raises ProfilerConflictError on exit.
    """

    _is_starting = False
    """True while a meter itself starts a session of the profiler."""

    def __init__(self) -> None:
        self._context = ExitStack()
        self._was_interrupted = False
        self._labels: list[tuple[Any, ...]] = []
        self._dying_bytes: list[int] = []
        self._marks: dict[int, Any] = {}
        """One storage for each mark, by address. Alive until the measurement ends, so that the address is unique."""
        self._thread = 0
        """Identifier of the profiled thread, which enters the `with` block."""
        self._foreign_labels: deque[tuple[Any, ...]] = deque()
        """Labels of the marks that other threads have set since the last mark of the profiled thread."""
        self._sessions: list[profile] = []
        """Ended and running sessions of the profiler, one more than inner meters have interrupted this meter."""

    def __enter__(self) -> CpuMemoryMeter:
        self._thread = threading.get_ident()
        with ExitStack() as context:
            context.enter_context(_session_lock)
            if _open_meters:
                _open_meters[-1]._end_session()
            elif is_profiling():
                raise ProfilerConflictError(_BUSY.format("is running"))
            context.callback(self._leave)
            context.enter_context(count_all_threads())
            _open_meters.append(self)
            self._begin_session()
            context.enter_context(before_profilers_start(self._interrupt))
            self._context = context.pop_all()
        self.is_open = True
        self.mark(("start",))
        return self

    def _mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        # The profiler records nothing of other threads. Gloo's threads set marks when they are the last to free a
        # tensor: their marks are set at the next mark of the profiled thread, as their frees are counted there.
        if threading.get_ident() != self._thread or _open_meters[-1] is not self:
            self._foreign_labels.append(label)
            return
        while self._foreign_labels:
            self._add_mark(self._foreign_labels.popleft(), 0)
        self._add_mark(label, dying_bytes)

    def _add_mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        self._labels.append(label)
        self._dying_bytes.append(dying_bytes)
        storage = torch.UntypedStorage(MARK_BYTES, device="cpu")
        self._marks[storage.data_ptr()] = storage

    def _begin_session(self) -> None:
        CpuMemoryMeter._is_starting = True
        # The base class of torch.profiler.profile. The derived class warns in torch 2.11, or makes Python objects of
        # all events.
        self._sessions.append(profile(use_kineto=True, profile_memory=True))
        with _silenced_stderr(), functions_unprofiled():
            self._sessions[-1].__enter__()
        CpuMemoryMeter._is_starting = False
        torch.empty(1, device="cpu")  # the first event defines the start of the count

    def _end_session(self) -> None:
        with _silenced_stderr():
            self._sessions[-1].__exit__(None, None, None)

    def _leave(self) -> None:
        """End this meter's session, and let the meter around it go on."""
        if _open_meters and _open_meters[-1] is self:
            _open_meters.pop()
            self._end_session()
        self._marks = dict.fromkeys(self._marks)  # frees the storages before the outer or another meter counts
        if _open_meters:
            _open_meters[-1]._begin_session()

    def _interrupt(self) -> None:
        if self._is_starting or not _open_meters:
            return
        for meter in reversed(_open_meters):
            meter._was_interrupted, meter.is_open = True, False
        _open_meters[-1]._end_session()
        _open_meters.clear()

    def __exit__(self, error_type: object, *exception: object) -> None:
        self.is_open = False
        self._context.close()
        self.points = []
        if self._was_interrupted:
            if error_type is None:
                raise ProfilerConflictError(_BUSY.format("was started during the measurement"))
            return
        live = live_at_mark = maximum = 0
        for reading in allocator_readings(self._sessions, self._marks):
            if reading is None:
                self._add_point(live_at_mark, maximum)
                live_at_mark = maximum = live - self._dying_bytes[len(self.points) - 1]
            else:
                live = reading
                maximum = max(maximum, live)
        self._add_point(live_at_mark, maximum)
        self.points = self.points[1:]

    def _add_point(self, live_bytes: int, max_bytes: int) -> None:
        """Append the next point: the live bytes at a mark, and the maximum of the live bytes until the following mark.
        Points are appended in the order of the marks. The first point has an empty label, and covers the interval
        before the first mark."""
        index = len(self.points)
        label = self._labels[index - 1] if index else ()
        self.points.append(MemoryPoint(label, live_bytes, max_bytes))


_open_meters: list[CpuMemoryMeter] = []
"""Open meters of the thread that holds `_session_lock`, the innermost last. Only the innermost one has a session."""


@contextmanager
def _silenced_stderr() -> Iterator[None]:
    """Discard all output to stderr inside the `with` block. The profiler's C++ code writes a line to stderr at each
    start and stop."""
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


_peaks_before_reset: dict[torch.device, int] = {}
"""By device, the highest peak that a meter has erased from torch's statistics since the last `take_peak`."""


def _reset_peak(device: torch.device) -> None:
    """Reset torch's peak statistic. Keep the old value for `take_peak`, because torch cannot restore the statistic."""
    _peaks_before_reset[device] = max(_peaks_before_reset.get(device, 0), torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)


def take_peak() -> int:
    """Return the peak of live bytes on the current GPU since the last call, and reset torch's peak statistic.

    In contrast to `torch.cuda.max_memory_allocated()`, the returned peak is also right if a meter has reset the
    statistic.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    peak = max(torch.cuda.max_memory_allocated(device), _peaks_before_reset.pop(device, 0))
    torch.cuda.reset_peak_memory_stats(device)
    return peak


class CudaMemoryMeter(MemoryMeter):
    """Memory meter for a GPU, which reads the statistics of torch's caching allocator without synchronising with the
    device.

    The allocator counts in units of 512 bytes. The maximum after a mark includes memory that is freed right at the
    mark, so peaks in forward may be predicted too high.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._marks: list[tuple[tuple[Any, ...], int]] = []
        self._peaks: list[int] = []

    def __enter__(self) -> CudaMemoryMeter:
        self._start = torch.cuda.memory_allocated(self._device)
        _reset_peak(self._device)
        self._marks.append((("start",), self._start))
        self.is_open = True
        return self

    def _mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        self._peaks.append(torch.cuda.max_memory_allocated(self._device))
        _reset_peak(self._device)
        self._marks.append((label, torch.cuda.memory_allocated(self._device)))

    def __exit__(self, *exception: object) -> None:
        self.is_open = False
        self._peaks.append(torch.cuda.max_memory_allocated(self._device))
        self.points = [
            MemoryPoint(label, live - self._start, peak - self._start)
            for (label, live), peak in zip(self._marks, self._peaks, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The memory of one forward and backward, in bytes of live storages."""

    static_bytes: int
    """Bytes live before the step: parameters, buffers, gradients, optimizer state, the batch (see `static_bytes`)."""
    stored_bytes: int
    """Bytes that forward stores for backward, without the loss itself."""
    peak_bytes: int
    """Peak of the live bytes during the step, static memory included."""
    timeline: tuple[tuple[str, int], ...]
    """(label, maximum of the live bytes until the next mark) of each mark of the meter, static memory included."""


@contextmanager
def garbage_collection_disabled() -> Iterator[None]:
    """Disable garbage collection inside the `with` block.

    Garbage collection would free tensors in reference cycles at random times.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def measure_step(
    model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> StepMemory:
    """Run one forward and backward of `model` on `batch`, and return the memory of that step.

    Existing gradients are restored afterwards, the new gradients are dropped, and gradient hooks are not called. Random
    generators advance as in a step.
    """
    device = next(model.parameters()).device
    allocate_workspaces(device)
    live_bytes = static_bytes(model, batch, optimizer)
    gradients = [(p, p.grad) for p in model.parameters()]
    copies = [(gradient, gradient.clone()) for _, gradient in gradients if gradient is not None]
    meter = MemoryMeter.for_device(device)
    module_hooks = [hooks for module in model.modules() for kind in BACKWARD_HOOKS if (hooks := vars(module)[kind])]
    with without_gradient_hooks(model.parameters(), module_hooks), garbage_collection_disabled(), meter:
        meter.mark(("forward",))
        loss = forward_loss(model, batch)
        meter.mark(("backward",))
        backward(loss)
    loss_bytes = loss.untyped_storage().nbytes()
    for parameter, gradient in gradients:
        parameter.grad = gradient
    for original, values in copies:
        original.copy_(values)
    backward_start = next(point for point in meter.points if point.label == ("backward",))
    return StepMemory(
        static_bytes=live_bytes,
        stored_bytes=backward_start.live_bytes - loss_bytes,
        peak_bytes=live_bytes + meter.peak_bytes,
        timeline=tuple((point.label[0], live_bytes + point.max_bytes) for point in meter.points),
    )


def forward_loss(model: Callable[..., Any], batch: Mapping[str, Any]) -> torch.Tensor:
    """Run one forward of `model` on `batch`, and return the loss.

    Clear autocast's cache afterwards, as the end of a model's own autocast does. Raise ValueError if the model returns
    no loss that requires a gradient.
    """
    loss = getattr(model(**batch), "loss", None)
    torch.clear_autocast_cache()
    if isinstance(loss, torch.Tensor) and not loss.requires_grad and _is_frozen_model(model):
        raise ValueError(
            "no parameter of the model requires a gradient, so there is nothing to train: call requires_grad_(True) "
            "on the parameters to train"
        )
    if loss is None or not loss.requires_grad:
        raise ValueError(
            "the model returns no loss for this batch: add the labels to the batch, or, if the model does not compute "
            "its loss, pass a function compute_loss(model, batch) that does, as compute_loss=... of profile_model or "
            "AdaccSession"
        )
    return loss


def _is_frozen_model(model: Any) -> bool:
    """Return True if no parameter of the model requires a gradient."""
    return isinstance(model, nn.Module) and not any(parameter.requires_grad for parameter in model.parameters())


def backward(loss: torch.Tensor) -> None:
    """Run backward from `loss`, with autocast disabled, as training does."""
    # Disable autocast only if it is enabled: casts that a checkpoint makes in backward are freed when the outermost
    # autocast context ends, and a context entered here would keep them alive.
    is_under_autocast = torch.is_autocast_enabled(loss.device.type)
    with torch.autocast(loss.device.type, enabled=False) if is_under_autocast else nullcontext():
        loss.backward()


def static_bytes(model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes live on the model's device before a step.

    On a GPU, this is the number of bytes that the allocator counts for this process, including a second model,
    prefetched batches and cuBLAS workspaces. torch's CPU allocator does not count bytes, so on a CPU the tensors of the
    model, the batch and the optimizer are summed (`count_static_bytes`).
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        gc.collect()  # tensors in reference cycles, such as an earlier model's, are live now but not during the step
    return max(count_static_bytes(model, batch, optimizer), allocated_bytes(device))


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that this process has allocated on `device`.

    Return 0 for a CPU, because torch does not count the bytes there.
    """
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def has_expandable_segments() -> bool:
    """Return True if the GPU allocator avoids fragmentation: with expandable segments, or with cudaMallocAsync."""
    if torch.cuda.get_allocator_backend() != "native":  # cudaMallocAsync maps scattered pages into one block
        return True
    return any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


def allocate_workspaces(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces, about 32 MiB, which stay allocated after a GPU's first matrix products.

    Call this function before a step whose stored bytes are measured: a workspace allocated in that step would count as
    stored.
    """
    if device.type == "cuda":
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            factor = torch.ones(16, 16, device=device, requires_grad=True)
            (factor @ factor).sum().backward()


def count_static_bytes(
    model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Return the bytes of the distinct storages of parameters, buffers, gradients, optimizer state and batch.

    Tensors on devices other than the model's are left out, such as AdamW's step counts and an offloaded state.
    """
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers(), *gradients_of(model)]
    tensors += [leaf for leaf in tree_leaves(dict(batch)) if isinstance(leaf, torch.Tensor)]
    if optimizer is not None:
        tensors += optimizer_tensors(optimizer)
    device = next(model.parameters()).device
    return distinct_bytes(tensor for tensor in tensors if tensor.device == device)


def optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors that `optimizer`, or a set of optimizers, holds in addition to the model's parameters.

    They may be in the optimizer's state, in objects of the state (GaLore's projections), in the parameter groups
    (GrokAdamW), or in attributes (AdaLomo).
    """
    # DeepSpeed's optimizer has `state`, but is not a torch optimizer.
    tensors = tensors_in([*getattr(optimizer, "state", {}).values()])
    for member in component_optimizers(optimizer):
        groups = [value for group in member.param_groups for name, value in group.items() if name != "params"]
        tensors += tensors_in([*member.state.values(), *groups]) + optimizer_attribute_tensors(member)
    return tensors


def optimizer_attribute_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that `optimizer` holds in its attributes, outside its state and groups."""
    leaves = tree_leaves([value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def component_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of which `optimizer` consists, without the wrapper of Accelerate.

    GaLore's layer-wise mode uses one optimizer per layer, and `optimizer` may be a set of optimizers.
    """
    if isinstance(optimizer, WeakSet):
        return [member for each in optimizer for member in component_optimizers(each)]
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    layers = getattr(optimizer, "optimizer_dict", None)
    return list(layers.values()) if isinstance(layers, dict) and layers else [optimizer]


def tensors_in(containers: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, and the tensors that are attributes of objects in these containers."""
    leaves = tree_leaves(containers)
    leaves += [leaf for record in leaves if _is_record(record) for leaf in tree_leaves(vars(record))]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_record(value: object) -> bool:
    """Return True if `value` is an object with attributes, but not a tensor, module, class or function."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.Tensor)


def batch_bytes(batch: Mapping[str, Any]) -> int:
    """Return the bytes of the distinct storages of a batch's tensors."""
    return distinct_bytes(leaf for leaf in tree_leaves(dict(batch)) if isinstance(leaf, torch.Tensor))


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of `tensors` on this rank, each storage counted once."""
    storages = [part.untyped_storage() for tensor in tensors for part in parts_with_memory(tensor)]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def available_bytes(device: torch.device, static_bytes: int) -> int:
    """Return the bytes that this process can use on `device`: the bytes that the process uses already, plus the free
    bytes.

    On a GPU, the process's memory fraction is the limit. Unless the allocator's segments are expandable,
    `FRAGMENTATION_SHARE` is subtracted. On a CPU, `static_bytes` are the bytes that the process uses already, limits of
    containers count (`free_host_bytes`), and `HEAP_SHARE` of the free bytes is subtracted.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        available = min(free + torch.cuda.memory_reserved(device), limit)
        return available if has_expandable_segments() else int(available * (1 - FRAGMENTATION_SHARE))
    return static_bytes + int(free_host_bytes() * (1 - HEAP_SHARE))
