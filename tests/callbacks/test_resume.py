"""A run resumes in another set-up: it trains as plain training does there, and each step keeps to the budget in bytes.

The cases are the rows of docs/howto/resume.md, and variants. This file is also the script that two ranks run.
"""

from __future__ import annotations

import logging
import shutil
import sys
import weakref
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from run_builders import Lengths
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_builders import Run, tiny_model, tiny_trainer, write_rank_results
from transformers import TrainerCallback

from adacc_hf import AdaccCallback, Policy
from adacc_hf.artifacts.files import POLICY_FILE, PROFILE_FILE, STATE_FILE

EXACT = {"exact": True}
ANEW = "solving again"


class LiveBytes(TorchDispatchMode):
    """Count of the bytes of live storages, which uses nothing of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.nbytes = self.peak_bytes = 0

    def count(self, values: Any) -> None:
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)):
            if storage.device.type != "meta" and storage._cdata not in self.live:  # fake tensors have no memory
                self.live[storage._cdata] = storage.nbytes()
                self.nbytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.nbytes)
                weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.nbytes -= self.live.pop(key)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.count(result)
        return result


class StepPeaks(TrainerCallback):
    """Callback with the peak of live bytes in each step of a run within `with callback.live`."""

    def __init__(self) -> None:
        self.live, self.peaks = LiveBytes(), []

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.live.count([*(p.data for p in model.parameters()), *(dict(values) for values in optimizer.state.values())])

    def on_step_begin(self, *args, **kwargs):
        self.live.peak_bytes = self.live.nbytes

    def on_step_end(self, *args, **kwargs):
        self.peaks.append(self.live.peak_bytes)


def without(*names: str) -> Any:
    return lambda folder: [(folder / name).unlink() for name in names]


def replacing(old: str, new: str) -> Any:
    """Return a function that replaces a part of the state in a checkpoint."""

    def replace(folder: Path) -> None:
        text = (folder / STATE_FILE).read_text()
        assert old in text
        (folder / STATE_FILE).write_text(text.replace(old, new))

    return replace


@dataclass
class Case:
    """What differs between the run that saved a checkpoint and the run that resumes."""

    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 32
    share: float = 1.0  # budget of the resumed run, divided by the budget of the run that saved
    saved_under: dict[str, Any] = field(default_factory=dict)  # settings of the callback that saved, and `bf16`
    change: Any = None  # function that changes the folder of the checkpoint
    line: str = ""  # part of the line that says what is not used
    keeps: bool = False  # True if the policy of the checkpoint stays


CASES = {
    "same": Case(keeps=True),
    "other batch": Case({"per_device_train_batch_size": 6}),
    "accumulation": Case({"gradient_accumulation_steps": 3}),
    "precision": Case({"bf16": True}),
    "precision back": Case(saved_under={"bf16": True}),
    "attention": Case(model={"attn_implementation": "eager"}),
    "dropout": Case(model={"attn_pdrop": 0.0, "resid_pdrop": 0.0}),
    "lengths": Case(num_tokens=48),
    "budget": Case(share=0.9, line="was saved under memory_budget="),
    "actions": Case(saved_under={"exact": False, "actions": ("retain", "compress")}, line=f"exact=True: {ANEW}"),
    "missing": Case(change=without(STATE_FILE), line=f"{STATE_FILE} is missing"),
    "missing profile": Case(change=without(PROFILE_FILE), keeps=True),
    "missing policy": Case(change=without(POLICY_FILE), keeps=True),
    "plain checkpoint": Case(change=without(STATE_FILE, POLICY_FILE, PROFILE_FILE)),
    "damaged": Case(change=replacing('"policies": [', '"policies": 5, "others": ['), line=f"is not used: {ANEW}"),
    "other blocks": Case(change=replacing("transformer.h.3", "transformer.h.9")),
    "other release": Case(change=replacing('{"version": ', '{"version": 1'), line="has format version 1"),
}


def train(folder: Path, case: Case, callbacks: list[Any], resume: Path | None = None) -> tuple[Run, list[int]]:
    """Return a run and the peaks of its steps."""
    peaks, settings = StepPeaks(), {"save_strategy": "steps", "save_steps": 3, "max_steps": 7, **case.settings}
    model = tiny_model(n_layer=4, n_positions=64, **case.model)
    trainer = tiny_trainer(folder, [*callbacks, peaks], model=model, **settings)
    trainer.train_dataset = Lengths([case.num_tokens] * 28)
    with peaks.live:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return Run(trainer, trainer.state.log_history), peaks.peaks


@pytest.fixture(scope="module")
def budget(tmp_path_factory) -> int:
    """Return 80 % of the peak of plain training."""
    return int(0.8 * max(train(tmp_path_factory.mktemp("plain"), Case(), [])[1]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, budget):
    """Return `saved(bf16=False, **settings)`, a checkpoint of step 3 under these settings."""

    @cache
    def checkpoint(bf16: bool = False, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        train(folder, Case({"bf16": bf16}), [AdaccCallback(memory_budget=budget, **EXACT | settings)])
        return folder / "checkpoint-3"

    return checkpoint


def resumed(folder: Path, case: Case, checkpoint: Path, budget: int) -> tuple[AdaccCallback, list[list[int]]]:
    """Return the callback of a resumed run, which must equal plain training, and the peaks of both."""
    callback = AdaccCallback(memory_budget=budget, **EXACT)
    run, peaks = train(folder / "adacc", case, [callback], checkpoint)
    plain, plain_peaks = train(folder / "plain", case, [], checkpoint)
    run.assert_equals(plain)
    return callback, [peaks, plain_peaks]


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumes_in_another_set_up(saved, budget, tmp_path, caplog, name):
    case = CASES[name]
    checkpoint = Path(shutil.copytree(saved(**case.saved_under), tmp_path / "checkpoint-3"))
    policy, allowed = Policy.load(checkpoint / POLICY_FILE), int(case.share * budget)
    if case.change is not None:
        case.change(checkpoint)
    with caplog.at_level(logging.INFO):
        callback, (peaks, plain_peaks) = resumed(tmp_path, case, checkpoint, allowed)
    assert len(peaks) == 4
    assert max(peaks) <= allowed < max(plain_peaks)
    lines = [record for record in caplog.records if ANEW in record.getMessage() or "missing:" in record.getMessage()]
    assert [case.line in line.getMessage() for line in lines] == [True] * bool(case.line)
    assert all(line.name == "adacc_hf.progress" for line in lines), "a logger that is visible by default"
    assert callback.policy.plans == policy.plans or not case.keeps


def test_a_run_resumes_on_two_ranks_and_on_one_again(saved, budget, run_two_ranks, tmp_path):
    ranks = run_two_ranks(__file__, str(saved()), str(budget))
    _, one = resumed(tmp_path / "one", Case({"max_steps": 9}), tmp_path / "adacc" / "checkpoint-6", budget)
    for peaks, plain_peaks in (*ranks, one):
        assert max(peaks) <= budget < max(plain_peaks)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_rank_results(Path(sys.argv[1]), resumed(Path(sys.argv[1]), Case(), Path(sys.argv[2]), int(sys.argv[3]))[1])
