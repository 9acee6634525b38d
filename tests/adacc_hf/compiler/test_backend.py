"""torch.compile with the `adacc` backend, through Inductor to machine code."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from adacc_hf.compiler.backend import adacc

# Importing Inductor makes torch warn about itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")


@pytest.fixture
def empty_cache() -> Iterator[None]:
    """Drop Inductor's code before and after the test."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


def _gradients(model: nn.Module, call: nn.Module, x: Tensor) -> list[Tensor]:
    call(x).square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return gradients


@pytest.mark.usefixtures("fresh_dynamo", "empty_cache")
def test_a_model_trains_under_the_backend_and_its_code_is_found_again() -> None:
    torch.manual_seed(0)
    # The mask of positive elements is passed as bits.
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.ReLU())
    x = torch.randn(128, 64)
    options = {"memory_budget": 0.4, "min_compress_bytes": 0, "codecs": ("int8",)}

    def compiled_gradients(enable_autograd_cache: bool) -> list[Tensor]:
        """Return gradients by code that is compiled or found in the cache, as in a new process."""
        torch._dynamo.reset()
        counters.clear()
        with functorch_config.patch(enable_autograd_cache=enable_autograd_cache):
            return _gradients(model, torch.compile(model, backend=adacc, options=options), x)

    first = compiled_gradients(enable_autograd_cache=True)
    for gradient, expected in zip(first, _gradients(model, model, x), strict=True):
        # INT8 in groups of 64 has an error of 0.006 on normal noise; a few of these tensors enter each gradient.
        assert (gradient - expected).norm() < 0.03 * expected.norm()
    again = compiled_gradients(enable_autograd_cache=True)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    partitioned_again = compiled_gradients(enable_autograd_cache=False)
    assert (counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]) == (2, 0)
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, partitioned_again))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Settings of each call of Inductor, which compiles nothing here."""
    from torch._inductor import compile_fx

    options: list[dict[str, Any]] = []

    def compile_nothing(module: fx.GraphModule, inputs: Any, config_patches: dict[str, Any]) -> fx.GraphModule:
        options.append(config_patches)
        return module

    monkeypatch.setattr(compile_fx, "compile_fx", compile_nothing)
    return options


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "compile_options",
    [{"mode": "max-autotune-no-cudagraphs"}, {"options": {"memory_budget": 0.5, "max_autotune": True}}],
    ids=str,
)
def test_inductor_gets_its_own_settings(settings: list[dict[str, Any]], compile_options: dict[str, Any]) -> None:
    torch.compile(nn.Linear(4, 4), backend=adacc, **compile_options)(torch.randn(2, 4))
    assert settings[0]["max_autotune"] is True
    assert settings[0]["custom_partitioner_fn"].config.memory_budget == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.5}, r"options=\['budget'\] are unknown to backend 'adacc': choose from memory_b"),
        ({"memory_budget": 0.5, "head": "chunked"}, r"options=\['head'\] are unknown to backend 'adacc'"),
        ([1], r"options=\[1\] is of type list: give a dict, options="),
    ],
    ids=["unknown", "not-of-graphs", "no-dict"],
)
def test_options_that_mean_nothing_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adacc(torch.fx.symbolic_trace(nn.Linear(2, 2)), [torch.ones(1, 2)], options=options)
