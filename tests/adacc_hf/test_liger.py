"""Rule R7 for liger-kernel, whose Triton kernels write where no dispatcher sees it: RMSNorm, RoPE, SwiGLU.

Triton reads TRITON_INTERPRET when it is first imported, so on the CPU the tests run in a process of their own, which
`test_under_the_interpreter` starts on this very file.
"""

import gc
import importlib.util
import os
import subprocess
import sys

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from adacc_hf import Policy, apply_policy
from adacc_hf.torch_glue.memory import measure_step

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is no requirement of ours: pip install it"
)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs under Triton's interpreter, in a process of its own")


@pytest.mark.skipif(INTERPRETED, reason="is the one that starts the process")
def test_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture(scope="module")
def liger():
    """The function that puts liger's kernels into a LLaMA, made fit for the interpreter of this release of Triton.

    The interpreter hands floats to kernels bare, where a compiled kernel is given scalars that can be cast, and has no
    libdevice. It moves tensors by operators of torch, where a compiled kernel runs none: dispatch modes must not see
    that. And it holds on to them in cycles of references, which would be measured as stored.
    """
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from liger_kernel.transformers.monkey_patch import apply_liger_kernel_to_llama
    from triton.runtime import interpreter

    convert, run = interpreter._implicit_cvt, interpreter.GridExecutor.__call__

    def with_floats(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    def unseen(executor, *args, **kwargs):
        with _disable_current_modes():
            run(executor, *args, **kwargs)
        gc.collect()

    gc.freeze()  # what is there now need not be looked through after each kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", with_floats)
        patch.setattr(interpreter.GridExecutor, "__call__", unseen)
        patch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
        yield apply_liger_kernel_to_llama


@pytest.fixture(scope="module")
def model(liger, tiny_llama):
    model = tiny_llama()
    liger(rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False, model=model)
    return model


@interpreted
def test_training_is_exact_and_stores_what_is_predicted(model, token_batch, assert_exact):
    """What a kernel fills is never replayed, nor what follows from it alone; what torch's operators make beside is."""
    batch = token_batch(1, 4)
    profile = assert_exact(model, batch, num_policies=1)
    (kind,) = profile.kinds
    recomputable = {value.name for value in kind.activations if value.saved and value.recomputable}
    attention = "self_attn:scaled_dot_product_flash_attention_for_cpu"
    linear = {"self_attn.v_proj:mm", "mlp.gate_proj:mm", "mlp.up_proj:mm"}  # q's and k's results are rotated in place
    assert recomputable == {*linear, attention, "block:add"}
    for action in ("retain", "recompute"):
        policy = Policy.uniform(profile, action)
        with apply_policy(model, policy):
            model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
            assert measure_step(model, batch).stored_bytes == policy.predicted_stored_bytes
