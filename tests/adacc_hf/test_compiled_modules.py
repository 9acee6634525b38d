"""torch.compile beside, inside and around blocks: exact, or refused in words."""

import pytest
import torch

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model
from adacc_hf.compat import GradientCheckpointingLayer
from adacc_hf.errors import CompiledBlockError

CONFIG = AdaccConfig(min_compress_bytes=0)

# dynamo looks at all inputs, and at what is no leaf too
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()


def test_compiled_modules_beside_the_blocks(tiny_llama, token_batch, assert_exact):
    model = tiny_llama(layers=1)
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        module.compile(backend="aot_eager")
    assert_exact(model, token_batch(), num_policies=1)


def test_a_compiled_module_inside_a_block(toy_model, toy_batch, assert_exact):
    """Its one autograd function saves what the compiler chose; what is inside is seen operator by operator."""

    def setup(block):
        block.mlp = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU()), backend="aot_eager")
        block.out = torch.nn.Linear(16, 8)

    assert_exact(toy_model(lambda block, hidden: hidden + block.out(block.mlp(hidden)), setup=setup), toy_batch())


def by_regions(model):
    """As accelerate compiles a model by regions: each of its repeated blocks."""
    from accelerate.utils import compile_regions

    return compile_regions(model, backend="eager")


def whole(model):
    return torch.compile(model, backend="eager")


def in_place(model):
    model.model.layers[0].compile(backend="eager")
    return model


hooks_forward = pytest.mark.skipif(
    "__call__" in vars(GradientCheckpointingLayer), reason="this release hooks a block's call, around what is compiled"
)


@pytest.mark.parametrize("compiled", [by_regions, whole, pytest.param(in_place, marks=hooks_forward)])
def test_compiled_blocks_are_refused(tiny_llama, token_batch, compiled):
    model = compiled(tiny_llama(layers=1))
    with pytest.raises(
        CompiledBlockError, match=r"model\.layers\.\d.* runs inside a module that torch\.compile compiles"
    ):
        profile_model(model, token_batch(), CONFIG)


@hooks_forward
def test_blocks_that_are_compiled_later_are_refused(tiny_llama, token_batch):
    """As a Trainer with `torch_compile=True` does, whose callbacks see the bare model."""
    model, batch = tiny_llama(layers=1), token_batch()
    policy = Policy.uniform(profile_model(model, batch, CONFIG), "recompute")
    with apply_policy(model, policy, CONFIG):
        model(**batch).loss.backward()
        in_place(model)
        with pytest.raises(CompiledBlockError, match="torch_compile=False"):
            model(**batch)
        with torch.no_grad():
            model(**batch)
