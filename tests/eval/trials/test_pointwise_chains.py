"""Chains of pointwise operators: which operators they have, when they may run, and the bytes that they move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from adacc_hf.eval.trials.chain_kernel import chain_function
from adacc_hf.eval.trials.pointwise_chains import Chain, chain_bytes, find_chains, is_pointwise, with_chains
from adacc_hf.run.call import Recording
from adacc_hf.tape.replay import Environment, ReplayProgram, StorageMap, schedule, view
from adacc_hf.tape.tape import Tape, tensor_refs
from adacc_hf.tape.verification import same_bits, verify
from adacc_hf.torch_glue.tensors import copy_with_storage

SIDE = 6
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
UNARY = ("tanh", "neg", "third", "square", "cast", "transposed", "copied", "softmax", "halved", "summed", "running")
BINARY = ("add", "mul", "sub", "div", "mm", "minimum")


class Drawn(nn.Module):
    """A block of drawn operators, each of which reads what earlier ones made."""

    def __init__(self, calls: list[tuple[str, int, int]], dtype: torch.dtype) -> None:
        super().__init__()
        self.calls, self.dtype = calls, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for name, *back in self.calls:
            left, right = (made[-1 - min(steps, len(made) - 1)] for steps in back)
            made.append(self.call(name, left, right))
        return torch.stack([tensor.float().sum() for tensor in made[1:]]).sum()

    def call(self, name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        unary: dict[str, Any] = {
            "tanh": torch.tanh,
            "neg": torch.neg,
            "third": lambda t: t**3,
            "square": lambda t: t**2,
            "cast": lambda t: t.to(torch.float32 if t.dtype is self.dtype else self.dtype),
            "transposed": lambda t: t.t(),
            "copied": lambda t: t.t().contiguous(),
            "softmax": lambda t: t.softmax(-1),
            "running": lambda t: (t + 1).cumsum_(0),  # in place, and not pointwise
            "halved": lambda t: (t + 1).div_(2),  # in place
            "summed": lambda t: t.sum(-1, keepdim=True).expand(SIDE, SIDE),
        }
        if name in unary:
            return unary[name](left)
        return getattr(torch, name)(left.to(right.dtype), right)


CALLS = st.lists(
    st.tuples(st.sampled_from(UNARY + BINARY), st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=14
)


def record(block: nn.Module, *inputs: torch.Tensor) -> tuple[Tape, list[torch.Tensor]]:
    """The tape of one call, and what it recorded by value."""
    recording = Recording("block", block, inputs, {})
    recording.run(block)
    tape = recording.recorder.tape()
    bases = [copy_with_storage(base) for base in recording.recorder.bases]
    tape.recomputable = verify(tape, recording.recorder.bases)
    return tape, bases


def programs_of(tape: Tape, stored: set[int]) -> tuple[list[ReplayProgram], StorageMap]:
    given = {value.index for value in tape.values if value.source is not None}
    store = StorageMap(frozenset(given), frozenset(stored), frozenset())
    return schedule(tape, store, tuple(reversed(range(len(tape.slots))))), store


def replayed(
    tape: Tape, programs: list[ReplayProgram], store: StorageMap, bases: list[torch.Tensor]
) -> list[torch.Tensor]:
    """What each unpack gives."""
    environment: Environment = [
        copy_with_storage(base) if v in store.persistent else None for v, base in enumerate(bases)
    ]
    found = []
    for slot, program in zip(reversed(tape.slots), programs, strict=True):
        for loads, step in [*((step.loads, step) for step in program.steps), (program.loads, None)]:
            for value in loads:
                environment[value] = copy_with_storage(bases[value])
            if step is not None:
                step.run(environment)
        base = environment[slot.value]
        assert base is not None
        found.append(view(base, slot).clone())
        for value in program.frees:
            environment[value] = None
    left = [v for v, tensor in enumerate(environment) if tensor is not None and v not in store.persistent]
    assert not left, "every value is let go"
    return found


@settings(max_examples=100)
@given(CALLS, st.sampled_from(DTYPES), st.sets(st.integers(0, 40), max_size=4), st.integers(0, 99))
def test_chains_give_what_their_operators_give(calls, dtype, keep, seed):
    x = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()
    check_bits(Drawn(calls, dtype), x, keep)


def check_bits(block: nn.Module, x: torch.Tensor, keep: set[int] = frozenset()) -> list[str]:
    """Compare replay with chains to replay without, the values `keep` being stored; returns the chains."""
    tape, bases = record(block, x)
    stored = {value for value in tape.saved_values() if value in keep and not tape.values[value].overwritten}
    programs, store = programs_of(tape, stored)
    expected = replayed(tape, programs, store, bases)
    fused, names = [], []
    for program in programs:
        chains = find_chains(program, tape)
        check_members(tape, chains)
        fused.append(with_chains(program, [(chain, as_kernel(chain)) for chain in chains]))
        names += [chain.names for chain in chains]
    for own, other in zip(expected, replayed(tape, fused, store, bases), strict=True):
        assert same_bits(own, other)
    return names


def as_kernel(chain: Chain) -> Any:
    return lambda tensors: chain_function(chain)(*tensors)


def check_members(tape: Tape, chains: list[Chain]) -> None:
    """Each operator is in one chain at most, and hangs together with it without a view in between."""
    members = [id(step) for chain in chains for step in chain.steps]
    assert len(members) == len(set(members))
    for chain in chains:
        assert len(chain.steps) > 1
        assert all(is_pointwise(operator) for operator in chain.operators)
        made = {value for operator in chain.operators for value in operator.made()}
        assert set(chain.outputs) <= made
        assert chain.outputs
        within = [ref for operator in chain.operators for ref in tensor_refs(operator.args) if ref.value in made]
        assert within, "its operators hang together"
        assert all(ref.geometry == tape.values[ref.value].ref.geometry for ref in within)


class Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * x.pow(3.0))))


def test_a_gelu_is_one_chain_and_moves_what_autograd_needs():
    x = torch.randn(4, 8).requires_grad_()
    tape, _ = record(nn.Sequential(Gelu(), nn.Linear(8, 8)), x)
    programs, _ = programs_of(tape, set())
    (chain,) = [chain for program in programs for chain in find_chains(program, tape)]
    assert chain.names == "mul pow mul add mul tanh add mul"
    # Ten reads and eight writes; as one kernel one read, and what autograd saved: 0.5 x, the tanh, 1 + it, the product.
    assert chain_bytes(chain, tape) == (18 * 128, 5 * 128)


class Apply(nn.Module):
    """A block that is one function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def past_a_softmax(x):
    past = x.neg().neg()
    return (past + past.softmax(-1).neg()).tanh().exp()


def past_what_overwrites(x):
    made = x + 1
    left = made.tanh()
    made.cumsum_(0)
    return (left * made).exp()


def with_its_own_transpose(x):
    made = x.neg()
    return (made + made.t()).tanh().exp()


def read_by_another(x):
    made = x + 1
    other = made.softmax(-1)
    return (made.neg().neg() + other).tanh().exp()


@pytest.mark.parametrize(
    ("function", "chains"),
    [
        (past_a_softmax, ["neg neg", "neg add tanh exp"]),  # the softmax has to run in the middle of all
        (past_what_overwrites, ["add tanh", "mul exp"]),  # the tanh has to run before what it reads is overwritten
        (with_its_own_transpose, ["add tanh exp"]),  # a kernel for all sizes reads no views of what it makes
        (read_by_another, ["add neg neg", "add tanh exp"]),  # the softmax reads what the first chain makes
    ],
)
def test_what_has_to_run_in_between_parts_chains(function, chains):
    x = torch.randn(SIDE, SIDE).requires_grad_()
    assert sorted(check_bits(Apply(function), x)) == sorted(chains)


@pytest.mark.parametrize("size", [(4, 8), (1, 8)])
def test_repeated_elements_are_read_once(size):
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (x * scale.expand(4, 8) + 1).tanh()

    scale = torch.randn(1, 8).requires_grad_()
    tape, _ = record(Scaled(), torch.randn(4, 8).requires_grad_(), scale)
    chains = [chain for program in programs_of(tape, set())[0] for chain in find_chains(program, tape)]
    (chain,) = [chain for chain in chains if "tanh" in chain.names]
    before, after = chain_bytes(chain, tape)
    assert (before, after) == ((128 + 32 + 128) + 2 * 128 + 2 * 128, 128 + 32 + 128)
