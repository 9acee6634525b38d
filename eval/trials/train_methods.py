"""The paper's five methods, as callbacks and settings of the Trainer."""

from typing import Any

from transformers import TrainerCallback

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.callbacks.adacc import AdaccCallback
from adacc_hf.kernels.codecs import baseline_codec
from adacc_hf.solve.baselines import quantize_everything
from adacc_hf.torch_glue.compat import CHECKPOINTING


def method_callbacks(method: str, memory_budget: str) -> tuple[list[TrainerCallback], dict[str, Any]]:
    """The callbacks of `method`, and the TrainingArguments that it changes.

    `memory_budget` is as given on the command line; only adacc and adacc_no_outlier heed it. Raises ValueError for an
    unknown method or an impossible budget.
    """
    budget = parse_budget(memory_budget)
    if method == "none":
        return [], {}
    if method == "full":
        return [], {CHECKPOINTING: True}
    if method == "quantization":
        config = AdaccConfig(actions=("retain", "compress"), codecs=(baseline_codec(),), tracking="off")
        return [AdaccCallback(config, policy=quantize_everything)], {}
    if method in ("adacc", "adacc_no_outlier"):
        return [AdaccCallback(AdaccConfig(memory_budget=budget, outliers=method == "adacc"))], {}
    raise ValueError(f"--method={method} is unknown; choose none, full, quantization, adacc or adacc_no_outlier")


def parse_budget(text: str) -> str | float | int:
    """The budget in AdaccConfig's terms: digits are bytes, a decimal is a fraction, all else stays text.

    Example: "0.5" is half of plain's activation bytes, "1" is one byte, "1.0" is all of them.
    """
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
