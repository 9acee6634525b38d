"""Data named by the settings of `trl sft`, from a local folder, and the recipe's own chats."""

import json
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="the sft extra installs trl")

from chat_datasets import load_splits
from trl import DatasetMixtureConfig, ScriptArguments, SFTConfig

from adacc_hf.torch_glue.compat import CHECKPOINTING

ONE, TWO = {"text": "One two three."}, {"text": "Four five."}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a folder that `datasets` loads as three training rows and one test row."""
    folder = tmp_path / "data"  # tmp_path itself contains the cache of `datasets`
    folder.mkdir()
    for name, rows in (("train", [ONE] * 3), ("test", [TWO])):
        lines = (json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return str(folder)


def settings(evaluates: bool = False) -> SFTConfig:
    evaluation = "steps" if evaluates else "no"
    checkpointing = {CHECKPOINTING: False}  # TRL's default sets it by its older name, with a warning
    return SFTConfig("run", bf16=False, use_cpu=True, report_to="none", eval_strategy=evaluation, **checkpointing)


def test_a_streamed_data_set_has_no_length(folder: str):
    script = ScriptArguments(dataset_name=folder, dataset_streaming=True, dataset_train_split="test")
    train, _ = load_splits(None, script, DatasetMixtureConfig(), settings())
    assert list(train) == [TWO]
    assert not hasattr(train, "__len__")


def test_a_mixture_comes_before_the_dataset_name(folder: str):
    mixture = DatasetMixtureConfig(datasets=[{"path": folder}, {"path": folder, "split": "test"}])
    train, _ = load_splits(None, ScriptArguments(dataset_name="ignored"), mixture, settings())
    assert list(train) == [ONE] * 3 + [TWO]


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_unknown_split_is_named_with_those_that_exist(split: str, folder: str):
    script = ScriptArguments(dataset_name=folder, **{f"dataset_{split}_split": "half"})
    with pytest.raises(ValueError, match=rf"--dataset_{split}_split=half is not a split of .* has train, test"):
        load_splits(None, script, DatasetMixtureConfig(), settings(evaluates=True))
