"""Zero-shot accuracy of a model by lm-eval's Python API."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from adacc_hf.eval.records.records import Figures

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM


def load_model(model: str, device: str, batch_size: int) -> HFLM:
    """Load a checkpoint folder or hub id, with its tokenizer and in its saved dtype, for lm-eval."""
    from lm_eval.models.huggingface import HFLM

    try:
        return HFLM(pretrained=model, device=device, batch_size=batch_size)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--model={model} could not be loaded with its tokenizer: {reason} Pass a folder with both"
        ) from error


def score(model: HFLM, task: ConfigurableTask, limit: int | None = None) -> Figures:
    """Return the scores on one task, or on its first `limit` rows. The result is deterministic.

    acc is the share of rows whose correct choice has the highest likelihood, or, for lambada, whose last word is the
    greedy prediction. acc_norm compares log-likelihoods per character (None without choices). perplexity is that of
    lambada's last words (None for other tasks, and if it is not finite).
    """
    import lm_eval

    name = task.config.task
    # Without lm-eval's bootstrap, which serves only perplexity and forks one process per core.
    answer = lm_eval.evaluate(
        model, {"tasks": {name: task}, "groups": {}}, limit=limit, bootstrap_iters=0, log_samples=False
    )
    figures, counts = answer["results"][name], answer["n-samples"][name]
    acc, perplexity = float(figures["acc,none"]), figures.get("perplexity,none")
    return {
        "acc": acc,
        "acc_stderr": accuracy_stderr(acc, counts["effective"]),
        "acc_norm": figures.get("acc_norm,none"),
        "perplexity": perplexity if perplexity is not None and math.isfinite(perplexity) else None,
        "num_samples": counts["effective"],
        "num_samples_original": counts["original"],
        "num_fewshot": answer["n-shot"][name],
        "version": answer["versions"][name],
    }


def accuracy_stderr(acc: float, num_samples: int) -> float | None:
    """Return the standard error of a share of `num_samples` rows, from the sample variance as in lm-eval. None for one.

    Example: 1 of 4 rows is right: the variance is 0.25 * 0.75 * 4/3 = 1/4, the standard error sqrt(1/4 / 4) = 1/4.
    """
    return math.sqrt(acc * (1 - acc) / (num_samples - 1)) if num_samples > 1 else None
