"""Every private name of torch and Transformers in use exists in the installed releases."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize

from adacc_hf.compiler import functorch
from adacc_hf.torch_glue import compat, private

# Inductor's import requires this.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
RELEASES = f"torch {torch.__version__} and Transformers {transformers.__version__}"


@pytest.fixture(scope="module")
def owners(tiny_gpt2) -> dict[str, Any]:
    """An object of each class in `ATTRIBUTES`, or a stand-in."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._flat_param import FlatParameter
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.tensor import DTensor

    leaf = torch.ones(2, requires_grad=True)
    model = tiny_gpt2()
    compat.switch_checkpointing(model, True)
    call = torch.compile(torch.sin, backend="aot_eager")(leaf).grad_fn
    return {
        "BaseTunerLayer": BaseTunerLayer,
        "CheckpointWrapper": checkpoint_wrapper(nn.Identity()),
        "CompiledFunction": getattr(call, "_forward_cls", None),
        "CompiledFunctionBackward": call,
        "DTensor": DTensor,
        "FlatParameter": SimpleNamespace(**FlatParameter.__annotations__),  # FSDP sets them on each
        "FSDPModule": FSDPModule,
        "FSDPState": FSDPState(),
        "Function": torch.autograd.Function,
        "GradientCheckpointingLayer": model.transformer.h[0],
        "Module": nn.Identity(),
        "Node": leaf.sin().grad_fn,
        "OpOverload": torch.ops.aten.add.Tensor,
        "OptimizedModule": torch.compile(nn.Identity()),
        "PreTrainedModel": model,
        "PretrainedConfig": model.config,
        "ProcessGroup": torch.distributed.ProcessGroup,
        "Tensor": leaf,
        "UntypedStorage": leaf.untyped_storage(),
        "disabled function": torch.compiler.disable(lambda: None),
        "torch.autograd.profiler": torch.autograd.profiler,
        "torch.nn.utils.parametrize": parametrize,
        "torch.ops.aten": torch.ops.aten,
    }


def missing_attributes(owners: dict[str, Any]) -> list[str]:
    return [f"{owner}.{name}" for owner, name in private.ATTRIBUTES if not hasattr(owners[owner], name)]


def test_objects_have_the_attributes(owners):
    assert missing_attributes(owners) == [], f"gone from {RELEASES}"


def is_there(name: str) -> bool:
    """Return True if `name`, of a module or of an object in one, can be resolved."""
    parts = name.split(".")
    obj = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], start=2):
        if not hasattr(obj, part):
            try:
                importlib.import_module(".".join(parts[:place]))
            except ImportError:
                return False
        obj = getattr(obj, part)
    return True


@pytest.mark.parametrize("module", [private, functorch])
def test_modules_have_the_functions(module, private_uses):
    uses = private_uses(Path(module.__file__))
    assert uses
    missing = [f"{Path(module.__file__).name}:{line}: {name}" for line, name in uses if not is_there(name)]
    assert missing == [], f"gone from {RELEASES}"


class Shifted(nn.Module):
    """Parametrization whose `right_inverse`, if `is_inverse`, makes a new tensor."""

    def __init__(self, is_inverse: bool) -> None:
        super().__init__()
        if is_inverse:
            self.right_inverse = lambda weight: weight - 1

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 1


@pytest.mark.parametrize("is_inverse", [False, True])
def test_only_a_parametrization_that_changes_a_parameter_writes_to_the_parameter(is_inverse):
    layer = nn.Linear(2, 2)
    before, version = layer.weight.detach().clone(), private.version_of(layer.weight)
    with private.unwritten_originals():
        parametrize.register_parametrization(layer, "weight", Shifted(is_inverse))
    original = layer.parametrizations.weight.original
    assert (private.version_of(original) > version) is is_inverse
    assert torch.equal(original, before - int(is_inverse))
