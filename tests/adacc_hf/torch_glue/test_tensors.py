"""Parts of DTensors, on a mesh of this process alone."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from adacc_hf.tape.recorder import Recorder
from adacc_hf.torch_glue.memory import distinct_bytes
from adacc_hf.torch_glue.tensors import (
    difference_norm,
    l2_norm,
    local_of,
    parts_with_memory,
    relative_error,
    runs_on_parts,
    spec_of,
    storage_of,
    to_dtensor,
    wait_if_async,
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_a_part_becomes_the_whole_again(mesh: DeviceMesh, placement) -> None:
    tensor = distribute_tensor(torch.randn(4, 6), mesh, [placement])
    again = to_dtensor(local_of(tensor), spec_of(tensor))
    assert runs_on_parts(DTensor)
    assert again.placements == tensor.placements
    assert torch.equal(again.full_tensor(), tensor.full_tensor())


def test_what_is_on_its_way_is_waited_for() -> None:
    tensor = torch.randn(3)
    pending = AsyncCollectiveTensor(tensor)
    assert runs_on_parts(AsyncCollectiveTensor)
    assert torch.equal(local_of(pending), tensor)
    assert type(wait_if_async(pending)) is torch.Tensor


def test_memory_is_that_of_the_part(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
    assert distinct_bytes([tensor, local_of(tensor), torch.zeros(3)]) == 96 + 12


@pytest.mark.filterwarnings("ignore:Sparse")  # torch warns that its sparse tensors may change
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_memory_of_a_sparse_tensor_is_that_of_its_elements_and_indices(layout) -> None:
    tensor = torch.eye(6).to_sparse(layout=layout)
    assert sorted(part.nbytes for part in parts_with_memory(tensor)) == sorted(
        [6 * 4, *([2 * 6 * 8] if layout is torch.sparse_coo else [6 * 8, 7 * 8])]
    )
    assert storage_of(tensor)._cdata == storage_of(tensor)._cdata != storage_of(torch.ones(6))._cdata


class Reduced(nn.Module):
    """A module that sums the input over all ranks and squares the sum."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # modules use this name
        doubled = input * 2
        dist.all_reduce(doubled)
        return doubled.exp()


def test_what_other_ranks_take_part_in_is_a_new_version_that_never_runs_again(mesh: DeviceMesh) -> None:
    block, x = Reduced(), torch.randn(3)
    recorder = Recorder(block, (x,), {})
    with recorder:
        block(x)
    tape = recorder.tape()
    assert [operator.is_collective for operator in tape.operators] == [False, True, False]
    assert [operator.may_run_again for operator in tape.operators] == [True, False, True]
    doubled, summed = tape.operators[0].results() + tape.operators[1].results()
    assert tape.values[doubled].overwritten
    assert tape.operators[2].inputs() == (summed,)
    assert tape.has_collectives


def test_a_tape_of_freed_memory_is_not_trusted() -> None:
    class Frees(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            gathered = input * 2
            result = gathered.sin()
            gathered.untyped_storage().resize_(0)
            return result

    block, x = Frees(), torch.randn(3, requires_grad=True)
    recorder = Recorder(block, (x,), {})
    with torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda slot: None), recorder:
        block(x)
    assert recorder.tape().untrusted.startswith("memory of tensors that backward reads is freed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("turned", ["neither", "both", "one"])
def test_the_error_is_of_all_tensors_as_one_vector_in_double_precision(dtype: torch.dtype, turned: str) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(size, generator=generator, dtype=dtype) for size in ((3, 40, 90), (7,), ())]
    other = [e + 0.1 * torch.randn(e.shape, generator=generator, dtype=dtype) for e in exact]
    exact[0] = exact[0].mT if turned == "both" else exact[0]
    other[0] = {"both": other[0].mT, "one": other[0].mT.contiguous().mT}.get(turned, other[0])
    copies = [tensor.clone() for tensor in other]
    wide = torch.promote_types(dtype, torch.float64)
    e, o = (torch.cat([t.reshape(-1).to(wide) for t in tensors]) for tensors in (exact, other))
    # Double precision, summed in another order.
    assert math.isclose(l2_norm(exact), e.norm(), rel_tol=1e-12)
    assert math.isclose(difference_norm(exact, other), (o - e).norm(), rel_tol=1e-12)
    assert math.isclose(relative_error(exact, other), (o - e).norm() / e.norm(), rel_tol=1e-12)
    assert all(torch.equal(*pair) for pair in zip(other, copies, strict=True))


@pytest.mark.parametrize(
    ("exact", "other", "error"),
    [
        ([0.0, 0.0], [1.0, 0.0], 0.0),
        ([math.inf, 1.0], [math.inf, 2.0], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], 0.0),
        ([1.0, 1.0], [1.0, math.inf], math.inf),
        ([1.0, 1.0], [1.0, math.nan], math.inf),
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([True, False], [True, True], 1.0),
    ],
)
def test_only_what_was_finite_can_be_off(exact: list[Any], other: list[Any], error: float) -> None:
    assert float(relative_error([torch.tensor(exact)], [torch.tensor(other)])) == error
