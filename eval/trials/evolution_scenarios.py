"""What `adacc eval evolution` trains: text as it is, and outlier channels that come and go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GPT2Config, PretrainedConfig, PreTrainedModel

from adacc_hf.eval.trials.families import FAMILIES, Family, Size
from adacc_hf.eval.trials.workload import Workload

PLANTED_BIAS = 20.0

WIDE = 32
"""How much wider than the model the constructed case's MLPs are."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A case, and the budget in which it is trained."""

    family: Family
    budget: float
    """A fraction of what plain training stores."""
    planted: tuple[tuple[float, float], ...] = ()
    """From this share of the run on, this share of the channels of both norms' and c_fc's outputs are outliers."""
    zscore_threshold: float = 3.0
    """A tenth of the channels is the most that can lie 3 standard deviations above the mean, a fifth 2."""

    def model(self, workload: Workload, device: str, seed: int) -> PreTrainedModel:
        """The model in train mode; weights depend on the seed alone."""
        return self.family.model(workload.size, workload.attention, device, seed)

    def planted_from(self, steps: int) -> dict[int, float]:
        """The steps of a run of `steps` at which the outliers change, and the share of channels that are some then."""
        return {int(place * steps): share for place, share in self.planted}


def plant(model: PreTrainedModel, share: float) -> None:
    """Make this share of the channels outliers, and no others."""
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith((".ln_1.bias", ".ln_2.bias", ".mlp.c_fc.bias")):
                bias.zero_()[: int(share * len(bias))] = PLANTED_BIAS


def _wide_gpt2(size: Size) -> PretrainedConfig:
    """GPT-2 whose MLPs hold most of the memory: what ReLU leaves of them takes a product to be recomputed, not a
    glance."""
    config = FAMILIES["gpt2"].config(size)
    return GPT2Config(**config.to_diff_dict() | {"n_inner": WIDE * size.width, "activation_function": "relu"})


SCENARIOS = {
    "stdlib text": Scenario(family=FAMILIES["gpt2"], budget=0.2),
    # Within this budget the MLPs of all blocks can be compressed without outliers; with them some must be recomputed.
    "constructed": Scenario(
        family=Family(config=_wide_gpt2, auto_class=FAMILIES["gpt2"].auto_class),
        budget=0.183,
        planted=((0, 0.19), (0.05, 0.0), (0.35, 0.19), (0.6, 0.0)),
        zscore_threshold=2.0,
    ),
}
