"""Training methods that the Adacc paper compares (checkpointing, quantization, Adacc), as settings of the Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import TrainerCallback

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.callbacks.adacc import AdaccCallback
from adacc_hf.kernels.codecs import BASELINE
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.compat import CHECKPOINTING


def method_callbacks(method: str, memory_budget: str) -> tuple[list[TrainerCallback], dict[str, Any]]:
    """Return (callbacks, changed TrainingArguments) for training by `method`, a name from the command line.
    `memory_budget` is the text from the command line. Only the methods that train with Adacc use this budget. CompAct's
    optimizer is not included. Raises ValueError for an unknown method or an invalid budget."""
    if method in ("none", "compact"):
        return [], {}
    if method == "full":
        return [], {CHECKPOINTING: True}
    if method == "quantization":
        config = AdaccConfig(actions=("retain", "compress"), codecs=(BASELINE,), tracking="off")
        return [AdaccCallback(config, policy=partial(uniform_policy, action="compress", codec=BASELINE))], {}
    if method in ("adacc", "adacc_no_outlier", "adacc_compact"):
        return [AdaccCallback(AdaccConfig(memory_budget=memory_budget, outliers=method != "adacc_no_outlier"))], {}
    raise ValueError(
        f"--method={method} is unknown; choose none, full, quantization, adacc, adacc_no_outlier, compact or "
        f"adacc_compact"
    )
