"""Static memory against the real allocations of torch's optimizers, and the arithmetic of sharding."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from adacc_hf.estimate.static_memory import OPTIMIZERS, Sharding, static_memory

STEP_COUNTERS = 64
"""Bytes of torch's step counts, 4 per parameter, which the estimate leaves out: 4 parameters of up to 16 bytes each."""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 96))


def of(optimizer: str, sharding: Sharding | None = None, master_weights: bool = False, net: nn.Module | None = None):
    net = net or model()
    return static_memory(net, [net[1]], optimizer, sharding or Sharding(), master_weights)


def allocated(optimizer: torch.optim.Optimizer, net: nn.Module) -> int:
    """Return the bytes of the optimizer's state after a step."""
    net(torch.ones(2, 96)).sum().backward()
    optimizer.step()
    leaves = tree_leaves(list(optimizer.state.values()))
    return sum(leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, torch.Tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "sgd_momentum"])
def test_state_is_what_torch_allocates(name: str, dtype: torch.dtype) -> None:
    net = model().to(dtype)
    optimizer_class = {
        "adamw": torch.optim.AdamW,
        "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    }[name]
    net.forward = lambda x, net=net: net[1](net[0](x.to(dtype)))  # type: ignore[method-assign]
    assert abs(allocated(optimizer_class(net.parameters()), net) - of(name, net=net).optimizer_bytes) <= STEP_COUNTERS


def test_adafactor_is_factored() -> None:
    from transformers import Adafactor

    net = model()
    real = allocated(Adafactor(net.parameters(), lr=1e-3, relative_step=False, scale_parameter=False), net)
    assert abs(real - of("adafactor", net=net).optimizer_bytes) <= STEP_COUNTERS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_trained_parameters_have_gradients_and_state(name: str) -> None:
    net = model()
    net[0].requires_grad_(False)
    memory, unsharded = of(name, net=net), of(name)
    assert memory.parameters_bytes == unsharded.parameters_bytes
    assert memory.gradients_bytes == sum(p.numel() * 4 for p in net[1].parameters())
    assert memory.optimizer_bytes < unsharded.optimizer_bytes or unsharded.optimizer_bytes == 0


def test_what_each_method_divides() -> None:
    unsharded = of("adamw")

    def divided(method: str) -> list[int]:
        part = of("adamw", Sharding(method=method, num_devices=4))
        names = ("parameters_bytes", "gradients_bytes", "optimizer_bytes")
        return [round(getattr(unsharded, name) / getattr(part, name)) for name in names]

    assert divided("ddp") == [1, 1, 1]
    assert divided("zero1") == [1, 1, 4]
    assert divided("zero2") == [1, 4, 4]
    assert divided("zero3") == divided("fsdp") == [4, 4, 4]


def test_ddp_keeps_its_buckets_and_fsdp_whole_layers() -> None:
    unsharded = of("adamw")
    assert of("adamw", Sharding(method="ddp", num_devices=2)).buckets_bytes == unsharded.gradients_bytes
    assert of("adamw", Sharding(method="fsdp", num_devices=2)).unsharded_bytes == unsharded.parameters_bytes


@pytest.mark.parametrize(("stage", "resting", "in_update"), [(1, 2, 0), (2, 2, 0), (3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deepspeed_reduces_in_buckets_of_its_own_size(
    dtype: torch.dtype, stage: int, resting: int, in_update: int
) -> None:
    """Buckets have DeepSpeed's size whatever the model's. ZeRO-1 and 2 free them before the optimizer's step."""
    memory = of("sgd", Sharding(method=f"zero{stage}", num_devices=2), net=model().to(dtype))
    bucket_bytes = 500_000_000 * dtype.itemsize
    without_buckets = memory.parameters_bytes + memory.unsharded_bytes
    assert memory.resting_bytes - without_buckets == resting * bucket_bytes
    in_step = memory.parameters_bytes + memory.gradients_bytes
    assert memory.update_peak_bytes - in_step == in_update * bucket_bytes


def test_deepspeed_keeps_float32_masters() -> None:
    net = model().to(torch.bfloat16)
    sharding = Sharding(method="zero2", num_devices=2)
    count = sum(p.numel() for p in net.parameters())
    assert of("adamw", sharding, master_weights=True, net=net).optimizer_bytes == count * 12 // 2
