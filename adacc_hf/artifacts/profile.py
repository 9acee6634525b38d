"""A profile: what the blocks of a model keep for backward and what every action would cost, as records without torch.

It is what the solver and the simulator read. `profile_model` makes it (paper, section 3.1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from adacc_hf.artifacts.call_names import numbered
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.exact_recompute_rules import (
    DEGRADED_ERROR,
    index_values,
    is_function,
    is_index,
    is_statistic,
    made_from,
    upstream,
)
from adacc_hf.artifacts.files import fields_of, read_json, write_json
from adacc_hf.artifacts.policy import BlockAction, Choice, Place
from adacc_hf.artifacts.size_model import ProfileSizes, Shapes, sizes_of

FORMAT_VERSION = 8
WHOLE = "whole"
"""The role of the activation that stands for all that a block saves, where its operators cannot be replayed."""


@dataclass(frozen=True, kw_only=True)
class CodecOption:
    """One codec that an activation can be compressed with, priced on the profiled data."""

    codec: str
    options: tuple[tuple[str, Any], ...]
    nbytes: int
    """Payload bytes, scales and indices included (M_i * CRate_i of the paper's equation 8)."""
    encode_ms: float
    decode_ms: float
    error: float
    """Relative L2 error of the round trip; 0 for a lossless codec."""
    lossless: bool


@dataclass(frozen=True, kw_only=True)
class Value:
    """One storage, at one version, that a block reads or makes.

    An *activation* is a value that the block must have stored or recompute for backward: what autograd saves, and the
    block input that replay starts from.
    """

    index: int
    name: str
    """Where it comes from: module path and operator, or the argument's place."""
    shape: tuple[int, ...]
    encoded_shape: tuple[int, ...]
    """The shape that codecs see: dimensions in the order of memory."""
    dtype: str
    nbytes: int
    """Bytes of the whole storage."""
    producer: int | None
    """Index of the operator that makes it; None for a block input."""
    saved: bool
    """Whether autograd saves it in this block."""
    activation: bool
    """Whether a policy has an action for it: it is saved and belongs to this block alone, or it is the block input."""
    shared: int | None
    """Index into `Profile.shared` for an input that other blocks or the caller hold too; always available."""
    recomputable: bool
    """Whether replay was verified to recompute it bit for bit from what is stored (rule R7)."""
    role: str
    """Class of tensor for the choice of a codec (paper, section 3.2): linear, norm, activation, qkv, softmax, mask,
    input, parameter (a cast of one), generator (its state), whole (WHOLE), other."""
    cached: bool = False
    """Whether it lives until the whole forward ends in any case: a parameter's cast in autocast's cache."""
    is_kept: bool = False
    """Whether others hold it too, whatever the block does: an output that the next block saves, a parameter's cast."""
    codecs: tuple[CodecOption, ...] = ()
    equal_to: int | None = None
    """An earlier activation with the same bits, made by the same operator from the same input. RECOMPUTE takes this
    value from there."""
    replay_error: float = 0.0
    """Largest relative error that it makes in the gradient of an operator to recompute it from what codecs left of
    other activations; 0 where that was not measured."""
    taken_after: int = 0
    """Of a generator's state, how many slots autograd has filled when the block takes it."""
    place: Place = ()
    """Of a block input, where a call finds it among its arguments."""
    too_coarse: tuple[tuple[str, float], ...] = ()
    """Codecs that are left out, and the relative error that each would make in the gradient of an operator."""

    @property
    def is_generator_state(self) -> bool:
        """Whether it is a random generator's state: a block keeps those that its replay draws from."""
        return self.role == "generator"

    @property
    def is_index(self) -> bool:
        """Whether it holds whole numbers; those of a byte are codes or truths."""
        return is_index(self.dtype)

    @property
    def is_statistic(self) -> bool:
        """Whether it holds one number for each row."""
        return is_statistic(self.shape)

    @property
    def is_far_recomputed(self) -> bool:
        """Whether it comes out too far off where replay starts from what codecs left."""
        return self.replay_error > DEGRADED_ERROR


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One replayable or recorded operator of a block: it reads `inputs` and makes `outputs`, by value index."""

    index: int
    name: str
    module: str
    inputs: tuple[int, ...]
    """Values it reads, parameters and buffers left out."""
    outputs: tuple[int, ...]
    ms: float
    """Median time of one run (T_comp_i of the paper's equation 4)."""
    replayable: bool
    extra_bytes: int = 0
    """What a run of it takes besides its results; below 0 where these lie in what it reads."""


@dataclass(frozen=True, kw_only=True)
class ForwardEvent:
    """One moment of a block's forward: it starts (value -1), a value is saved first, or its last reader but autograd
    goes. Where the rest of the model works before the block's next call, more such moments follow."""

    value: int
    death: bool
    extra_bytes: int
    """Most bytes live until the next event when nothing is stored, besides what was live when the block started."""


@dataclass(frozen=True, kw_only=True)
class BackwardEvent:
    """One moment of a block's backward: autograd asks for a slot, or lets go of it."""

    slot: int
    release: bool
    entry_bytes: int
    """Bytes live at this moment besides stored and replayed values: gradients on their way."""
    extra_bytes: int
    """Most bytes live until the next event besides stored and replayed values: gradients and temporaries."""


def unpack_order(events: Iterable[BackwardEvent]) -> tuple[int, ...]:
    """The slots in the order in which backward first asks for them."""
    return tuple(dict.fromkeys(event.slot for event in events if not event.release))


@dataclass(frozen=True, kw_only=True)
class KindProfile:
    """A tape with prices. Blocks with the same class, parameter shapes and recorded operators are of one kind."""

    digest: str
    block_class: str
    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    slots: tuple[int, ...]
    """Value that each saved-tensor slot holds, in the order autograd saves them; -1 for what lives anyway (state)."""
    backward: tuple[BackwardEvent, ...]
    """The order in which backward asks for slots and releases them."""
    forward: tuple[ForwardEvent, ...]
    """The order in which forward saves values and lets go of them by itself, when nothing is stored."""
    forward_ms: float
    """Sum of its operators' times."""
    held: tuple[int, ...] = ()
    """Indices into `Profile.shared` of what such a block holds for backward only where its replay reads it, as full
    recomputation's does, under which memory was measured."""
    given: tuple[int, ...] = ()
    """Indices into `Profile.shared` of what such a block is given, read or not: torch's checkpoint holds it."""
    copied_slots: tuple[int, ...] = ()
    """Slots of autograd Functions written in Python. Their backward may write into what they saved, so that it gets a
    copy of what a replay reads (rule R6)."""
    untrusted: str | None = None
    """Reason why the block's operators cannot be replayed; None if they can. All saved tensors form one activation then
    (role WHOLE): a block that runs plainly retains it, and torch's checkpoint makes it again."""
    block_actions: tuple[BlockAction, ...] = (BlockAction.PLAIN, BlockAction.CHECKPOINT)
    """What may be done with the block as a whole. Torch's checkpoint may run it if all of it came out alike when it was
    replayed, or nothing can be. Operators that other ranks take part in must run again on all ranks or on none."""
    elsewhere_bytes: int = 0
    """Bytes of casts of parameters that the block saves, and that an earlier call made: autocast's cache has them. A
    second forward makes them again."""
    generator_bytes: int = 0
    """What torch's checkpoint keeps of the random generators' states on the block's device."""
    untraced: str | None = None
    """Why each call of such a block is compared with its tape, operator by operator: Dynamo cannot trace its Python
    whole. None if guards tell whether a call runs what was recorded."""

    @cached_property
    def activations(self) -> tuple[Value, ...]:
        """The values that a policy has an action for."""
        return tuple(value for value in self.values if value.activation)

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """What torch's checkpoint of the block has to keep: the tensors given to it that nothing else holds."""
        return tuple(value for value in self.activations if value.producer is None and value.role != WHOLE)

    @cached_property
    def names(self) -> list[str]:
        """A name for each value that no other has, the same in batches of all sizes: "attn:clone", "attn:clone#2"."""
        return numbered(value.name for value in self.values)

    @cached_property
    def equal(self) -> dict[int, int]:
        """Values that repeat an earlier activation, mapped to it."""
        return {value.index: value.equal_to for value in self.values if value.equal_to is not None}

    def index_values(self, coded: Collection[int]) -> frozenset[int]:
        """Values that no replay may make where those in `coded` are stored with loss (`exact_recompute_rules.py`)."""
        return index_values(
            ((operator.inputs, operator.outputs) for operator in self.operators),
            self._counts_as_index,
            coded,
            {value.index for value in self.values if value.shared is not None or (value.activation and value.saved)},
        )

    def _counts_as_index(self, value: int) -> bool:
        producer = self.values[value].producer
        if self.values[value].is_index or producer is None:
            return self.values[value].is_index
        maker = self.operators[producer]
        return is_function(maker.name) and any(self.values[read].is_generator_state for read in maker.inputs)

    @cached_property
    def exactness_dependents(self) -> dict[int, frozenset[int]]:
        """Saved activations that no replay may make where any of these others is stored with loss: those with one
        number for each row, and what comes out too far off (`exact_recompute_rules.py`)."""
        saved = [value for value in self.activations if value.saved]
        far = {v.index: upstream(v.index, self._reads, self._is_activation) for v in saved if v.is_far_recomputed}
        # Where a statistic's rows are recomputed from further up, it is recomputed with them: it suits them better.
        rows = {v.index: made_from(v.index, self._reads, self._is_activation) for v in saved if v.is_statistic}
        return far | rows

    @cached_property
    def bears_coded_inputs(self) -> bool:
        """Whether the block may run again on inputs that were stored with loss.

        It may not if it cannot be replayed, since its operators may depend on data then; if indices are computed from
        the inputs (`exact_recompute_rules.py`); or if the replay error of a saved value is too large.
        """
        inputs = {value.index for value in self.inputs}
        is_far = any(value.saved and value.is_far_recomputed for value in self.values)
        return self.untrusted is None and not is_far and not self.index_values(inputs)

    def codec_option(self, value: int, choice: Choice) -> CodecOption:
        """The price of the codec that `choice` compresses a value with. Raises ValueError if it was not priced."""
        for option in self.values[value].codecs:
            if (option.codec, option.options) == (choice.codec, choice.options):
                return option
        raise ValueError(
            f"activation {value} ({self.values[value].name}) has no price for codec {choice.codec!r} with "
            f"{dict(choice.options)}: profile again with that codec"
        )

    def _reads(self, value: int) -> tuple[int, ...]:
        producer = self.values[value].producer
        return () if producer is None else self.operators[producer].inputs

    def _is_activation(self, value: int) -> bool:
        return self.values[value].activation

    def exactness_dependents_of(self, coded: Collection[int]) -> frozenset[int]:
        """Activations that no replay may make where those in `coded` are stored with loss."""
        return frozenset(value for value, others in self.exactness_dependents.items() if not others.isdisjoint(coded))

    def merged(self, equal: Mapping[int, int]) -> KindProfile:
        """The kind in which `equal[v]` stands for `v` wherever an operator reads it or a slot holds it."""
        if not equal:
            return self
        operators = (
            replace(operator, inputs=tuple(dict.fromkeys(equal.get(v, v) for v in operator.inputs)))
            for operator in self.operators
        )
        gone = {v: replace(self.values[v], saved=False, activation=False, equal_to=None) for v in equal}
        return replace(
            self,
            values=tuple(gone.get(value.index, value) for value in self.values),
            operators=tuple(operators),
            slots=tuple(equal.get(value, value) for value in self.slots),
        )


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One call of a block in a step, in the order of the forward."""

    name: str
    """The block's module path; of a second call in the step "path#2", and so on."""
    kind: int
    """Index into `Profile.kinds`."""
    forward_base_bytes: int
    """Bytes live when this block's forward starts, besides what earlier blocks store; its own input is counted."""
    backward_base_bytes: int
    """Bytes live when this block's backward starts, besides what blocks stored: parameters, gradients so far, what the
    rest of the model stores, the gradient that flows in, shared tensors that are saved or `held`."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A tensor that several blocks read, or that the rest of the model saves too: held once, whatever the policy."""

    name: str
    nbytes: int
    saved: bool
    """Whether plain training keeps it for backward."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """One way to run the output layer and the loss: its time, and what of a profile's memory depends on it."""

    name: str
    """ "plain": whole logits; "chunked": a loss that does without (chunked_loss.py)."""
    ms: float
    """Time of its forward and backward; 0 for the only one of a profile, which nothing is compared with."""
    outside_stored_bytes: int
    outside_peak_bytes: int
    loss_peak_bytes: int
    tail_peak_bytes: int
    backward_base_bytes: tuple[int, ...]
    """Of each block in forward order."""
    outside_live_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Tapes and prices of a model's blocks for one batch, and the memory of the rest of the step."""

    model_class: str
    kinds: tuple[KindProfile, ...]
    blocks: tuple[BlockProfile, ...]
    shared: tuple[Shared, ...]
    outside_stored_bytes: int
    """Bytes kept for backward by the rest of the model (embedding, head, loss), storages counted once."""
    static_bytes: int
    """Bytes live before a forward: parameters, buffers, optimizer state, the step's batches, and, with gradient
    accumulation, the gradients that earlier micro-batches left."""
    outside_peak_bytes: int
    """Most bytes live in the forward of the head and the loss, besides what blocks store. Casts that autocast caches
    are there whether blocks store them or not."""
    loss_peak_bytes: int
    """Most bytes live in the backward of the head and the loss, besides what blocks store."""
    tail_peak_bytes: int
    """Most bytes live when no block stores anything: after the last block's backward (the embedding's gradient), and
    before the first block's forward (a teacher's)."""
    available_bytes: int
    """Bytes that the device had for this process when it was profiled: live and free ones together."""
    step_ms: float
    """Time of one forward and backward with everything recomputed."""
    device: str
    head: str = "plain"
    """The head that the memory above was measured with; `with_head` gives the profile for another."""
    head_ms: float = 0.0
    """`Head.ms` of that head."""
    other_heads: tuple[Head, ...] = ()
    """The other heads that a policy may choose."""
    outside_live_bytes: int = 0
    """By how much `outside_peak_bytes` is lower where no replay reads any of the `held` tensors."""
    optimizer_peak_bytes: int = 0
    """Most bytes live while gradients are clipped and the optimizer steps; 0 if it was profiled without one."""
    measured: tuple[tuple[Shapes, tuple[int, ...]], ...] = field(default=(), repr=False)
    """(shapes, numbers) of the batch, then of other sizes: all numbers of this profile that depend on the shapes, as
    they were measured. If no other size was measured, only the batch's shapes, with no numbers. See size_model.py.
    """

    @property
    def sizes(self) -> ProfileSizes | None:
        """What gives this profile for batches of other sizes; None where none was measured."""
        return sizes_of(self.measured) if len(self.measured) > 1 else None

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the heads that a policy may choose, this profile's own first."""
        return (self.head, *(head.name for head in self.other_heads))

    def with_head(self, name: str) -> Profile:
        """The profile of the same model with the head `name`. Raises ValueError if it was not profiled."""
        if name == self.head:
            return self
        wanted = next((head for head in self.other_heads if head.name == name), None)
        if wanted is None:
            raise ValueError(
                f"head={name!r} is not in this profile, which has {' and '.join(self.heads)}: profile again with "
                f"AdaccConfig(head={name!r}), on a model whose output layer can be chunked"
            )
        bases = zip(self.blocks, wanted.backward_base_bytes, strict=True)
        return replace(
            self,
            head=name,
            head_ms=wanted.ms,
            other_heads=(self._own_head(), *(head for head in self.other_heads if head is not wanted)),
            blocks=tuple(replace(block, backward_base_bytes=base) for block, base in bases),
            outside_stored_bytes=wanted.outside_stored_bytes,
            outside_peak_bytes=wanted.outside_peak_bytes,
            outside_live_bytes=wanted.outside_live_bytes,
            loss_peak_bytes=wanted.loss_peak_bytes,
            tail_peak_bytes=wanted.tail_peak_bytes,
        )

    def without_codecs_below(self, nbytes: int) -> Profile:
        """Return this profile with no codecs for activations of fewer bytes."""

        def limited(value: Value) -> Value:
            return replace(value, codecs=()) if value.codecs and value.nbytes < nbytes else value

        return replace(self, kinds=tuple(replace(k, values=tuple(map(limited, k.values))) for k in self.kinds))

    def with_more_live(self, forward: int, blocks: Sequence[int], after: int) -> Profile:
        """The same model with so many bytes more, or fewer, live: until backward, in each block's, and after theirs.

        That is so with every head. What is live before the step, and in the optimizer's, stays as it is.
        """

        def shifted(bases: Sequence[int]) -> tuple[int, ...]:
            return tuple(base + more for base, more in zip(bases, blocks, strict=True))

        heads = (
            replace(
                head,
                outside_peak_bytes=head.outside_peak_bytes + forward,
                loss_peak_bytes=head.loss_peak_bytes + forward,
                tail_peak_bytes=head.tail_peak_bytes + after,
                backward_base_bytes=shifted(head.backward_base_bytes),
            )
            for head in self.other_heads
        )
        bases = shifted([block.backward_base_bytes for block in self.blocks])
        return replace(
            self,
            blocks=tuple(
                replace(block, forward_base_bytes=block.forward_base_bytes + forward, backward_base_bytes=base)
                for block, base in zip(self.blocks, bases, strict=True)
            ),
            outside_peak_bytes=self.outside_peak_bytes + forward,
            loss_peak_bytes=self.loss_peak_bytes + forward,
            tail_peak_bytes=self.tail_peak_bytes + after,
            other_heads=tuple(heads),
        )

    def _own_head(self) -> Head:
        return Head(
            name=self.head,
            ms=self.head_ms,
            outside_stored_bytes=self.outside_stored_bytes,
            outside_peak_bytes=self.outside_peak_bytes,
            outside_live_bytes=self.outside_live_bytes,
            loss_peak_bytes=self.loss_peak_bytes,
            tail_peak_bytes=self.tail_peak_bytes,
            backward_base_bytes=tuple(block.backward_base_bytes for block in self.blocks),
        )

    @property
    def head_overhead_ms(self) -> float:
        """Time that the head takes beyond the plain one: below 0 if it is faster, 0 if the plain one was not
        profiled."""
        plain_ms = next((head.ms for head in self.other_heads if head.name == "plain"), self.head_ms)
        return self.head_ms - plain_ms

    def kind_of(self, block: BlockProfile) -> KindProfile:
        return self.kinds[block.kind]

    @cached_property
    def held(self) -> tuple[frozenset[int], ...]:
        """For each block the shared tensors that its base has because blocks up to it read them in replay; the last
        entry holds for the loss's backward too."""
        return tuple(accumulate((frozenset(self.kind_of(block).held) for block in self.blocks), frozenset.union))

    def unread_bytes(self, block: int, read: Set[int]) -> int:
        """What of the base of the `block`-th block is not there if the replays of blocks up to it read only `read`."""
        unread = self.held[block] - read
        return sum(self.shared[index].nbytes for index in unread) if unread else 0

    def further_bytes(self, block: int, read: Set[int]) -> int:
        """What blocks up to the `block`-th hold for backward on top of its base, if the shared tensors are `read`."""
        further = read - self.held[block]
        return sum(shared.nbytes for index in further if not (shared := self.shared[index]).saved) if further else 0

    def head_peaks(self, read: Set[int]) -> tuple[int, int]:
        """`outside_peak_bytes` and `loss_peak_bytes` if the replays of all blocks read only `read`."""
        held, unread = self.unread_bytes(-1, frozenset()), self.unread_bytes(-1, read)
        further = self.further_bytes(-1, read)
        # What is read is there on top of the peak without any of them, at most.
        lower = max(0, self.outside_live_bytes - (held - unread))
        return self.outside_peak_bytes - lower + further, self.loss_peak_bytes - unread + further

    @cached_property
    def plain_stored_bytes(self) -> int:
        """What training without any action keeps for backward, storages counted once.

        What lives before the step anyway, parameters, buffers and the batch, is left out.
        """
        own = sum(value.nbytes for block in self.blocks for value in self.kind_of(block).activations if value.saved)
        return own + self.outside_stored_bytes + sum(shared.nbytes for shared in self.shared if shared.saved)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, atomically."""
        # A run writes one whenever its prices move, and it is some 2,000 records long: no indent, no copies.
        record = {"format": "adacc_hf.profile", "version": FORMAT_VERSION, **fields_of(self)}
        write_json(path, record, indent=None)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote. Raises FileNotFoundError, or AdaccError for what is no whole profile."""
        record = read_json(path, AdaccError, "profile")
        if not isinstance(record, dict) or record.get("format") != "adacc_hf.profile":
            raise AdaccError(f"{path} is not an adacc_hf profile: profile the model and save it again")
        if record.get("version") != FORMAT_VERSION:
            raise AdaccError(
                f"{path} has profile format version {record.get('version')!r}, this release reads {FORMAT_VERSION}: "
                f"profile the model again"
            )
        try:
            return _profile_from_json(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AdaccError(
                f"{path} is a damaged profile ({type(error).__name__}: {error}): profile the model again"
            ) from error


def _profile_from_json(record: dict[str, Any]) -> Profile:
    fields = {name: value for name, value in record.items() if name not in ("format", "version")}
    fields["kinds"] = tuple(_kind_from_json(kind) for kind in fields["kinds"])
    fields["blocks"] = tuple(BlockProfile(**block) for block in fields["blocks"])
    if any(not 0 <= block.kind < len(fields["kinds"]) for block in fields["blocks"]):
        raise ValueError("a block names a kind that is not in the file")
    fields["measured"] = tuple(
        (tuple((name, tuple(size)) for name, size in shapes), tuple(numbers))
        for shapes, numbers in fields.get("measured", ())
    )
    fields["shared"] = tuple(Shared(**shared) for shared in fields["shared"])
    fields["other_heads"] = tuple(
        Head(**{**head, "backward_base_bytes": tuple(head["backward_base_bytes"])}) for head in fields["other_heads"]
    )
    return Profile(**fields)


def _kind_from_json(record: dict[str, Any]) -> KindProfile:
    fields = dict(record)
    fields["values"] = tuple(_value_from_json(value) for value in fields["values"])
    fields["operators"] = tuple(
        Operator(**{**operator, "inputs": tuple(operator["inputs"]), "outputs": tuple(operator["outputs"])})
        for operator in fields["operators"]
    )
    fields["forward"] = tuple(ForwardEvent(**event) for event in fields["forward"])
    fields["backward"] = tuple(BackwardEvent(**event) for event in fields["backward"])
    fields["slots"] = tuple(fields["slots"])
    fields["held"] = tuple(fields["held"])
    fields["given"] = tuple(fields["given"])
    fields["copied_slots"] = tuple(fields.get("copied_slots", ()))
    fields["block_actions"] = tuple(map(BlockAction, fields["block_actions"]))
    return KindProfile(**fields)


def _value_from_json(record: dict[str, Any]) -> Value:
    codecs = tuple(codec_option_from_json(option) for option in record["codecs"])
    shapes = {name: tuple(record[name]) for name in ("shape", "encoded_shape", "place")}
    return Value(**{**record, **shapes, "codecs": codecs, "too_coarse": _pairs(record.get("too_coarse", ()))})


def codec_option_from_json(record: dict[str, Any]) -> CodecOption:
    """What `asdict` or JSON made of a codec option."""
    return CodecOption(**{**record, "options": _pairs(record["options"])})


def _pairs(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((str(name), value) for name, value in pairs)
