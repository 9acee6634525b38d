"""Live tensor bytes over time, counted by the allocator itself: temporaries and other threads' tensors included."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile, record_function

from adacc_hf.artifacts.errors import ProfilerAtWorkError
from adacc_hf.torch_glue.private import before_profilers_start, is_profiling, storage_key, tree_leaves
from adacc_hf.torch_glue.tensors import parts_with_memory, without_gradient_hooks

_MARK = "adacc_hf.torch_glue.memory.mark"

FRAGMENTS = 0.1
"""Share of a GPU that is set aside for what is lost between the blocks of torch's caching allocator, unless its
segments expand. tests/emulated_cuda/fragments.py trains to the brim of such a device, where
`AdaccConfig.memory_margin` alone does not do; no GPU was asked yet."""
FRAGMENTS_HINT = (
    f'memory_budget="auto" leaves {FRAGMENTS:.0%} of the GPU to fragments of its memory; set '
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before training to use them"
)


_ALLOCATIONS_THAT_FAILED = (
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
"""What torch's allocator on the CPU says, and libraries that allocate by themselves: cuBLAS, cuDNN, Triton and the
loader of kernels. torch raises a plain RuntimeError then."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step failed because the device, or the machine, has no more memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATIONS_THAT_FAILED)


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A moment that was marked, and the stretch until the next one. Bytes are relative to the meter's start."""

    label: tuple[Any, ...]
    live_bytes: int
    """At the mark."""
    max_bytes: int
    """Most from the mark to the next one."""


class MemoryMeter(AbstractContextManager["MemoryMeter"]):
    """Counts live bytes of one device between marks; `points` is there after leaving it."""

    points: list[MemoryPoint]
    is_open = False

    def mark(self, label: tuple[Any, ...], dying_bytes: int = 0) -> None:
        """Note a moment, just before `dying_bytes` are freed, which count no more where the meter can tell them apart.

        Does nothing once the meter was left: what a model keeps may die, and say so, at any time.
        """
        if self.is_open:
            self._mark(label, dying_bytes)

    def _mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        raise NotImplementedError

    @property
    def peak_bytes(self) -> int:
        return max(point.max_bytes for point in self.points)

    @staticmethod
    def for_device(device: torch.device) -> MemoryMeter:
        """The meter for `device`. Raises ValueError for a device whose allocator cannot be asked."""
        if device.type == "cpu":
            return CpuMemoryMeter()
        if device.type == "cuda":
            return CudaMemoryMeter(device)
        raise ValueError(f"memory on device {device} cannot be measured: use cpu or cuda")


_session = threading.RLock()
"""Held while a meter's profiler is at work: a process has one session."""

_BUSY = (
    "another profiler of torch's {}, and a process can have one at a time: memory of the CPU is counted by one. "
    "Let it end first (with torch.profiler.schedule: before its warm-up or after its last step), or profile elsewhere"
)


class CpuMemoryMeter(MemoryMeter):
    """Reads the CPU allocator's events from torch's profiler. Another thread's meter waits until this one is left.

    Raises ProfilerAtWorkError if another profiler is at work, and, when it is left, if one was started meanwhile: the
    session is left to that one.
    """

    def __init__(self) -> None:
        self._context = ExitStack()
        self._was_interrupted = False
        self._labels: list[tuple[Any, ...]] = []
        self._dying: list[int] = []
        # What torch.profiler.profile is built on: that one warns in torch 2.11, or makes Python objects of all events.
        self._profile = profile(use_kineto=True, profile_memory=True)
        self._threads = all_threads_counted()

    def __enter__(self) -> CpuMemoryMeter:
        with ExitStack() as context:
            context.enter_context(_session)
            if is_profiling():
                raise ProfilerAtWorkError(_BUSY.format("is at work"))
            context.enter_context(self._threads)
            with _quiet_stderr():
                self._profile.__enter__()
            context.callback(self._end_session)
            context.enter_context(before_profilers_start(self._interrupt))
            self._context = context.pop_all()
        torch.empty(1, device="cpu")  # the account begins with its first event
        self.is_open = True
        self.mark(("start",))
        return self

    def _mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        self._labels.append(label)
        self._dying.append(dying_bytes)
        with record_function(_MARK):
            pass

    def _end_session(self) -> None:
        with _quiet_stderr():
            self._profile.__exit__(None, None, None)

    def _interrupt(self) -> None:
        self._was_interrupted, self.is_open = True, False
        self._context.close()

    def __exit__(self, error_type: object, *exception: object) -> None:
        self.is_open = False
        self._context.close()
        self.points = []
        if self._was_interrupted:
            if error_type is None:
                raise ProfilerAtWorkError(_BUSY.format("was started while memory was counted"))
            return
        live = at_mark = most = 0
        for reading in readings(self._profile, _MARK):
            if reading is None:
                self._close(at_mark, most)
                at_mark = most = live - self._dying[len(self.points) - 1]
            else:
                live = reading
                most = max(most, live)
        self._close(at_mark, most)
        self.points = self.points[1:]

    def _close(self, live_bytes: int, max_bytes: int) -> None:
        """End the stretch under way; the one before the first mark has no label."""
        index = len(self.points)
        label = self._labels[index - 1] if index else ()
        self.points.append(MemoryPoint(label, live_bytes, max_bytes))


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keep what the profiler's C++ code writes to stderr at each start and stop from the user's terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


_before_resets: dict[torch.device, int] = {}
"""By device, the highest peak that torch's statistics had when a meter reset them."""


def _reset_peak(device: torch.device) -> None:
    """Start torch's peak anew. Nothing can put it back: what it was is kept for `take_peak`."""
    _before_resets[device] = max(_before_resets.get(device, 0), torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)


def take_peak() -> int:
    """The most bytes live on the current GPU since the last call, and a new start.

    What `torch.cuda.max_memory_allocated()` would say if no meter had reset torch's statistics.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    peak = max(torch.cuda.max_memory_allocated(device), _before_resets.pop(device, 0))
    torch.cuda.reset_peak_memory_stats(device)
    return peak


class CudaMemoryMeter(MemoryMeter):
    """Asks torch's caching allocator; it counts blocks of 512 bytes. Nothing synchronises.

    Its peak of a stretch has what dies at the start in it, so that peaks in forward may be predicted too high.
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
    """Live before the step: parameters, buffers, gradients, optimizer state, the batch (see `static_bytes`)."""
    stored_bytes: int
    """What forward left behind for backward; the loss itself is not counted."""
    peak_bytes: int
    """Most bytes live at any moment of the step, static memory included."""
    timeline: tuple[tuple[str, int], ...]
    """(label, most bytes live until the next label), static memory included."""


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """While open, what only cycles hold stays live. Python collects it at any time, and a meter would count that."""
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
    """Run one forward and backward of `model` on `batch` and report the memory it took.

    The gradients it makes are dropped, unseen by hooks; gradients that were there stay. Random generators advance as
    in a step.
    """
    device = next(model.parameters()).device
    allocate_workspaces(device)
    live_bytes = static_bytes(model, batch, optimizer)
    gradients = [(p, p.grad) for p in model.parameters()]
    before = [(gradient, gradient.clone()) for _, gradient in gradients if gradient is not None]
    meter = MemoryMeter.for_device(device)
    with without_gradient_hooks(model.parameters()), collecting_no_garbage(), meter:
        meter.mark(("forward",))
        loss = forward_loss(model, batch)
        meter.mark(("backward",))
        backward(loss)
    loss_bytes = loss.untyped_storage().nbytes()
    for parameter, own in gradients:
        parameter.grad = own
    for gradient, values in before:
        gradient.copy_(values)
    backward_start = next(point for point in meter.points if point.label == ("backward",))
    return StepMemory(
        static_bytes=live_bytes,
        stored_bytes=backward_start.live_bytes - loss_bytes,
        peak_bytes=live_bytes + meter.peak_bytes,
        timeline=tuple((point.label[0], live_bytes + point.max_bytes) for point in meter.points),
    )


def forward_loss(model: Callable[..., Any], batch: Mapping[str, Any]) -> torch.Tensor:
    """The loss of one forward. Under autocast, cached casts are let go as they are when a model's own autocast ends.

    Raises ValueError if the batch gives no loss to train on.
    """
    loss = getattr(model(**batch), "loss", None)
    torch.clear_autocast_cache()
    if isinstance(loss, torch.Tensor) and not loss.requires_grad and _is_frozen(model):
        raise ValueError(
            "no parameter of the model wants a gradient, so that there is nothing to train: call requires_grad_(True) "
            "on those that should be trained"
        )
    if loss is None or not loss.requires_grad:
        raise ValueError(
            "the batch gives no loss to train on: pass the labels with it, or, if the model makes no loss of its own, "
            "a function that does: profile_model(..., compute_loss=...)"
        )
    return loss


def _is_frozen(model: Any) -> bool:
    return isinstance(model, nn.Module) and not any(parameter.requires_grad for parameter in model.parameters())


def backward(loss: torch.Tensor) -> None:
    """Run backward outside autocast, as training does."""
    # A context of its own would keep the casts that a checkpoint makes in backward, which go with the outermost one.
    is_under_autocast = torch.is_autocast_enabled(loss.device.type)
    with torch.autocast(loss.device.type, enabled=False) if is_under_autocast else nullcontext():
        loss.backward()


def static_bytes(model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes live on the model's device before a step, which its peak stands on.

    On a GPU that is all that this process has there, as its allocator counts: a second model, batches loaded ahead and
    cuBLAS's workspaces too. A CPU's allocator keeps no account: what is known is counted.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        gc.collect()  # what only cycles hold, an earlier model say, is live now, and not in the step any more
    return max(count_static_bytes(model, batch, optimizer), allocated_bytes(device))


def allocated_bytes(device: torch.device) -> int:
    """Bytes that this process has on `device`; 0 where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def segments_expand() -> bool:
    """Whether free bytes of a GPU can become one block wherever they lie, as with PyTorch's expandable segments."""
    if torch.cuda.get_allocator_backend() != "native":  # CUDA's own asynchronous one maps pages together
        return True
    return any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


def allocate_workspaces(device: torch.device) -> None:
    """Make forward's thread and backward's take what a GPU's first product in each takes and keeps, some 32 MiB.

    Before a step of which more than its peak is measured: it would look like something that the step stores.
    """
    if device.type == "cuda":
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            factor = torch.ones(16, 16, device=device, requires_grad=True)
            (factor @ factor).sum().backward()


def count_static_bytes(
    model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Bytes of the distinct storages of parameters, buffers, gradients, the optimizer's state and the batch.

    Of those on the model's device: AdamW counts its steps on the CPU, and an offloaded state lies there as a whole.
    """
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    tensors += [leaf for leaf in tree_leaves(dict(batch)) if isinstance(leaf, torch.Tensor)]
    if optimizer is not None:
        tensors += optimizer_tensors(optimizer)
    device = next(model.parameters()).device
    return distinct_bytes(tensor for tensor in tensors if tensor.device == device)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that `optimizer` holds besides its parameters: its state, and what it keeps beside that.

    GrokAdamW has its state in its groups, AdaLomo in attributes of its own, and what GaLore projects with is in an
    object of its state.
    """
    found = tensors_in([*optimizer.state.values()])  # which DeepSpeed's has too, that is none of torch's
    for member in members_of(optimizer):
        groups = [value for group in member.param_groups for name, value in group.items() if name != "params"]
        found += tensors_in([*member.state.values(), *groups]) + tensors_beside_state(member)
    return found


def tensors_beside_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that `optimizer` holds in attributes of its own, for all parameters together."""
    leaves = tree_leaves([value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that `optimizer` stands for: itself, the one in Accelerate's, or those of each layer (GaLore)."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    layers = getattr(optimizer, "optimizer_dict", None)
    return list(layers.values()) if isinstance(layers, dict) and layers else [optimizer]


def tensors_in(held: Any) -> list[torch.Tensor]:
    """The tensors in containers, and those that objects in them have as attributes."""
    leaves = tree_leaves(held)
    leaves += [leaf for one in leaves if _is_record(one) for leaf in tree_leaves(vars(one))]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that Accelerate's `optimizer` stands around; any other itself."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _is_record(value: object) -> bool:
    """Whether `value` is an object with attributes, and no tensor, module, class or function."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.Tensor)


def batch_bytes(batch: Mapping[str, Any]) -> int:
    """Bytes of the distinct storages of a batch's tensors."""
    return distinct_bytes(leaf for leaf in tree_leaves(dict(batch)) if isinstance(leaf, torch.Tensor))


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of `tensors` on this rank, each counted once."""
    storages = [part.untyped_storage() for tensor in tensors for part in parts_with_memory(tensor)]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def available_bytes(device: torch.device, static_bytes: int) -> int:
    """Bytes of tensors that this process can have on `device`: what is live now and what is free.

    On a GPU that is up to the process's share of it, less what its allocator will lose to fragments.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        available = min(free + torch.cuda.memory_reserved(device), limit)
        return available if segments_expand() else int(available * (1 - FRAGMENTS))
    import psutil

    return static_bytes + psutil.virtual_memory().available


# The account that torch's CPU allocator keeps while memory is profiled, with what every thread frees.

_LIBRARY = {"darwin": "libc10.dylib", "win32": "c10.dll"}.get(sys.platform, "libc10.so")
_FLAG = "FLAGS_caffe2_report_cpu_memory_usage"


_THRESHOLD = "FLAGS_caffe2_log_level"
_ERROR = 2
"""c10's level of errors: 0 is information, 1 warnings."""


def _find(name: str, kind: type[Any]) -> Any:
    """c10's variable `name`, of the ctypes class `kind`; None in a build without it."""
    try:
        return kind.in_dll(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY)), name)
    except (OSError, ValueError):
        return None


flag: ctypes.c_bool | None = _find(_FLAG, ctypes.c_bool)
"""The switch by which every thread enters what it takes and frees."""
threshold: ctypes.c_int | None = _find(_THRESHOLD, ctypes.c_int)
"""The level from which c10 writes to stderr; Python's warnings, and torch's that become such, do not ask it."""


@contextmanager
def all_threads_counted() -> Iterator[None]:
    """While open, every thread keeps the account of the CPU's allocator, and not the profiled one alone.

    Gloo's threads are often the last to hold a tensor that ranks have exchanged: it would count as live for good. Where
    `flag` is None it still does.

    c10 warns of each thousandth block that is freed and was taken before, from the first one on, by which nobody is
    helped: its warnings, of which it has hardly others, are not written meanwhile; its errors are.
    """
    with ExitStack() as changed:
        if flag is not None:
            changed.enter_context(_set_to(flag, True))
        if threshold is not None:
            changed.enter_context(_set_to(threshold, max(_ERROR, threshold.value)))
        yield


@contextmanager
def _set_to(variable: Any, value: Any) -> Iterator[None]:
    before, variable.value = variable.value, value
    try:
        yield
    finally:
        variable.value = before


def readings(profiled: profile, mark: str) -> list[int | None]:
    """Bytes live after each event of the allocator in the profiled thread, and None for each record named `mark`.

    In order of time, and relative to the start. What another thread frees shows in the next event.
    """
    found = []
    assert profiled.kineto_results is not None  # it has ended
    nodes: list[Any] = list(profiled.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        name = node.name
        if name == mark:
            found.append((node.start_time_ns, None))
        elif name == "[memory]":
            found.append((node.start_time_ns, node.extra_fields))
    found.sort(key=lambda event: event[0])
    first = next((event for _, event in found if event is not None), None)
    start = 0 if first is None else first.total_allocated - first.alloc_size
    return [None if event is None else event.total_allocated - start for _, event in found]
