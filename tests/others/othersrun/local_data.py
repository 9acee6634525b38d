"""Local files in place of the hub's data sets that other packages' code loads."""

import os
from pathlib import Path
from typing import Any

SERVED = {
    ("ybelkada/english_quotes_copy", None): "quotes",
    ("nyu-mll/glue", "sst2"): "feelings",
    ("trl-internal-testing/zen", "standard_language_modeling"): "text",
    ("trl-internal-testing/zen", "standard_prompt_completion"): "answers",
    ("trl-internal-testing/zen", "standard_preference"): "preferences",
    ("trl-internal-testing/zen", "standard_unpaired_preference"): "judged",
    ("trl-internal-testing/zen", "standard_prompt_only"): "prompts",
    ("trl-internal-testing/zen", "conversational_language_modeling"): "chats",
    ("trl-internal-testing/zen", "conversational_preference"): "chat preferences",
    ("trl-internal-testing/zen", "conversational_prompt_only"): "chat prompts",
    ("trl-internal-testing/zen", "conversational_prompt_completion"): "chat answers",
}
"""Name in `tiny.DATA` by (name, configuration) on the hub."""


def folder_of(name: str) -> Path:
    return Path(os.environ["HF_HOME"]) / "data" / name


def serve() -> None:
    """Patch `datasets.load_dataset` to load the data sets in `SERVED` from local files."""
    import datasets

    load = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        local = SERVED.get((path, name))
        return load(path, name, *args, **kwargs) if local is None else load(str(folder_of(local)), *args, **kwargs)

    datasets.load_dataset = load_dataset
