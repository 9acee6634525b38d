"""A small RoBERTa that learns to tell where passages are from, and is then tuned on others, in a process of its own."""

from __future__ import annotations

import re
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    TrainerCallback,
)

from adacc_hf.eval.records.records import Figures, Spread, to_json
from adacc_hf.eval.trials.clock import CLOCKS
from adacc_hf.eval.trials.isolation import CannotRunError
from adacc_hf.eval.trials.low_rank import LowRankMethod, StepPeak
from adacc_hf.eval.trials.peer_methods import missing_package
from adacc_hf.eval.trials.training import ByteSequences

PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")
"""Of the standard library: the classes of tuning."""
EARLIER = (
    "concurrent", "ctypes", "encodings", "http", "idlelib", "json", "logging", "sqlite3", "tkinter", "turtledemo",
    "urllib", "wsgiref",
)  # fmt: skip
"""The classes that the model was trained on before."""
HELD_OUT = 0.25
"""Share of each package's text, its end, that is for validation alone."""
WORDS, START, PADDING = 2048, 2048, 2049
"""Numbers of words by their hash, RoBERTa's first token, which it classifies by, and its padding."""
MEASURED_STEP = 20

GAP = 100
"""Steps between two subspaces."""
_COMPACT = partial(LowRankMethod, is_compact=True, rate=1e-3)
TUNINGS: dict[str, tuple[LowRankMethod, int | None]] = {
    "full": (LowRankMethod(title="AdamW", rate=1e-3), None),
    "lora": (LowRankMethod(title="LoRA r = 8", rate=3e-3, package="peft"), 8),
    "galore": (
        LowRankMethod(
            title="GaLore r = 4",
            rate=1e-3,
            transformers="galore_adamw",
            options={"update_proj_gap": GAP, "scale": 4.0, "proj_type": "std"},
            package="galore_torch",
        ),
        4,
    ),
    "compact_r4": (_COMPACT(title="CompAct r = 4", options={"update_proj_gap": GAP, "scale": 4.0}), 4),
    "compact_r8": (_COMPACT(title="CompAct r = 8", options={"update_proj_gap": GAP, "scale": 2.0}), 8),
}
"""By name, with the rank. Scales are those of the papers for these ranks."""


@dataclass(frozen=True, kw_only=True)
class TuningScale:
    """The model, how long it learns to tell the packages of EARLIER apart, and how long it is tuned."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    batch: int = 16
    tokens: int = 64
    pretraining_steps: int = 1500
    steps: int = 300
    eval_passages: int = 600

    def config(self, packages: Sequence[str]) -> RobertaConfig:
        """Of a model that tells `packages` apart."""
        return RobertaConfig(
            vocab_size=WORDS + 2,
            pad_token_id=PADDING,
            bos_token_id=START,
            eos_token_id=None,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            # RoBERTa counts positions from the padding's number on.
            max_position_embeddings=self.tokens + PADDING + 1,
            type_vocab_size=1,
            id2label=dict(enumerate(packages)),
        )


class Passages(Dataset[dict[str, Tensor]]):
    """Passages of `packages` in turn, each labelled with its package's number."""

    def __init__(self, packages: Sequence[str], tokens: int, count: int, seed: int, held_out: bool) -> None:
        self._sources = []
        for number, package in enumerate(packages):
            text = words_of(package)
            split = int(len(text) * (1.0 - HELD_OUT))
            part = text[split:] if held_out else text[:split]
            self._sources.append(ByteSequences(part, tokens - 1, -(-count // len(packages)), seed + number))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place, label = divmod(index, len(self._sources))
        words = self._sources[label][place]["input_ids"]
        return {"input_ids": torch.cat([torch.tensor([START]), words]), "labels": torch.tensor(label)}


def words_of(package: str) -> Tensor:
    """int16: the words and signs of all modules of a package, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"], package)
    text = b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))
    found = re.findall(rb"[A-Za-z]+|[^\sA-Za-z]", text)
    return torch.tensor([zlib.crc32(word) % WORDS for word in found], dtype=torch.int16)


def pretrain(scale: Figures, folder: str, seed: int, threads: int = 1) -> Figures:
    """Save a model that has learnt to tell the packages of EARLIER apart, and tell how well it does."""
    torch.set_num_threads(threads)
    what = TuningScale(**scale)
    torch.manual_seed(seed)
    model = RobertaForSequenceClassification(what.config(EARLIER))
    data = Passages(EARLIER, what.tokens, what.pretraining_steps * what.batch, seed, held_out=False)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = LowRankMethod(title="", rate=1e-3).trainer(
            model, scratch, data=data, **_arguments(what, seed, what.pretraining_steps)
        )
        trainer.train()
    model.roberta.save_pretrained(folder)
    return {"accuracy": accuracy(model, Passages(EARLIER, what.tokens, what.eval_passages, 7, held_out=True))}


class StepTimes(TrainerCallback):
    """The seconds of every step of a Trainer by a clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds: list[float] = []
        self._now, self._since = now, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(self._now() - self._since)


def tune(
    scale: Figures, method: str, rate: float, folder: str, seed: int, clock: str = "wall", threads: int = 1
) -> Figures:
    """Accuracy on held-out passages after tuning the model of `folder`, with the peak and the times of a step."""
    torch.set_num_threads(threads)
    what, (chosen, rank) = TuningScale(**scale), TUNINGS[method]
    chosen.check()
    torch.manual_seed(seed)
    model: Any = RobertaForSequenceClassification.from_pretrained(folder, config=what.config(PACKAGES))
    if method == "lora":
        assert rank is not None, "LoRA's is its own"
        model = _with_lora(model, rank)
    peak, times = StepPeak(MEASURED_STEP), StepTimes(CLOCKS[clock])
    data = Passages(PACKAGES, what.tokens, what.steps * what.batch, 100 * seed, held_out=False)
    arguments = {**_arguments(what, seed, what.steps), "learning_rate": rate}
    with tempfile.TemporaryDirectory() as scratch:
        trainer = chosen.trainer(model, scratch, rank=rank, data=data, callbacks=[times, peak], **arguments)
        trainer.train()
    # The step whose memory is counted takes longer, and so do the first ones.
    steady = times.seconds[MEASURED_STEP:] or times.seconds
    return to_json(
        {
            "accuracy": accuracy(model, Passages(PACKAGES, what.tokens, what.eval_passages, 7, held_out=True)),
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "peak_bytes": peak.peak_bytes,
            "step_ms": Spread.of([1e3 * seconds for seconds in steady]),
            "training_loss": trainer.state.log_history[-1]["train_loss"],
        }
    )


def _with_lora(model: PreTrainedModel, rank: int) -> Any:
    if missing := missing_package("peft"):
        raise CannotRunError(missing)
    from peft import LoraConfig, TaskType, get_peft_model

    targets = r".*encoder.*(query|key|value|dense)"
    return get_peft_model(
        model, LoraConfig(task_type=TaskType.SEQ_CLS, r=rank, lora_alpha=2 * rank, target_modules=targets)
    )


@torch.no_grad()
def accuracy(model: PreTrainedModel, passages: Passages) -> float:
    """The share of passages whose package the model names."""
    model.eval()
    right = 0
    for start in range(0, len(passages), 50):
        rows = [passages[place] for place in range(start, min(start + 50, len(passages)))]
        logits = model(input_ids=torch.stack([row["input_ids"] for row in rows])).logits
        right += int((logits.argmax(-1) == torch.stack([row["labels"] for row in rows])).sum())
    return right / len(passages)


def _arguments(scale: TuningScale, seed: int, steps: int) -> dict[str, Any]:
    return {
        "max_steps": steps,
        "per_device_train_batch_size": scale.batch,
        "lr_scheduler_type": "linear",
        "warmup_steps": steps // 10,
        "logging_steps": max(1, steps // 2),
        "save_strategy": "no",
        "seed": seed,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
