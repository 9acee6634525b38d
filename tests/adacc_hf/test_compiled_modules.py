"""torch.compile next to, inside and around blocks: exact, or refused with an error message."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import _disable_current_modes

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import CompiledBlockError
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.tape.operator_effects import COMPILED
from adacc_hf.torch_glue.compat import GradientCheckpointingLayer
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=0)

# Dynamo looks at all inputs, non-leaf tensors included
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # torch 2.11 also traces hooks on saved tensors, and frees a reference that is only half constructed.
    pytest.mark.filterwarnings("ignore:.*StorageWeakRef.__del__:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()


def test_compiled_modules_beside_the_blocks(tiny_llama, token_batch, assert_exact):
    model = tiny_llama(layers=1)
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        module.compile(backend="aot_eager")
    assert_exact(model, token_batch(), num_policies=1)


def with_compiled_mlp(toy_model, backend, wrapped=True):
    """Return blocks with a compiled MLP: the MLP itself, or a module around it."""

    def setup(block):
        block.mlp = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU())
        if wrapped:
            block.mlp = torch.compile(block.mlp, backend=backend)
        else:
            block.mlp.compile(backend=backend)
        block.out = torch.nn.Linear(16, 8)

    return toy_model(lambda block, hidden: hidden + block.out(block.mlp(hidden)), setup=setup)


def test_a_compiled_module_inside_a_block(toy_model, toy_batch, assert_exact):
    profile = assert_exact(with_compiled_mlp(toy_model, "aot_eager"), toy_batch())
    assert all(kind.untrusted == COMPILED for kind in profile.kinds)
    assert all(kind.forward_ms > 0 for kind in profile.kinds)


def test_a_module_inside_a_block_that_compiles_itself(toy_model, toy_batch, assert_exact):
    assert_exact(with_compiled_mlp(toy_model, "aot_eager", wrapped=False), toy_batch())


def test_what_dynamo_alone_has_traced_is_seen_operator_by_operator(toy_model, toy_batch, assert_exact):
    profile = assert_exact(with_compiled_mlp(toy_model, "eager"), toy_batch())
    assert all(kind.untrusted is None for kind in profile.kinds)


def hidden_code(runs, graphs):
    """Return a backend whose code appears in no record, like Inductor's kernels. `runs` gets an item for every run of a
    forward, `graphs` one for every forward that is compiled."""

    def forward_compiler(module, _):
        graphs.append(None)

        def forward(*args):
            runs.append(None)
            with _disable_current_modes():
                return module(*args)

        return make_boxed_func(forward)

    return aot_autograd(fw_compiler=forward_compiler, bw_compiler=lambda module, _: make_boxed_func(module))


def test_what_is_compiled_stays_compiled(toy_model, toy_batch):
    runs, graphs = [], []
    model, batch = with_compiled_mlp(toy_model, hidden_code(runs, graphs)), toy_batch()
    profile = profile_model(model, batch, CONFIG)
    for action, times in (("retain", 1), ("recompute", 2)):
        with apply_policy(model, uniform_policy(profile, action), CONFIG):
            for step in range(3):
                runs.clear()
                model(**batch).loss.backward()
                assert len(runs) == times * len(model.layers), step
    assert len(graphs) == 1, "for both blocks, recorded or not"


@pytest.mark.parametrize("action", ["retain", "recompute"])
def test_what_compiled_code_saves_is_counted(toy_model, toy_batch, action):
    """Tensors that compiled code saves are counted. Torch's own objects of the compiling call are not."""
    model, batch = with_compiled_mlp(toy_model, hidden_code([], [])), toy_batch(64)
    policy = uniform_policy(profile_model(model, batch, CONFIG), action)
    with apply_policy(model, policy, CONFIG):
        steps = [measure_step(model, batch) for _ in range(3)]  # the first one too: nothing is recorded
    assert [step.stored_bytes for step in steps] == [policy.predicted_stored_bytes] * 3
    # All stored bytes of a retained block count from its start on (adacc_hf/price/measurement.py).
    assert all(step.peak_bytes <= policy.predicted_peak_bytes <= 1.1 * step.peak_bytes for step in steps)


def by_regions(model):
    """Compile each repeated block of the model, as accelerate's regional compilation does."""
    from accelerate.utils import compile_regions

    return compile_regions(model, backend="eager")


def whole_model(model):
    return torch.compile(model, backend="eager")


def in_place(model):
    model.model.layers[0].compile(backend="eager")
    return model


hooks_forward = pytest.mark.skipif(
    "__call__" in vars(GradientCheckpointingLayer), reason="this release hooks a block's call, around what is compiled"
)


@pytest.mark.parametrize("compiled", [by_regions, whole_model, pytest.param(in_place, marks=hooks_forward)])
def test_compiled_blocks_are_refused(tiny_llama, token_batch, compiled):
    model = compiled(tiny_llama(layers=1))
    with pytest.raises(
        CompiledBlockError, match=r"model\.layers\.\d.* runs inside a module that torch\.compile compiles"
    ):
        profile_model(model, token_batch(), CONFIG)


@hooks_forward
def test_blocks_that_are_compiled_later_are_refused(tiny_llama, token_batch):
    model, batch = tiny_llama(layers=1), token_batch()
    policy = uniform_policy(profile_model(model, batch, CONFIG), "recompute")
    with apply_policy(model, policy, CONFIG):
        model(**batch).loss.backward()
        in_place(model)
        with pytest.raises(CompiledBlockError, match=r"torch_compile=False.* torch_compile=True and Ada"):
            model(**batch)
        with torch.no_grad():
            model(**batch)
