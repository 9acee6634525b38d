"""Rule R7 for liger-kernel, whose Triton kernels write unseen by the dispatcher: RMSNorm, RoPE, SwiGLU.

Triton reads TRITON_INTERPRET when it is first imported, so on the CPU the tests run in a process of their own, which
`test_under_the_interpreter` starts on this file.
"""

import gc
import importlib.util
import os
import subprocess
import sys

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from adacc_hf import apply_policy
from adacc_hf.solve.simple_policies import uniform_policy
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
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-2000:]
    assert " passed" in process.stdout


@pytest.fixture(scope="module")
def liger():
    """The function that puts liger's kernels into a LLaMA, adapted to the interpreter of this release of Triton. The
    interpreter passes floats to kernels bare, where a compiled kernel gets scalars that can be cast, and has no
    libdevice. It moves tensors by torch operators, where a compiled kernel runs none, so dispatch modes must not see
    them. And reference cycles keep tensors alive, which would be measured as stored."""
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

    gc.freeze()  # existing objects need no search after each kernel

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
    batch = token_batch(1, 4)
    profile = assert_exact(model, batch, num_policies=1)
    (kind,) = profile.kinds
    functions = [operator.name.rpartition(".")[2] for operator in kind.operators if "liger" in operator.name]
    norm = "LigerRMSNormFunction"
    assert functions == [norm, "LigerRopeFunction", norm, "LigerSiLUMulFunction"]
    assert all(value.recomputable for value in kind.activations if value.producer is not None)
    for action in ("retain", "recompute"):
        policy = uniform_policy(profile, action)
        with apply_policy(model, policy):
            model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
            assert measure_step(model, batch).stored_bytes == policy.predicted_stored_bytes
