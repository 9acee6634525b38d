"""Execution of one block under its plan: each call is recorded, checked against its tape, or only executed.

Rules R1 to R14, which this code refers to, are in the NOTE of policy_handle.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.errors import BLOCK_CLASSES_HINT, PolicyMismatchError, TapeMismatchError, UnrecordedCallError
from adacc_hf.artifacts.policy import IDLE_KIND, Place, Plan
from adacc_hf.kernels.codecs import Codec, Coder
from adacc_hf.run.blocks import Strategy
from adacc_hf.run.call import Call, Recording
from adacc_hf.run.checkpointed_call import run_checkpointed
from adacc_hf.run.entries import OTHER_OPERATORS, OTHER_RANKS, OUT_OF_PLACE, UNTRAINED, Entry, PlanEntries
from adacc_hf.tape.execution_plan import ExecutionPlan, codec_of
from adacc_hf.tape.guards import CallKey, GraphOfCall, KnownShapes
from adacc_hf.tape.inputs import argument_tensors
from adacc_hf.tape.tape import Tape
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.tape.tiled_rows import in_tiles
from adacc_hf.torch_glue.distributed import is_sharded
from adacc_hf.torch_glue.private import num_dispatch_modes
from adacc_hf.torch_glue.second_run import checkpoint_call


class BlockExecutor:
    """Strategy that runs a block's calls under its plan. `known_shapes` come from the previous plan's executor."""

    def __init__(self, name: str, plan: Plan, tape_cache: TapeCache, known_shapes: KnownShapes | None = None) -> None:
        self.name = name
        self.plan = plan
        self._is_plain = plan.is_plain
        self._precision: Any = None
        """Precision of the first call, if the plan is plain: other precisions may take more memory."""
        self._input_codecs = {place: (value, codec_of(plan.choice(value))) for value, place in plan.places}
        """(value, codec) of each compressed input of a checkpointed block, by the input's place among the arguments."""
        self._must_be_checkpointed = plan.kind == IDLE_KIND or any(
            map(_is_checkpointed_on_all_ranks, (known_shapes or {}).values())
        )
        self.tape_cache = tape_cache
        self.known_shapes = KnownShapes(tape_cache.untraceable) if known_shapes is None else known_shapes
        """Table of the block's recorded tapes by call key (traced path and sizes), shared by all plans of the block."""
        self.entries = PlanEntries(name, plan, tape_cache, self.known_shapes)
        self.wrap_codec: Callable[[int, Codec], Coder] | None = None
        """Function of (value, codec) that returns a wrapper which also measures errors, or None."""
        self.observer: Strategy | None = None
        """Strategy that runs the next call of the block in place of this executor, to measure the call. It must set
        this attribute to None, and then call `run`."""
        self._latest: Entry | None = None
        """Entry of the block's latest call that ran on a tape, until the next call."""
        self._checkpointed_graph: GraphOfCall | None = None
        """Traced graph of the latest call under torch's checkpoint, or None."""

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of `block` under the plan: `fn(*args)`, in which `kwargs` is already bound."""
        if self.observer is not None:
            return self.observer.run(block, fn, args, kwargs)
        self._latest = None
        if self.plan.is_checkpointed:
            # A graph would not gather sharded parameters.
            has_graph = self.plan.tiling is None and not is_sharded(block)
            graph = self.known_shapes.paths.find_graph(block, fn, args) if has_graph else None
            self._checkpointed_graph = graph
            called = None if graph is None else graph(fn, args)
            return run_checkpointed(block, fn, args, kwargs, self._input_coders(), called, self.plan.tiling)
        if self._must_be_checkpointed:
            self.tape_cache.note_fallback(UNTRAINED if self.plan.kind == IDLE_KIND else OTHER_RANKS, self.name)
            return checkpoint_call(block, fn, *args)
        if self._is_plain:
            precision, before = _precision(args), self._precision
            self._precision = before or precision
            if before == precision and (self.entries.recorded or self.entries.sized):
                return fn(*args)
            if before not in (None, precision):
                self.tape_cache.note_fallback(OTHER_OPERATORS, self.name)
                return checkpoint_call(block, fn, *args)
        key = self.known_shapes.key(block, fn, args, kwargs, self.plan.tiling)
        if key is None:
            return self._run_untraced(block, fn, args)
        return self._run_as(key, block, fn, args, kwargs)

    def _run_untraced(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a call that Dynamo cannot trace, whose operators are therefore unknown."""
        reason = self.known_shapes.paths.untraced or ""
        self.tape_cache.warn_not_replayed(self.name, self.plan.kind, reason)
        self.tape_cache.note_fallback(self.entries.fallback_of(reason), self.name)
        return self._run_unreplayed(self.tape_cache.tapes_of_kind(self.plan.kind), block, fn, args)

    def _run_unreplayed(self, tapes: Sequence[Tape], block: nn.Module, fn: Any, args: tuple[Any, ...]) -> Any:
        """Run a call without replay: under torch's checkpoint, or plainly if its plan is plain or it has collectives.
        Either all ranks run a collective again in backward, or none (rule R13), and another rank may have a tape.
        `tapes` are records of the block's kind."""
        self._must_be_checkpointed = any(map(_is_checkpointed_on_all_ranks, tapes))
        runs_once = self._is_plain or any(tape.has_collectives for tape in tapes)
        if runs_once and not self._must_be_checkpointed:
            return fn(*args)
        return checkpoint_call(block, fn, *args)

    def _run_as(self, key: CallKey, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with this `key` under the plan, or record it if there is no tape for the key."""
        entry = self.entries.find(key)
        if entry is not None and self._has_other_numbers(entry, fn, args):
            entry = None
        if entry is None:
            current_key = self.known_shapes.with_current_layout(key, block)
            if current_key != key:
                return self._run_as(current_key, block, fn, args, kwargs)
            return self._first_call(key, block, in_tiles(block, self.plan.tiling, fn), args, kwargs)
        self.tape_cache.note_fallback(entry.fallback, self.name)
        self._latest = entry
        plan = entry.execution_plan
        if plan is None:
            return self._run_unreplayed([entry.tape], block, in_tiles(block, self.plan.tiling, fn), args)
        externals = plan.fetch(block, args, kwargs)
        if externals is None:
            return self._run_with_other_tensors(key, entry, block, fn, args, kwargs)
        if entry.symbolic_tape is None:
            self.known_shapes.move_to_end(key)
        self._learn_order(entry)
        is_checked = self._is_due(entry)
        if is_checked and entry.symbolic_tape is not None:
            self.tape_cache.extend(entry.symbolic_tape, key)
        called = fn if self.plan.tiling is None else in_tiles(block, self.plan.tiling, fn)
        return self._call(entry, plan, externals, block, called, args, is_checked)

    def _has_other_numbers(self, entry: Entry, fn: Any, args: tuple[Any, ...]) -> bool:
        """Return True if the entry's tape, evaluated at a new size, is wrong. Its symbolic tape is then discarded."""
        symbolic_tape = entry.symbolic_tape
        plan = entry.execution_plan
        if symbolic_tape is None or plan is None or plan.is_plain or not plan.tape.is_unchecked:
            return False
        if not self.known_shapes.paths.has_other_numbers(plan.tape, fn, args):
            return False
        self.tape_cache.distrust(symbolic_tape, self.name)
        self.entries.sized.clear()
        return True

    def latest_graph(self) -> GraphOfCall | None:
        """Return the traced graph of the block's latest call, for `run_again`. None if no graph has its operators."""
        if self.plan.is_checkpointed:
            return self._checkpointed_graph
        return None if self._latest is None or self.plan.tiling else self.known_shapes.paths.graph_function()

    def run_again(
        self,
        block: nn.Module,
        graph: tuple[Callable[..., Any], tuple[Any, ...]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run (traced graph, its inputs) of the block's latest call once more under the plan, to measure the call. This
        call is not counted, because the number of calls decides which calls are checked.

        Raises UnrecordedCallError if the tape of the latest call does not apply any more.
        """

        def run(*_: Any) -> Any:
            return graph[0](*graph[1])

        if self.plan.is_checkpointed:
            return run_checkpointed(block, run, args, kwargs, self._input_coders(), graph)
        entry = self._latest
        plan = None if entry is None else entry.execution_plan
        if entry is None or plan is None or plan.is_plain:
            return run()
        externals = plan.fetch(block, args, kwargs)
        if externals is None:
            raise UnrecordedCallError(f"tensors of {self.name} were replaced or removed after its call")
        self._learn_order(entry)
        return self._call(entry, plan, externals, block, run, args)

    def _is_due(self, entry: Entry) -> bool:
        """Return True if this call is checked: backward compares what it recomputes with what the forward saved."""
        if entry.plan.is_plain or is_being_captured():  # a captured CUDA graph cannot compare
            return False
        is_counted = is_checked_call(next(entry.calls))
        is_due = is_counted or entry.plan.tape.is_unchecked or self.known_shapes.paths.is_partial
        is_due |= num_dispatch_modes() > 0  # the loop's mode may change operators, and be gone in backward
        entry.plan.tape.is_unchecked &= not is_due
        return is_due

    def _run_with_other_tensors(
        self, key: CallKey, entry: Entry, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call whose parameters, buffers or attached tensors are not those on the tape: with another tape if
        their layout changed, without a tape if tensors are missing (an adapter merged for this call, for example)."""
        current_key = self.known_shapes.with_current_layout(key, block)
        if current_key != key:
            return self._run_as(current_key, block, fn, args, kwargs)
        self.tape_cache.note_fallback(OUT_OF_PLACE, self.name)
        return self._run_unreplayed([entry.tape], block, in_tiles(block, self.plan.tiling, fn), args)

    def _call(
        self,
        entry: Entry,
        plan: ExecutionPlan,
        externals: list[tuple[int, torch.Tensor]],
        block: nn.Module,
        fn: Any,
        args: tuple[Any, ...],
        is_checked: bool = False,
    ) -> Any:
        """Run a call under the execution plan of `entry`. If `is_checked`, backward compares what it recomputes."""
        if plan.is_plain:  # nothing to compare: autograd keeps all saved tensors
            return fn(*args)
        if plan.draws and is_being_captured():
            raise PolicyMismatchError(
                f"block {self.name} draws its dropout masks again in backward, which is not possible in a CUDA graph: "
                f"capture it under a policy of AdaccConfig(actions=('retain', 'compress')), or without dropout"
            )
        call = Call(plan, self.name, self._codecs(entry), externals, entry.codecs if is_checked else None)
        if len(plan.tape.order or ()) < plan.num_slots:
            entry.unpacked_slots = call.unpacked_slots = []
        result = call.run(fn, args)
        source = plan.replaced_source(externals, block) if plan.attached else None
        if source is not None:
            raise TapeMismatchError(
                f"block {self.name} replaced the tensor at {source} within a call, so replay would read an old tensor: "
                f"make it a buffer; or, {BLOCK_CLASSES_HINT}"
            )
        return result

    def _codecs(self, entry: Entry) -> Mapping[int, Coder]:
        if self.wrap_codec is None:
            return entry.codecs
        return {value: self.wrap_codec(value, codec) for value, codec in entry.codecs.items()}

    def _input_coders(self) -> dict[Place, tuple[Codec, Coder]]:
        wrap = self.wrap_codec
        return {
            place: (codec, codec if wrap is None else wrap(value, codec))
            for place, (value, codec) in self._input_codecs.items()
        }

    def _learn_order(self, entry: Entry) -> None:
        """Store the order in which the last backward unpacked slots (saved tensors) in the tape cache."""
        if entry.unpacked_slots:
            self.tape_cache.learn_order(entry.plan.tape, entry.unpacked_slots)
            entry.unpacked_slots = None

    def _first_call(
        self, key: CallKey, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record the block's first call with this `key` (traced path and sizes), unless autograd saves nothing."""
        if self._saves_nothing(block, args, kwargs):
            return fn(*args)
        recording = Recording(self.name, block, args, kwargs)
        result = recording.run(fn)
        tape = self.tape_cache.verified_tape(recording.recorder)
        self._must_be_checkpointed = _is_checkpointed_on_all_ranks(tape)
        self.known_shapes.paths.compare_graph(tape, fn, args)
        self.tape_cache.remember(tape, key, self.name)
        entry = self._latest = self.entries.add(key, tape, next_call=2)
        self.tape_cache.note_fallback(entry.fallback, self.name)
        if entry.execution_plan is not None and not entry.execution_plan.is_plain:
            entry.unpacked_slots = recording.hand_over(entry.plan, self._codecs(entry), entry.codecs)
        recording.close()
        return result

    def _saves_nothing(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if nothing requires gradients, and no recorded call of the kind has saved a tensor."""
        tensors = [*(tensor for _, tensor in argument_tensors(args, kwargs)), *block.parameters()]
        if any(tensor.requires_grad for tensor in tensors):
            return False
        tapes = self.tape_cache.tapes_of_kind(self.plan.kind)
        return bool(tapes) and not any(tape.slots for tape in tapes)


def _precision(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return (True under autocast, dtype of the first tensor in `args`). Some calls may lack the others, as masks."""
    first = next((argument for argument in args if isinstance(argument, torch.Tensor)), None)
    return () if first is None else (torch.is_autocast_enabled(first.device.type), first.dtype)


def _is_checkpointed_on_all_ranks(tape: Tape) -> bool:
    """Return True if every plan must checkpoint a block with this tape, as all ranks repeat collectives (rule R13)."""
    return tape.untrusted is not None and tape.has_collectives


def is_being_captured() -> bool:
    """Return True if the block's call is being captured in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_checked_call(num_calls: int) -> bool:
    """Return True if call number `num_calls` of a call key is checked again (rule R7): the first two, and the 24th,
    48th, 96th and so on. Powers of two have tracking steps, which take additional time too."""
    thirds, rest = divmod(num_calls, 3)
    return num_calls in (1, 2) or (rest == 0 and thirds >= 8 and thirds & (thirds - 1) == 0)
