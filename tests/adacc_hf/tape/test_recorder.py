"""Recording: operators, values, versions, slots and sources on a tape."""

import pytest
import torch
from torch import nn

from adacc_hf.tape.recorder import Recorder
from adacc_hf.tape.replay_check import verify
from adacc_hf.torch_glue.meters import CpuMemoryMeter


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.register_buffer("scale", torch.ones(4))
        self.table = torch.ones(4)


@pytest.fixture
def record(record_call):
    """`record(forward, *args, block=None, **kwargs)`: (tape, recorder) of `forward(block, *args, **kwargs)`."""
    return lambda forward, *args, block=None, **kwargs: record_call(forward, block or Block(), *args, **kwargs)


@pytest.fixture
def x():
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


def names(tape):
    return [operator.name.removeprefix("aten.").split(".")[0] for operator in tape.operators]


def test_slots_follow_autograd_and_know_their_views(record, x):
    tape, recorder = record(lambda block, x: block.inner(x).sum(), x)
    assert [tape.values[slot.value].name for slot in tape.slots] == [
        "argument 0",
        "parameter inner.0.weight",
        "inner.1:tanh",
    ]
    assert tape.slots[0].geometry == ((6, 4), (4, 1), 0)
    assert tape.slots[1].geometry == ((4, 4), (1, 4), 0)
    for slot in tape.slots:
        assert recorder.bases[slot.value].untyped_storage().nbytes() == tape.values[slot.value].nbytes


def test_operators_are_named_by_their_submodule(record, x):
    tape, _ = record(lambda block, x: block.inner(x).exp(), x)
    assert [operator.module for operator in tape.operators] == ["inner.0", "inner.1", ""]
    assert tape.values[-1].name == "block:exp"


def test_mutations_make_versions(record, x):
    def forward(block, x):
        y = x * 2
        y.add_(1.0)
        y[0].mul_(3.0)
        return y.exp()

    tape, recorder = record(forward, x)
    assert names(tape) == ["mul", "add_", "mul_", "exp"]
    ((_, first),) = tape.operators[0].outputs
    ((read, second),) = tape.operators[1].mutations
    ((read_again, third),) = tape.operators[2].mutations
    assert (read, read_again) == (first, second)
    assert [tape.values[value].overwritten for value in (first, second, third)] == [True, True, False]
    refs = [tape.values[value].ref for value in (first, second, third)]
    assert list(map(recorder.was_written_later, refs)) == [True, True, False]
    assert [ref.value for ref in tape.operators[3].args] == [third]
    assert tape.values[third].ref.geometry == tape.values[first].ref.geometry
    assert recorder.bases[first] is not None


def test_sources_say_where_a_value_is_found(record, x):
    mask = torch.ones(4)
    closed_over = torch.ones(4)

    def forward(block, x, extra):
        y = block.inner(x) * block.scale + extra["mask"][0]
        return y + block.table + closed_over

    tape, _ = record(forward, x, extra={"mask": (mask,)})
    indices = {str(value.source): value.index for value in tape.values if value.source is not None}
    arguments = ["argument 0", "argument extra.mask.0"]
    state = ["buffer scale", "module .table", "parameter inner.0.bias", "parameter inner.0.weight"]
    assert sorted(indices) == [*arguments, *state, "unknown"]
    assert sum(value.source is not None for value in tape.values) == 7
    assert all(tape.is_block_input(indices[name]) and not tape.is_held_elsewhere(indices[name]) for name in arguments)
    assert all(tape.is_module_state(indices[name]) and tape.is_held_elsewhere(indices[name]) for name in state)
    assert tape.is_held_elsewhere(indices["unknown"])
    assert not tape.is_module_state(indices["unknown"])


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        pytest.param(lambda block, x: x * x.max().item(), "_local_scalar_dense", id="item"),
        pytest.param(lambda block, x: x if x.sum() > 0 else -x, "_local_scalar_dense|is_nonzero", id="if"),
        pytest.param(lambda block, x: x[x > 0], "nonzero|index", id="masked"),
        pytest.param(lambda block, x: x.nonzero(), "nonzero", id="nonzero"),
        pytest.param(lambda block, x: torch.cond(x.sum() > 0, block.inner, torch.sin, (x,)), "torch's cond", id="cond"),
        pytest.param(lambda block, x: torch.zeros(2).resize_(4), "another storage", id="resize"),
        pytest.param(lambda block, x: torch.zeros(2).set_(torch.ones(3)), "another storage", id="set"),
        pytest.param(
            lambda block, x: torch.view_as_complex(x.detach().view(2, 3, 2, 2)).conj().sum(), "lazily", id="conj"
        ),
    ],
)
def test_what_makes_a_tape_untrusted(record, x, forward, reason):
    tape, _ = record(forward, x)
    assert tape.untrusted is not None
    assert any(part in tape.untrusted for part in reason.split("|"))


def test_indices_that_are_given_are_trusted(record, x):
    """Indices passed as arguments are trusted, because an embedding lookup reads no data into Python."""
    index = torch.tensor([0, 1])
    tape, _ = record(
        lambda block, x, index: x[index] * nn.functional.embedding(index, block.inner[0].weight)[:, None], x, index
    )
    assert tape.untrusted is None


def test_a_cast_from_autocasts_cache_is_an_operator_of_every_call(record, x):
    """A cast from autocast's cache is on every call's tape, so that replay can compute it again."""
    block = Block()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tapes = [record(lambda block, x: block.inner(x), x.detach(), block=block)[0] for _ in range(2)]
    assert [names(tape).count("_to_copy") for tape in tapes] == [3, 3]
    assert {str(op.kwargs) for tape in tapes for op in tape.operators if "_to_copy" in op.name} == {
        "{'dtype': torch.bfloat16}"
    }
    assert not [value for value in tapes[1].values if str(value.source).startswith("unknown")]
    assert tapes[0].digest == tapes[1].digest


class Wrapper(torch.Tensor):
    """A tensor that wraps another one and detaches to a new tensor, as torchao's float8 tensors do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Wrapper(args[0].inner)


def test_a_value_whose_base_lies_elsewhere_keeps_its_storage(x):
    """A wrapped value keeps its storage alive. Otherwise another storage could reuse its key."""
    recorder = Recorder(Block(), (x,), {})
    values = [recorder.refer(Wrapper(torch.ones(3))).value for _ in range(8)]
    assert len(set(values)) == 8, "the storage of a value that died would be taken for the next one's"


@pytest.mark.parametrize("depth", [4, 16])
def test_results_that_the_block_frees_are_not_kept(record, depth):
    """Autograd saves none of the sums. Each one is freed as in training, and replay is verified nevertheless."""

    def forward(block, x):
        for number in range(depth):
            x = x + number
        return x.tanh()

    x = torch.randn(1000, requires_grad=True)
    with CpuMemoryMeter() as meter:
        tape, recorder = record(forward, x)
    assert meter.peak_bytes <= 5 * x.nbytes
    assert len(tape.checksums) == depth
    assert verify(tape, recorder.bases) == set(range(1, depth + 2))
    tape.checksums[depth // 2] += 1
    assert verify(tape, recorder.bases) == set(range(1, depth // 2))


def test_a_result_that_is_saved_later_is_kept(record):
    def forward(block, x):
        y = x + 1
        z = y + 2
        return z + y.exp() * 2 + y.sin()

    x = torch.randn(100, requires_grad=True)
    tape, recorder = record(forward, x)
    saved = {slot.value for slot in tape.slots}
    assert saved
    assert saved.isdisjoint(tape.checksums)
    assert torch.equal(recorder.bases[1], x + 1)
