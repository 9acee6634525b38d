"""Low-rank optimizers, and their references, as methods for the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.compact import CompactFactory
from adacc_hf.eval.trials.isolation import CannotRunError
from adacc_hf.eval.trials.peer_methods import missing_package

ADACC_SHARE = 0.5
"""Adacc's budget in combination with CompAct, as a fraction of the bytes that a step stores."""
PLAIN_RATE, LOW_RANK_RATE = 3e-3, 1e-2
"""Learning rates of AdamW, and of methods that scale their step down (the value of all three papers)."""


@dataclass(frozen=True, kw_only=True)
class LowRankMethod:
    """Optimizer, with or without Adacc."""

    title: str
    rate: float = LOW_RANK_RATE
    transformers: str | None = None
    """Name of the optimizer in Transformers. None for AdamW."""
    options: Mapping[str, float | str] = field(default_factory=dict)
    """Transformers' `optim_args` other than the rank, or CompactFactory's settings."""
    part: float = 0.25
    """Rank, as a fraction of the layers' inputs."""
    is_compact: bool = False
    adacc_share: float | None = None
    package: str | None = None
    """Additional package that the method needs."""

    @property
    def callbacks(self) -> list[TrainerCallback]:
        if self.adacc_share is None:
            return []
        return [AdaccCallback(AdaccConfig(memory_budget=self.adacc_share, tracking="off"))]

    def check(self) -> None:
        """Raise CannotRunError if a package is missing."""
        if self.package is not None and (missing := missing_package(self.package)):
            raise CannotRunError(missing)

    def trainer(
        self,
        model: PreTrainedModel,
        folder: str,
        data: Dataset[Any] | None = None,
        held_out: Dataset[Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        **arguments: Any,
    ) -> Trainer:
        """Return a Trainer of `model` by this method, with the papers' settings."""
        self.check()
        settings: dict[str, Any] = {
            "learning_rate": self.rate,
            "weight_decay": 0.0,
            "report_to": "none",
            "disable_tqdm": True,
        }
        if self.transformers is not None:
            width = model.config.hidden_size
            options = {"rank": round(self.part * width), **self.options}
            settings |= {
                "optim": self.transformers,
                "optim_args": ", ".join(f"{name}={value}" for name, value in options.items()),
                # The choice of GaLore's authors: all linear layers of attention and MLP.
                "optim_target_modules": r".*(attn|attention|mlp|intermediate|output)\..*",
            }
        compact: Any = None  # a factory, which Trainer's type annotation does not include
        if self.is_compact:
            rate = arguments.get("learning_rate", self.rate)
            compact = CompactFactory, {"rank": self.part, "lr": rate, **self.options}
        return Trainer(
            model=model,
            args=TrainingArguments(output_dir=folder, **{**settings, **arguments}),
            train_dataset=data,
            eval_dataset=held_out,
            callbacks=[*self.callbacks, *(callbacks or [])],
            optimizer_cls_and_kwargs=compact,
        )


GALORE: dict[str, float | str] = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
APOLLO: dict[str, float | str] = {"update_proj_gap": 200, "scale": 1.0, "proj": "random", "scale_type": "channel"}


def _compact(part: float, **more: Any) -> LowRankMethod:
    return LowRankMethod(title=f"CompAct n/{round(1 / part)}", is_compact=True, part=part, **more)


METHODS = {
    "plain": LowRankMethod(title="AdamW", rate=PLAIN_RATE),
    "galore": LowRankMethod(title="GaLore n/4", transformers="galore_adamw", options=GALORE, package="galore_torch"),
    "galore_layerwise": LowRankMethod(
        title="GaLore n/4, layer-wise",
        transformers="galore_adamw_layerwise",
        options=GALORE,
        package="galore_torch",
    ),
    "apollo": LowRankMethod(title="APOLLO n/4", transformers="apollo_adamw", options=APOLLO, package="apollo_torch"),
    "compact_2": _compact(0.5),
    "compact_4": _compact(0.25),
    "compact_8": _compact(0.125),
    "compact_4_adacc": LowRankMethod(
        title="CompAct n/4 with Adacc", is_compact=True, part=0.25, adacc_share=ADACC_SHARE
    ),
}
"""Methods by their name in records. n is the width of the model, or for CompAct the width of a layer's inputs."""
