"""Fixtures of the codec tests: tensors of many shapes, and codecs with many settings."""

from collections.abc import Callable, Iterator

import pytest
import torch
from codec_cases import DTYPES, LOSSY, PARTS, parts_of
from torch import Tensor

from adacc_hf.kernels.codecs import Codec, get_codec, list_codecs


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    """Return a function that turns a contiguous [2, 3, 70, 4] tensor into a contiguous view of the tested shape."""
    return lambda x: parts_of(x)[request.param]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=LOSSY)
def lossy(request: pytest.FixtureRequest) -> Codec:
    """Return a fresh lossy codec. The parameters cover several group sizes."""
    return get_codec(request.param.split("-")[0], **LOSSY[request.param])


@pytest.fixture(params=list_codecs())
def codec_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Let torch.empty return NaN and largest integers instead of arbitrary contents."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
