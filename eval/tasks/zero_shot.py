"""Zero-shot accuracy of a model by lm-eval's Python API, with typed results. The model's state is restored."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Scores of a model on one data set. Shares are fractions."""

    acc: float
    """Share of the rows whose correct choice has the highest likelihood. For lambada, share of the rows whose last word
    is the greedy prediction."""
    acc_stderr: float | None
    """Standard error of `acc`, or None for a single row."""
    acc_norm: float | None
    """Like `acc`, but choices are compared by log-likelihood per character. None for lambada, which has no choices."""
    perplexity: float | None
    """Perplexity of lambada's last words. None for other tasks, and if it is not finite (a diverged model)."""
    num_samples: int
    """Number of evaluated rows, at most the limit."""
    num_samples_original: int
    num_fewshot: int
    version: float
    """Version of lm-eval's task definition."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Model to evaluate: a checkpoint folder or hub id, or a model in memory with its tokenizer."""

    model: str | Path | PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    """Required with a model in memory, unused otherwise."""
    device: str = "cpu"
    """Device that a checkpoint is loaded to, in its saved dtype. A model in memory stays on its device."""
    batch_size: int = 8


@contextmanager
def language_model(source: ModelSource) -> Iterator[HFLM]:
    """Wrap the model for lm-eval, in eval mode. A model in memory gets its own modes back afterwards."""
    from lm_eval.models.huggingface import HFLM

    if not isinstance(source.model, PreTrainedModel):
        yield _load_model(source)
        return
    if source.tokenizer is None:
        raise ValueError("tokenizer=None: a model in memory needs its tokenizer; pass the one it was trained with")
    modes = {module: module.training for module in source.model.modules()}
    try:
        # A copy, because lm-eval sets a padding token if there is none.
        tokenizer = copy.deepcopy(source.tokenizer)
        yield HFLM(pretrained=source.model, tokenizer=tokenizer, batch_size=source.batch_size)
    finally:
        for module, training in modes.items():
            module.training = training


def _load_model(source: ModelSource) -> HFLM:
    from lm_eval.models.huggingface import HFLM

    try:
        return HFLM(pretrained=str(source.model), device=source.device, batch_size=source.batch_size)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--model={source.model} could not be loaded with its tokenizer: {reason} Pass a folder with both"
        ) from error


def score(model: HFLM, task: ConfigurableTask, limit: int | None = None) -> TaskScore:
    """Return the score on one task, or on its first `limit` rows. The result is deterministic."""
    import lm_eval

    name = task.config.task
    # Without lm-eval's bootstrap, which serves only perplexity and forks one process per core.
    answer = lm_eval.evaluate(
        model, {"tasks": {name: task}, "groups": {}}, limit=limit, bootstrap_iters=0, log_samples=False
    )
    return _task_score(name, answer)


def accuracy_stderr(acc: float, num_samples: int) -> float | None:
    """Return the standard error of a share of `num_samples` rows, from the sample variance as in lm-eval.

    Return None for one row.

    Example: 1 of 4 rows is right: the variance is 0.25 * 0.75 * 4/3 = 1/4, the standard error sqrt(1/4 / 4) = 1/4.
    """
    return math.sqrt(acc * (1 - acc) / (num_samples - 1)) if num_samples > 1 else None


def _task_score(name: str, answer: dict[str, Any]) -> TaskScore:
    figures, counts = answer["results"][name], answer["n-samples"][name]
    perplexity = figures.get("perplexity,none")
    return TaskScore(
        acc=float(figures["acc,none"]),
        acc_stderr=accuracy_stderr(float(figures["acc,none"]), counts["effective"]),
        acc_norm=figures.get("acc_norm,none"),
        perplexity=perplexity if perplexity is not None and math.isfinite(perplexity) else None,
        num_samples=counts["effective"],
        num_samples_original=counts["original"],
        num_fewshot=answer["n-shot"][name],
        version=answer["versions"][name],
    )
