"""Zero-shot accuracy of a model by lm-eval's Python API: a typed answer, and a model that is left as it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
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
    """What a model reaches on one data set; shares are fractions."""

    acc: float
    """Share of the rows whose right choice is the likeliest; for lambada, whose last word is greedily predicted."""
    acc_stderr: float | None
    """Standard error of `acc`; None for a single row."""
    acc_norm: float | None
    """As `acc`, by log-likelihood per character; None for lambada, which has no choices."""
    perplexity: float | None
    """Of lambada's last words; None for the others, and where it is not finite (a model that diverged)."""
    num_samples: int
    """Rows that were evaluated: under a limit, fewer than there are."""
    num_samples_original: int
    num_fewshot: int
    version: float
    """Of lm-eval's definition of the task."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model to evaluate: a checkpoint folder or hub id, or a model in memory with its tokenizer."""

    model: str | Path | PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    """Needed with a model in memory, and only there."""
    device: str = "cpu"
    """Where a checkpoint is loaded to, in the dtype that it was saved in; a model in memory stays where it is."""
    batch_size: int = 8


def evaluate(
    source: ModelSource, tasks: Mapping[str, ConfigurableTask], limit: int | None = None
) -> dict[str, TaskScore]:
    """The scores on all tasks, those of `lm_eval_tasks.load_tasks` say."""
    with language_model(source) as model:
        return {name: score(model, task, limit) for name, task in tasks.items()}


@contextmanager
def language_model(source: ModelSource) -> Iterator[HFLM]:
    """The model as lm-eval takes it, in eval mode; one in memory is back in its own mode afterwards."""
    from lm_eval.models.huggingface import HFLM

    if not isinstance(source.model, PreTrainedModel):
        yield _loaded(source)
        return
    if source.tokenizer is None:
        raise ValueError("tokenizer=None: a model in memory needs its tokenizer; pass the one it was trained with")
    modes = {module: module.training for module in source.model.modules()}
    try:
        # A copy, because a padding token is chosen where there is none.
        tokenizer = copy.deepcopy(source.tokenizer)
        yield HFLM(pretrained=source.model, tokenizer=tokenizer, batch_size=source.batch_size)
    finally:
        for module, training in modes.items():
            module.training = training


def _loaded(source: ModelSource) -> HFLM:
    from lm_eval.models.huggingface import HFLM

    try:
        return HFLM(pretrained=str(source.model), device=source.device, batch_size=source.batch_size)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--model={source.model} could not be loaded with its tokenizer: {reason} Name a folder with both"
        ) from error


def score(model: HFLM, task: ConfigurableTask, limit: int | None = None) -> TaskScore:
    """The score on one task, or on its first `limit` rows; nothing in it is random."""
    import lm_eval

    name = task.config.task
    # Without its bootstrap: that is for perplexity only, and forks one process per core.
    answer = lm_eval.evaluate(
        model, {"tasks": {name: task}, "groups": {}}, limit=limit, bootstrap_iters=0, log_samples=False
    )
    return _task_score(name, answer)


def accuracy_stderr(acc: float, num_samples: int) -> float | None:
    """The standard error of a share of `num_samples` rows, from the sample's variance as lm-eval's own; None for one.

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
