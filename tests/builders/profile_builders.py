"""Profiles made by hand, operator by operator, and hypothesis strategies of small profiles."""

import itertools
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.kind_profile import BackwardEvent, CodecOption, ForwardEvent, KindProfile, Operator, Value
from adacc_hf.artifacts.plans import checkpoint_plan
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, BlockAction, Choice, Plan
from adacc_hf.artifacts.profile import BlockProfile, Head, Profile, Shared

SLOW_EXAMPLES = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
"""Settings of hypothesis for examples that solve programs."""


@dataclass
class TapeBuilder:
    """A builder of a `KindProfile`, operator by operator. Backward visits the slots of the last operator first."""

    values: list[dict] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    nodes: list[list[int]] = field(default_factory=list)
    """Indices of the values that each autograd node saves."""

    def value(self, name, nbytes, producer=None, **fields):
        self.values.append({"name": name, "nbytes": nbytes, "producer": producer, "codecs": (), **fields})
        return len(self.values) - 1

    def operator(self, name, inputs, outputs, ms, save=(), replayable=True):
        """Add an operator and return the indices of its outputs. `outputs` holds (name, nbytes) pairs. `save` holds
        indices of the values that the operator's autograd node saves; a negative number is a position in `outputs`."""
        index = len(self.operators)
        output_indices = [self.value(label, nbytes, index) for label, nbytes in outputs]
        for value in output_indices:
            self.values[value]["recomputable"] = replayable
        self.operators.append(
            Operator(
                index=index,
                name=name,
                module="",
                inputs=tuple(inputs),
                outputs=tuple(output_indices),
                ms=ms,
                replayable=replayable,
            )
        )
        self.nodes.append([output_indices[v] if v < 0 else v for v in save])
        return output_indices

    def kind(self, digest="tape", extra_bytes=0, forward_extra_bytes=0):
        saved = {value for node in self.nodes for value in node}
        values = tuple(self._record(index, fields, index in saved) for index, fields in enumerate(self.values))
        slots, backward = [], []
        for node in self.nodes:
            first = len(slots)
            slots += node
            events = [(slot, release) for release in (False, True) for slot in range(first, len(slots))]
            backward = [
                BackwardEvent(slot=slot, release=release, entry_bytes=extra_bytes // 2, extra_bytes=extra_bytes)
                for slot, release in events
            ] + backward
        return KindProfile(
            digest=digest,
            block_class="Block",
            values=values,
            operators=tuple(self.operators),
            slots=tuple(slots),
            backward=tuple(backward),
            forward=self._forward(forward_extra_bytes),
            forward_ms=sum(operator.ms for operator in self.operators),
        )

    def _forward(self, extra_bytes):
        """Return the forward's events: the first save of each value, and its death with the last operator that reads
        it."""
        events = [ForwardEvent(value=-1, death=False, extra_bytes=extra_bytes)]
        first = {value: i for i, node in reversed(list(enumerate(self.nodes))) for value in node}
        last = {value: i for i, op in enumerate(self.operators) for value in (*op.outputs, *op.inputs)}
        for i in range(len(self.operators)):
            for death, times in ((False, first), (True, last)):
                values = [
                    value for value in first if times.get(value) == i and self.values[value]["producer"] is not None
                ]
                events += [ForwardEvent(value=value, death=death, extra_bytes=extra_bytes) for value in values]
        return tuple(events)

    @staticmethod
    def _record(index, fields, saved):
        shared = fields.get("shared")
        return Value(
            **{
                "index": index,
                "shape": (fields["nbytes"],),
                "encoded_shape": (fields["nbytes"],),
                "dtype": "uint8",
                "saved": saved,
                "activation": shared is None and (saved or fields["producer"] is None),
                "shared": None,
                "recomputable": False,
                "role": "other",
                "place": (index,) if fields["producer"] is None and fields.get("role") != "generator" else (),
                **fields,
            }
        )


def codec(name, nbytes, encode_ms, decode_ms, error=0.1):
    """Return a priced codec."""
    return CodecOption(
        codec=name,
        options=(("group_size", 64),),
        nbytes=nbytes,
        encode_ms=encode_ms,
        decode_ms=decode_ms,
        error=error,
        lossless=error == 0.0,
    )


def make_profile(kinds, layout, shared=(), **memory):
    """Return a profile whose i-th block is of kind `layout[i]`."""
    gradient_bytes = memory.pop("gradient_bytes", 0)
    base = memory.setdefault("static_bytes", 1000)
    forward_base = memory.pop("forward_base_bytes", base + 100)
    return Profile(
        **{
            "model_class": "Toy",
            "kinds": tuple(kinds),
            "blocks": tuple(
                BlockProfile(
                    name=f"h.{i}",
                    kind=kind,
                    forward_base_bytes=forward_base,
                    backward_base_bytes=base + gradient_bytes * (len(layout) - i),
                )
                for i, kind in enumerate(layout)
            ),
            "shared": tuple(shared),
            "outside_stored_bytes": 100,
            "outside_peak_bytes": base + 300,
            "loss_peak_bytes": base + 250,
            "tail_peak_bytes": base + 200,
            "available_bytes": 1 << 40,
            "step_ms": 100.0,
            "device": "cpu",
            **memory,
        }
    )


def with_chunked_head(profile, saved_bytes, ms=5.0):
    """Return `profile` with a second, chunked head whose peak is `saved_bytes` lower and that takes `ms` longer."""
    head = Head(
        name="chunked",
        ms=20.0 + ms,
        outside_stored_bytes=profile.outside_stored_bytes,
        outside_peak_bytes=profile.outside_peak_bytes - saved_bytes,
        loss_peak_bytes=profile.loss_peak_bytes - saved_bytes,
    )
    return replace(profile, head_ms=20.0, other_heads=(head,))


def plan_of(kind, **choices):
    """Return the plan with the given choices for the named values; the others are retained."""
    return Plan(
        kind=kind.digest, choices=tuple((value.index, choices.get(value.name, RETAIN)) for value in kind.activations)
    )


@pytest.fixture(scope="session")
def tape_builder():
    """The class that builds a kind operator by operator."""
    return TapeBuilder


@pytest.fixture(scope="session")
def make_codec():
    """`make_codec(name, nbytes, encode_ms, decode_ms, error)`: a priced codec."""
    return codec


@pytest.fixture(scope="session")
def profile_of():
    """`profile_of(kinds, layout, shared=(), **memory)`: a profile whose i-th block is of kind `layout[i]`."""
    return make_profile


@pytest.fixture(scope="session")
def add_chunked_head():
    """`add_chunked_head(profile, saved_bytes, ms=5.0)`: the profile with a chunked head as another option."""
    return with_chunked_head


@st.composite
def random_kinds(draw, digest="tape"):
    """Draw a small kind with at most about 2000 plans. Times are multiples of 1/8, so that sums are exact."""
    tape = TapeBuilder()
    sizes = st.integers(1, 40).map(lambda n: 4 * n)
    eighths = st.integers(0, 24).map(lambda n: n / 8)
    values = [tape.value("input", draw(sizes)), tape.value("rotary", draw(sizes), shared=0)]
    values.append(tape.value("mask", draw(sizes), shared=1))
    for j in range(draw(st.integers(1, 5))):
        inputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True))
        outputs = [(f"v{j}.{i}", draw(sizes)) for i in range(draw(st.integers(1, 2)))]
        candidates = [*inputs, *range(-len(outputs), 0)]
        save = draw(st.lists(st.sampled_from(candidates), max_size=2, unique=True))
        save = [value for value in save if tape.values[value].get("shared") != 1 or value < 0]
        if draw(st.integers(0, 3)) == 0:
            inputs.append(tape.value("generator", draw(sizes), role="generator", activation=False))
        values += tape.operator(f"op{j}", inputs, outputs, draw(eighths), save, replayable=draw(st.integers(0, 5)) > 0)
    saved = sorted({value for node in tape.nodes for value in node})
    for value in draw(st.lists(st.sampled_from(saved), max_size=3, unique=True)) if saved else []:
        nbytes = tape.values[value]["nbytes"]
        tape.values[value]["codecs"] = tuple(
            codec(name, draw(st.integers(1, nbytes)), draw(eighths), draw(eighths), error)
            for name, error in (("int8", 0.01), ("int4", 0.1))[: draw(st.integers(1, 2))]
        )
    for value in draw(st.lists(st.sampled_from(saved), max_size=2, unique=True)) if saved else []:
        tape.values[value]["replay_error"] = 1.0
    return tape.kind(digest, extra_bytes=draw(sizes), forward_extra_bytes=draw(sizes))


@st.composite
def random_profiles(draw, num_kinds=1, max_blocks=1):
    """Draw profiles with up to `max_blocks` blocks of each of `num_kinds` kinds. Only the first shared tensor is saved,
    and some kinds read the second one in replay."""
    held_places, given_places = st.sampled_from([(), (1,)]), st.sampled_from([(0,), (0, 1)])
    actions = st.sampled_from([(BlockAction.PLAIN,), tuple(BlockAction)[:2]])
    kinds = [
        replace(
            draw(random_kinds(f"tape{i}")),
            held=draw(held_places),
            given=draw(given_places),
            block_actions=draw(actions),
        )
        for i in range(num_kinds)
    ]
    layout = [i for i in range(num_kinds) for _ in range(draw(st.integers(1, max_blocks)))]
    shared = [Shared(name="rotary", nbytes=12, saved=True), Shared(name="mask", nbytes=20, saved=False)]
    return make_profile(
        kinds,
        draw(st.permutations(layout)),
        shared,
        gradient_bytes=draw(st.integers(0, 50)),
        outside_live_bytes=draw(st.integers(0, 20)) if any(kind.held for kind in kinds) else 0,
    )


def every_plan_of(kind):
    """Yield all plans in which replay recomputes no value from coded values that it must not read."""
    options = {value.index: kind.codec_options(value.index) for value in kind.activations}
    menus = [[RETAIN, RECOMPUTE, *map(Choice.compress, options[v.index])] for v in kind.activations]
    for menu in itertools.product(*menus):
        choices = {value.index: choice for value, choice in zip(kind.activations, menu, strict=True)}
        lossy = [v for v, each in options.items() if any(o.error and choices[v].codec == o.codec for o in each)]
        if not any(choices[value] == RECOMPUTE for value in kind.exactness_dependents_of(lossy)):
            yield Plan(kind=kind.digest, choices=tuple(choices.items()))
    if BlockAction.CHECKPOINT not in kind.block_actions or not kind.slots:
        return
    menus = [[None, *(o for o in options[v.index] if o.lossless or kind.allows_lossy_inputs)] for v in kind.inputs]
    for menu in itertools.product(*menus):
        options = zip(kind.inputs, menu, strict=True)
        yield checkpoint_plan(kind, {v.index: Choice.compress(o) for v, o in options if o is not None})


def every_outcome_of(kind):
    """Yield (plan, outcome) for each plan that the simulator accepts."""
    for plan in every_plan_of(kind):
        with suppress(ValueError):
            yield plan, run_block(kind, plan)


def bytes_of_step(profile, outcomes):
    """Return the bytes that a step stores on the device, as the simulator counts them."""
    read = frozenset().union(*(outcome.shared for outcome in outcomes))
    shared = sum(record.nbytes for i, record in enumerate(profile.shared) if record.saved or i in read)
    return profile.outside_stored_bytes + shared + sum(outcome.stored_bytes for outcome in outcomes)


@pytest.fixture(scope="session")
def profiles():
    """`profiles(num_kinds=1, max_blocks=1)`: a hypothesis strategy of small profiles."""
    return random_profiles


@pytest.fixture
def tight_profile():
    """A profile of one block whose least-peak policy is in reach only of the search at a larger budget."""
    tape = TapeBuilder()
    start = tape.value("input", 4, codecs=(codec("int8", 1, 0.0, 0.0),))
    rotary, mask = tape.value("rotary", 4, shared=0), tape.value("mask", 4, shared=1)
    (out,) = tape.operator("op", [start, mask], [("out", 24)], 1 / 8, save=[-1])
    tape.values[out]["codecs"] = (codec("int8", 1, 0.0, 1 / 8),)
    tape.operator("last", [start, rotary], [("last", 4)], 0.0, save=[start, rotary], replayable=False)
    shared = [Shared(name="rotary", nbytes=12, saved=True), Shared(name="mask", nbytes=20, saved=False)]
    kind = replace(tape.kind(extra_bytes=4, forward_extra_bytes=4), held=(1,))
    return make_profile([kind], [0], shared, outside_live_bytes=2)


def in_all_blocks(profile, options):
    """Return (block, activation, codec) of the `options` of kinds, for every block to which an option applies."""
    return frozenset(
        (block.name, profile.kinds[kind].names[value], codec)
        for block in profile.blocks
        for kind, value, codec in options
        if kind in profile.kinds_of(block)
    )
