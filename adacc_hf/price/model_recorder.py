"""The survey of a model: every block recorded in one forward, grouped into kinds, with prices and what is shared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.block_walk import BlockOutcome
from adacc_hf.artifacts.call_names import call_name, num_calls, split_call
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.artifacts.policy import BlockAction, Place
from adacc_hf.artifacts.profile import BackwardEvent, ForwardEvent, KindProfile, Operator, Value, unpack_order
from adacc_hf.price.codec_selection import is_parameter_cast, role_of, storable, with_outliers
from adacc_hf.price.cost_model import (
    Prices,
    generator_bytes,
    given_records,
    saved_bytes,
    untrusted_kind,
    with_untrusted_forward,
)
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_probes import WatchSlots, refuse_backward
from adacc_hf.price.shared_storage import RecordedBlock, Sharing, address_of
from adacc_hf.run.block_executor import BlockExecutor
from adacc_hf.run.blocks import Installation
from adacc_hf.run.call import Recording
from adacc_hf.tape.call_key import CallKey, KnownShape, KnownShapes
from adacc_hf.tape.execution_plan import encode_view
from adacc_hf.tape.inputs import argument_tensors
from adacc_hf.tape.recorder import HIDDEN, Recorder
from adacc_hf.tape.replay_check import obtainable, runs_alike
from adacc_hf.tape.tape import Source, Tape, TapeOperator
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.torch_glue.distributed import all_or_none, is_sharded
from adacc_hf.torch_glue.memory import forward_loss
from adacc_hf.torch_glue.model_state import SMALL_COPY
from adacc_hf.torch_glue.no_trace import NoTrace
from adacc_hf.torch_glue.private import storage_key, tree_leaves
from adacc_hf.torch_glue.tensors import storage_of


class RecordBlock:
    """The strategy that records every call of a block; what it saves is let go, since no backward follows."""

    expects_outer_hooks = True

    def __init__(self, name: str, survey: Survey) -> None:
        self.name = name
        self.survey = survey
        self.num_calls = 0

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Recording and pricing take more memory than training does, and the next block's parameters need all ranks.
        with all_or_none() if self.survey.is_sharded else nullcontext():
            return self._recorded(block, fn, args, kwargs)

    def _recorded(self, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls += 1
        name = call_name(self.name, self.num_calls)
        known = KnownShapes(self.survey.library.untraceable)
        # Before the call, as in training: a block may put its auxiliary loss into a list that it is given.
        key = known.key(block, fn, args, kwargs)
        given = {Source("argument", path): tensor for path, tensor in argument_tensors(args, kwargs)}
        recording = Recording(name, block, args, kwargs, self.survey.measurement.rng_use)
        result = recording.run(fn)
        self.survey.note_leaves(given.values())
        tensors = [*given.values(), *block.parameters()]
        states = self.survey.measurement.random_states({tensor.device for tensor in tensors})
        self.survey.add(name, known, key, recording, given, result, partial(fn, *args))
        states.restore()  # whoever measured has drawn too, and the rest of the forward must draw as in later passes
        return result


class Survey:
    """All blocks' tapes, what they share with each other and with the rest of the model, and the prices."""

    def __init__(self, config: AdaccConfig, measurement: Measurement, library: TapeCache | None = None) -> None:
        """`library` is that of another survey of the same model."""
        self.config = config
        self.measurement = measurement
        self.library = library or TapeCache(measurement.verify)
        self.blocks: list[RecordedBlock] = []
        self._prices: dict[str, Prices] = {}
        self._outside: dict[int, StorageWeakRef] = {}
        """What the rest of the model saves. These references keep an address from being given away, and no memory: that
        of logits would be there through all of a profile."""
        self._returned: list[torch.Tensor] = []
        """By the block that was recorded last."""
        self._kinds: list[KindProfile] = []
        self._saved: dict[str, int] = {}
        """Of each call whose operators cannot be replayed, the bytes that autograd saved."""
        self.sharing = Sharing([], set(), set(), set())
        self.before_rest: set[str] = set()
        """Calls after which the rest of the model works until the next one."""
        self.is_sharded = False
        """Whether the model's forward needs all ranks."""

    def record(self, model: nn.Module, batch: Mapping[str, Any], installation: Installation) -> None:
        """Run one forward, recording every block and what the rest of the model saves."""
        self.is_sharded = is_sharded(model)
        installation.begin_step()
        for name, function in installation.blocks.items():
            function.strategy = RecordBlock(name, self)
        state = {address_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        given = {address_of(tensor) for _, tensor in argument_tensors((), dict(batch))}
        torch.clear_autocast_cache()
        with torch.autograd.graph.saved_tensors_hooks(self._save_outside, refuse_backward):
            loss = forward_loss(model, batch)
        self._returned = []
        for block in self.blocks:
            block.look_back()  # while the loss, and so the graph that backward will walk, is there
        if any(block.held_besides for block in self.blocks):
            gc.collect()  # what only garbage holds is not held
            for block in self.blocks:
                block.look_back()
        del loss
        self.sharing = Sharing(self.blocks, self._outside.keys(), state, given)

    def add(
        self,
        name: str,
        known: KnownShapes,
        key: CallKey,
        recording: Recording,
        given: Mapping[Source, torch.Tensor],
        result: Any,
        run_again: Callable[[], Any],
    ) -> None:
        """Keep one block's tape, and take the prices if no tape like it came before; lets go of the recording."""
        recorder = recording.recorder
        tape = self.library.verified(recorder)
        outliers = self.measurement.outliers(tape, recorder.bases, self.config)
        if tape.digest not in self._prices:
            self._prices[tape.digest] = self._price(tape, recorder, outliers, run_again)
        errors = self.measurement.gradient_errors(tape, recorder.bases, self._prices[tape.digest], self.config)
        self.library.remember(tape, key, recording.name)
        known.add(key, KnownShape(tape, num_calls=2))
        inputs = [value.index for value in tape.values if tape.is_block_input(value.index)]
        outputs = {} if tape.untrusted else _saved_outputs(recorder, tape, result)
        casts = {} if tape.untrusted else _saved_casts(recorder, tape)
        self.blocks.append(
            RecordedBlock(
                name=name,
                known=known,
                tape=tape,
                arguments={value: recorder.bases[value] for value in inputs},
                given=_one_per_storage(given),
                outputs=outputs,
                casts=casts,
                made=_made_references(recorder, tape, outputs.keys() | casts.keys()),
                packed=recording.discard(),
                outliers=outliers,
                errors=errors,
                follows_on=not {*map(address_of, self._returned)}.isdisjoint(map(address_of, given.values())),
            )
        )
        self._returned = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def _price(self, tape: Tape, recorder: Recorder, outliers: dict[int, int], run_again: Callable[[], Any]) -> Prices:
        bases = recorder.bases
        if not tape.values:  # a block that passes on what it is given
            return Prices([], [])
        device = bases[0].device
        with NoTrace((recorder.block, run_again), lambda: self.measurement.random_states([device]), SMALL_COPY):
            if tape.untrusted in HIDDEN and not tape.has_collectives:
                return self.measurement.price_call(run_again, device)
            is_alone = tape.untrusted is None and not tape.has_collectives
            return self.measurement.price(tape, bases, self.config, outliers, run_again if is_alone else None)

    def note_leaves(self, given: Iterable[torch.Tensor]) -> None:
        """Note inputs that autograd holds to give them a gradient: `enable_input_require_grads` makes some."""
        for tensor in given:
            if tensor.is_leaf and tensor.requires_grad:
                self._note_outside(tensor)

    def _save_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note_outside(tensor)
        return tensor.detach()

    def _note_outside(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage_key(storage) not in self._outside:
            self._outside[storage_key(storage)] = StorageWeakRef(storage)

    def kinds(self) -> list[KindProfile]:
        """One profile per kind, its memory still to be measured; every block is told its kind."""
        groups: dict[Any, list[RecordedBlock]] = {}
        places = self._places()
        for block in self.blocks:
            groups.setdefault((self._alike(block), places[block.name]), []).append(block)
        for index, group in enumerate(groups.values()):
            for block in group:
                block.kind = index
            self._kinds.append(self._kind(group))
        return self._kinds

    def _places(self) -> dict[str, tuple[bool, ...]]:
        """What there is about each call's place in a step that its memory depends on, where blocks are called again.

        Whether the gradients of its parameters are there before its backward, and whether the rest of the model works
        before and after it, as it does between two calls of a whole model.
        """
        names = [block.name for block in self.blocks]
        last = num_calls(names)
        numbers = [split_call(name) for name in names]
        begins = [
            number > before and not block.follows_on
            for block, (_, number), (_, before) in zip(self.blocks, numbers, [("", 1), *numbers], strict=False)
        ]
        ends = [*begins[1:], False]
        self.before_rest = {name for name, is_end in zip(names, ends, strict=True) if is_end}
        return {
            name: (number < last[block], begin, end)
            for name, (block, number), begin, end in zip(names, numbers, begins, ends, strict=True)
        }

    def _alike(self, block: RecordedBlock) -> tuple[Any, ...]:
        """What blocks of a kind have in common: all that their tapes say, or, where operators may depend on data, just
        their class and what they are given."""
        if block.tape.untrusted is None:
            return block.tape.digest, block.dead, block.held_besides, *self._shared(block)
        inputs, _, _ = self._shared(block)
        given = [(source, tensor.shape, tensor.dtype) for source, tensor in block.given.items()]
        return block.tape.identity, bool(block.tape.slots), block.tape.has_collectives, tuple(given), inputs

    def saved_bytes(self, name: str) -> int:
        """Return the bytes of all that autograd saved of the call `name`, one whose operators cannot be replayed."""
        return self._saved[name]

    def _shared(self, block: RecordedBlock) -> tuple[Any, ...]:
        """Which inputs of a block are shared, with which others, and which outputs and casts others keep."""
        inputs = tuple(self.sharing.index_of(tensor) for tensor in block.held())
        outputs = tuple(value for value, tensor in block.outputs.items() if self.sharing.is_kept(tensor))
        casts = {value: tensor for value, tensor in block.casts.items() if self.sharing.is_cached(tensor)}
        return inputs, outputs, tuple((value, self.sharing.is_owner(block, cast)) for value, cast in casts.items())

    def _kind(self, group: list[RecordedBlock]) -> KindProfile:
        tape = group[0].tape
        prices = self._prices[tape.digest]
        if tape.untrusted is not None:
            self._saved |= {block.name: saved_bytes(block, self.sharing) for block in group}
            times = [sum(self._prices[block.tape.digest].operator_ms) for block in group]
            kind = untrusted_kind(group, self.sharing, sum(times) / len(times))
        else:
            kind = KindBuilder(group, self.sharing, prices, self.config).build()
        read = recompute_outcome(kind).shared
        held = tuple(sorted(i for i in read if not self.sharing.records[i].saved))
        return replace(kind, held=held, untraced=group[0].known.untraced)

    def add_forwards(self, forwards: list[tuple[ForwardEvent, ...]]) -> list[KindProfile]:
        """Give each kind its measured forward."""
        self._kinds = [_with_forward(kind, forward) for kind, forward in zip(self._kinds, forwards, strict=True)]
        return self._kinds

    def follow_full_recomputation(
        self, installation: Installation, watched: Collection[str], sources: Mapping[str, Sequence[Source]]
    ) -> list[WatchSlots]:
        """Put every block under full recomputation, but for `watched`; returns the watchers of those that can have one.

        `sources` are the `replay_sources()`.
        """
        watchers = []
        for block in self.blocks:
            function, kind = installation.functions[block.name], self._kinds[block.kind]
            if block.name in watched and kind.untrusted is None:
                function.strategy = WatchSlots(block.name, kind, sources[block.name])
                watchers.append(function.strategy)
            else:
                function.strategy = BlockExecutor(block.name, recompute_plan(kind), self.library, block.known)
        return watchers

    def let_go(self) -> None:
        """Let go of the tensors of the recorded forward."""
        for block in self.blocks:
            block.arguments, block.given, block.outputs, block.casts = {}, {}, {}, {}

    def learn_orders(self, events: Mapping[str, Sequence[BackwardEvent]]) -> None:
        """Learn the order in which backward asks for saved tensors from what was seen of the watched blocks."""
        for block in self.blocks:
            self.library.learn_order(block.tape, unpack_order(events.get(block.name, ())))

    def replay_sources(self) -> dict[str, list[Source]]:
        """Where each block finds the shared inputs that it holds for replay under full recomputation."""
        read = [recompute_outcome(kind).shared for kind in self._kinds]
        return {block.name: self.sharing.sources(block, read[block.kind]) for block in self.blocks}


def _one_per_storage(given: Mapping[Source, torch.Tensor]) -> dict[Source, torch.Tensor]:
    """The tensors of `given` whose storage none before them has, detached."""
    first: dict[int, Source] = {}
    for source, tensor in given.items():
        first.setdefault(address_of(tensor), source)
    return {source: given[source].detach() for source in first.values()}


def _saved_outputs(recorder: Recorder, tape: Tape, result: Any) -> dict[int, torch.Tensor]:
    """Saved values among what a block made and returned."""
    saved = set(tape.saved_values())
    tensors = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return {value: tensor for tensor in tensors if (value := recorder.made_value(tensor)) in saved}


def _saved_casts(recorder: Recorder, tape: Tape) -> dict[int, torch.Tensor]:
    """Saved values that the block made of its parameters alone."""
    made = [value for value in tape.saved_values() if tape.values[value].producer is not None]
    return {value: recorder.bases[value] for value in made if is_parameter_cast(tape, value)}


def _made_references(recorder: Recorder, tape: Tape, besides: Set[int]) -> dict[int, StorageWeakRef]:
    """The storages of saved values that the block made, but for those of `besides`.

    What code that no operator shows has made comes from nowhere on the tape. What is no such thing lives on.
    """
    hidden = tape.untrusted in HIDDEN
    made = [
        value
        for value in tape.saved_values()
        if tape.values[value].producer is not None or (hidden and tape.values[value].source == Source("unknown", ()))
    ]
    return {value: StorageWeakRef(recorder.bases[value].untyped_storage()) for value in made if value not in besides}


def _block_actions(tape: Tape) -> tuple[BlockAction, ...]:
    """Return what may be done with a block as a whole that runs as `tape` says.

    Torch's checkpoint runs all of it again, so that all of it has to come out alike (rule R7).
    """
    can_run_again = not tape.has_collectives and runs_alike(tape)
    return (BlockAction.PLAIN, BlockAction.CHECKPOINT) if can_run_again else (BlockAction.PLAIN,)


def recompute_outcome(kind: KindProfile) -> BlockOutcome:
    """What a block of `kind` keeps and needs when all that can be is recomputed."""
    return run_block(kind, recompute_plan(kind))


def _with_forward(kind: KindProfile, forward: tuple[ForwardEvent, ...]) -> KindProfile:
    """`kind` with its measured forward; casts of parameters that forward did not let go of are cached too."""
    if kind.untrusted is not None:
        return with_untrusted_forward(kind, forward)
    dead = {event.value for event in forward if event.death}
    values = tuple(replace(v, cached=v.cached or (v.role == "parameter" and v.index not in dead)) for v in kind.values)
    return replace(kind, values=values, forward=forward)


# From recorded blocks to the profile of their kind: which values are activations, and what may be done with each.


class KindBuilder:
    """Builds the profile of blocks with equal tapes that share alike; its memory is still to be measured."""

    def __init__(self, group: Sequence[RecordedBlock], sharing: Sharing, prices: Prices, config: AdaccConfig) -> None:
        block = group[0]
        self.tape = block.tape
        self.prices = prices
        self.config = config
        self.dead = block.dead
        self.saved = set(block.saved())
        self.held_besides = block.held_besides
        self.shared = {value: sharing.index_of(tensor) for value, tensor in block.arguments.items()}
        kept = {value for value, tensor in block.outputs.items() if sharing.is_kept(tensor)}
        cached = {value: cast for value, cast in block.casts.items() if sharing.is_cached(cast)}
        kept |= cached.keys() | block.held_besides
        self.counted_elsewhere = {value for value, cast in cached.items() if not sharing.is_owner(block, cast)}
        inputs = {value.index for value in self.tape.values if self.tape.is_block_input(value.index)}
        own = {value for value in storable(self.tape) if self.shared.get(value) is None}
        self.activations = own & (self.saved | inputs)
        """What the block may store: dead slots store nothing."""
        self.kept = kept
        self.optional = self.activations - kept
        """What it may also not store; an output, a cast or anything else that others hold costs nothing more."""
        self.recomputable = obtainable(self.tape, self.tape.recomputable, self.saved) - kept
        self.block_actions = _block_actions(self.tape)
        self.given = given_records(block, sharing)
        self.generator_bytes = generator_bytes(block)
        self.outliers = {value: max(block.outliers.get(value, 0) for block in group) for value in prices.codecs}
        self.errors = [block.errors for block in group]

    def build(self) -> KindProfile:
        """The profile."""
        tape = self.tape
        return KindProfile(
            digest=tape.kind,
            block_class=tape.block_class,
            values=tuple(self._value(index) for index in range(len(tape.values))),
            operators=tuple(self._operator(index) for index in range(len(tape.operators))),
            slots=tuple(
                -1 if slot in self.dead or tape.is_held_elsewhere(ref.value) else ref.value
                for slot, ref in enumerate(tape.slots)
            ),
            copied_slots=tuple(sorted(tape.function_slots)),
            forward=(),
            backward=(),
            forward_ms=sum(self.prices.operator_ms),
            given=self.given,
            block_actions=self.block_actions,
            elsewhere_bytes=sum(tape.values[value].nbytes for value in self.counted_elsewhere),
            generator_bytes=self.generator_bytes,
        )

    def _value(self, index: int) -> Value:
        tape, record = self.tape, self.tape.values[index]
        options = self.prices.codecs.get(index, ()) if index in self.optional else ()
        errors = {option.codec: self._gradient_error(index, option.codec) for option in options}
        too_coarse = {codec: error for codec, error in errors.items() if error > DEGRADED_ERROR}
        codecs = tuple(option for option in options if option.codec not in too_coarse)
        return Value(
            index=index,
            name=record.name,
            shape=record.ref.geometry[0],
            encoded_shape=encode_view(tape, index).geometry[0],
            dtype=str(record.ref.dtype).removeprefix("torch."),
            nbytes=0 if index in self.counted_elsewhere else record.nbytes,
            producer=record.producer,
            saved=index in self.saved,
            cached=index in self.held_besides,
            activation=index in self.activations,
            is_kept=index in self.kept,
            shared=self.shared.get(index),
            recomputable=index in self.recomputable,
            role=role_of(tape, index),
            codecs=with_outliers(codecs, tape, index, self.config, self.outliers[index]) if codecs else (),
            equal_to=self._equal_to(index),
            replay_error=max(errors.replay.get(index, 0.0) for errors in self.errors),
            taken_after=record.source.path[0] if record.source and tape.is_generator_state(index) else 0,
            too_coarse=tuple(too_coarse.items()),
            place=self._place(index),
        )

    def _place(self, index: int) -> Place:
        """Where a call finds a block input that a codec can encode as it is given."""
        record = self.tape.values[index]
        if not self.tape.is_block_input(index) or not record.is_encodable or record.source is None:
            return ()
        size = record.ref.geometry[0]
        is_in_order = encode_view(self.tape, index).geometry[0] == size
        return record.source.path if is_in_order and len(record.source.path) == 1 else ()

    def _gradient_error(self, index: int, codec: str) -> float:
        """The largest that it makes in any block of the kind."""
        return max(errors.codecs.get((index, codec), 0.0) for errors in self.errors)

    def _equal_to(self, index: int) -> int | None:
        """The activation that stands for this value, as `ExecutionPlan` has it."""
        twin = self.tape.equal.get(index)
        is_free = index in self.recomputable and (index in self.optional or index not in self.tape.saved_values())
        return twin if is_free and twin in self.activations else None

    def _operator(self, index: int) -> Operator:
        operator = self.tape.operators[index]
        return Operator(
            index=index,
            name=operator.name,
            module=operator.module,
            inputs=tuple(value for value in operator.inputs() if not self.tape.is_module_state(value)),
            outputs=tuple(operator.made()),
            ms=self.prices.operator_ms[index],
            replayable=not self.recomputable.isdisjoint(operator.made()),
            extra_bytes=self.prices.operator_bytes[index] - self._reused_bytes(operator),
        )

    def _reused_bytes(self, operator: TapeOperator) -> int:
        """What it writes into in place, as replay does where nobody else reads it: its results are there already."""
        return sum(
            self.tape.values[old].nbytes
            for old, _ in operator.mutations
            if old not in self.activations
            and self.tape.values[old].source is None
            and not any(old in other.inputs() for other in self.tape.operators if other is not operator)
        )
