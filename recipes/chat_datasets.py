"""Training and evaluation data of a run: a data set of the hub or of a folder, a mixture, or the recipe's own chats."""

from pathlib import Path
from typing import Any

from chats import load_chats
from datasets import load_dataset
from trl import DatasetMixtureConfig, ScriptArguments, SFTConfig, get_dataset

DEMO_CHATS = str(Path(__file__).parent / "data" / "chats.jsonl")


def load_splits(
    chats: str | None, script: ScriptArguments, mixture: DatasetMixtureConfig, training: SFTConfig
) -> tuple[Any, Any]:
    """Load the training and the evaluation split of a chat dataset. The data come from `--chats`, or from `datasets` or
    `--dataset_name` as in `trl sft`, or by default from the demo's chats. The evaluation split is None if
    `--eval_strategy` is "no". Raises ValueError or OSError for an invalid setting, which the error names."""
    if chats and (script.dataset_name or mixture.datasets):
        raise ValueError(f"--chats={chats} cannot be combined with --dataset_name or datasets; leave out one of them")
    if mixture.datasets:
        splits = get_dataset(mixture)
    elif script.dataset_name:
        splits = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
    else:
        splits = {"train": load_chats(chats or DEMO_CHATS, training.dataset_text_field)}
    train = _dataset_split(splits, "--dataset_train_split", script.dataset_train_split)
    is_evaluated = training.eval_strategy != "no"
    return train, _dataset_split(splits, "--dataset_test_split", script.dataset_test_split) if is_evaluated else None


def _dataset_split(splits: Any, setting: str, name: str) -> Any:
    if name not in splits:
        raise ValueError(f"{setting}={name} is not a split of the data, which has {', '.join(splits)}")
    return splits[name]
