"""The paper's five methods and CompAct, as callbacks and settings of the Trainer."""

from typing import Any

from transformers import TrainerCallback

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.callbacks.adacc import AdaccCallback
from adacc_hf.compact import CompactFactory, parse_rank
from adacc_hf.kernels.codecs import baseline_codec
from adacc_hf.solve.baselines import quantize_everything
from adacc_hf.torch_glue.compat import CHECKPOINTING


def method_callbacks(method: str, memory_budget: str) -> tuple[list[TrainerCallback], dict[str, Any]]:
    """The callbacks of `method`, and the TrainingArguments that it changes.

    `memory_budget` is as given on the command line; only the adacc methods heed it. CompAct's optimizer comes besides.
    Raises ValueError for an unknown method or an impossible budget.
    """
    budget = parse_budget(memory_budget)
    if method in ("none", "compact"):
        return [], {}
    if method == "full":
        return [], {CHECKPOINTING: True}
    if method == "quantization":
        config = AdaccConfig(actions=("retain", "compress"), codecs=(baseline_codec(),), tracking="off")
        return [AdaccCallback(config, policy=quantize_everything)], {}
    if method in ("adacc", "adacc_no_outlier", "adacc_compact"):
        return [AdaccCallback(AdaccConfig(memory_budget=budget, outliers=method != "adacc_no_outlier"))], {}
    raise ValueError(
        f"--method={method} is unknown; choose none, full, quantization, adacc, adacc_no_outlier, compact or "
        f"adacc_compact"
    )


def compact_optimizer(method: str, rank: str, **settings: Any) -> tuple[type[CompactFactory], dict[str, Any]] | None:
    """What the Trainer takes as `optimizer_cls_and_kwargs` for `method`; None where it makes its own optimizer.

    Raises ValueError for a rank in no known form.
    """
    if method not in ("compact", "adacc_compact"):
        return None
    try:
        return CompactFactory, {"rank": parse_rank(rank), **settings}
    except ValueError:
        raise ValueError(
            f"--compact_rank={rank} must be a part of a layer's inputs, such as 0.25, or their number"
        ) from None


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
