"""One training run. The functions build model and data from the settings, train, evaluate, and save the results."""

import copy
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_arguments import RecipeArguments
from text_data import TextData, load_text_data, stack_sequences
from transformers import PreTrainedModel, Trainer, TrainingArguments, set_seed

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.artifacts.files import POLICY_FILE
from adacc_hf.callbacks.paper_methods import method_callbacks
from adacc_hf.compact import CompactFactory, parse_rank
from adacc_hf.estimate.model_presets import build_model, checked_seq_len, load_config
from adacc_hf.reports.report import policy_report

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Checked settings and prepared data of a run."""

    args: RecipeArguments
    data: TextData
    seq_len: int

    def fresh_model(self) -> PreTrainedModel:
        """Build an untrained model. All calls return equal weights, from the seed in the settings."""
        set_seed(self.args.training.seed)
        settings, tokenizer = self.args.model, self.data.tokenizer
        return build_model(
            settings.model,
            load_config(settings.model),
            len(tokenizer),
            tokenizer.eos_token_id,
            settings.attn_implementation,
            settings.from_pretrained,
        )


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """Result of a training run: the trained model with its metrics and callback, without the optimizer."""

    model: PreTrainedModel
    metrics: dict[str, float]
    callback: AdaccCallback | None
    """AdaccCallback of the run, which holds the policy. None for training methods without a policy, and for a run that
    ended before a policy was set."""
    checkpointed: bool
    """True if Transformers' own gradient checkpointing was enabled."""


def prepare_run(args: RecipeArguments) -> PreparedRun:
    """Check the settings, and prepare the data. Raises ValueError or OSError for an invalid setting, which the error
    names."""
    seq_len = checked_seq_len(args.data.seq_len, load_config(args.model.model))
    _check_method(args)
    has_policy = args.method.method not in ("none", "full", "compact")
    if has_policy and args.method.report and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--report needs matplotlib: pip install 'adacc-hf[plot]', or pass --report false")
    data = load_text_data(args.data, seq_len, args.training.main_process_first)
    return PreparedRun(args=args, data=data, seq_len=seq_len)


def _check_method(args: RecipeArguments) -> None:
    method, training = args.method, args.training
    if method.method != "compare":
        method_callbacks(method.method, method.memory_budget)
        compact_optimizer(method.method, method.compact_rank)
    elif training.world_size > 1:
        raise ValueError("--method=compare measures one process at a time; launch it with --num_processes 1")
    elif training.resume_from_checkpoint is not None:
        raise ValueError("--method=compare trains every method from the start; drop --resume_from_checkpoint")
    elif 0 < training.max_steps <= AdaccConfig().profile_steps:
        raise ValueError(
            f"--max_steps={training.max_steps} leaves --method=compare no steps to measure: profiling takes the first "
            f"{AdaccConfig().profile_steps} steps, so raise --max_steps"
        )


def compact_optimizer(method: str, rank: str, **settings: Any) -> tuple[type[CompactFactory], dict[str, Any]] | None:
    """Return the Trainer's `optimizer_cls_and_kwargs` for `method`, or None if the Trainer creates its own optimizer.
    Raises ValueError if `rank` is not a number."""
    if method not in ("compact", "adacc_compact"):
        return None
    try:
        return CompactFactory, {"rank": parse_rank(rank), **settings}
    except ValueError:
        raise ValueError(
            f"--compact_rank={rank} must be a fraction of a layer's inputs, such as 0.25, or a number of them"
        ) from None


def train_once(run: PreparedRun, method: str, memory_budget: str, output_dir: str) -> FinishedRun:
    """Train a new model with `method`, evaluate the model, and save the model, the metrics and the policy."""
    callbacks, overrides = method_callbacks(method, memory_budget)
    training = run.args.training
    compact = compact_optimizer(
        method, run.args.method.compact_rank, lr=training.learning_rate, weight_decay=training.weight_decay
    )
    trainer = Trainer(
        model=run.fresh_model(),
        args=_with_overrides(training, output_dir=output_dir, **overrides),
        data_collator=stack_sequences,
        train_dataset=run.data.train,
        eval_dataset=run.data.validation,
        processing_class=run.data.tokenizer,
        callbacks=callbacks,
        optimizer_cls_and_kwargs=compact,
    )
    train_metrics = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint).metrics
    results = {"steps": trainer.state.global_step, "final_train_loss": final_train_loss(trainer)}
    metrics = {**train_metrics, **trainer.evaluate(), **results}
    trainer.save_model()
    trainer.save_metrics("all", metrics)
    trainer.save_state()
    callback = callbacks[0] if callbacks else None
    if callback is not None and callback.policy is None:
        log.warning("training ended after %d steps, before a policy was set: raise --max_steps", results["steps"])
        callback = None
    if callback is not None and trainer.is_world_process_zero():
        callback.policy.save(Path(output_dir, POLICY_FILE))
    return FinishedRun(model=trainer.model, metrics=metrics, callback=callback, checkpointed=bool(overrides))


def save_report(finished: FinishedRun, folder: str, comparison: list[dict[str, Any]] | None = None) -> None:
    """Write report.md and report.html with the policy of `finished` into `folder`."""
    callback = finished.callback
    if callback.profile is None:
        log.warning("no report written: the checkpoint that this run resumed from has a policy but no profile")
        return
    policy_report(
        profile=callback.profile,
        policy=callback.policy,
        history=callback.history,
        comparison=comparison,
    ).save(folder)


def final_train_loss(trainer: Trainer) -> float:
    """Return the last logged training loss (a mean over `logging_steps` steps), or else the mean of all steps."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    summaries = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    return float((losses or summaries)[-1])


def _with_overrides(training: TrainingArguments, **overrides: Any) -> TrainingArguments:
    """Return a copy of `training` with some settings changed."""
    overridden = copy.copy(training)
    for name, value in overrides.items():
        setattr(overridden, name, value)
    return overridden
