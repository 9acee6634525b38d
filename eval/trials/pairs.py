"""A bi-encoder, whose step calls its encoder twice: BERT on texts and on what goes on after them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from adacc_hf.eval.trials.families import FAMILIES, Size

SCALE = 20.0
"""By which similarities, at most 1, are spread: the usual inverse temperature of contrastive losses."""


class Pairs(nn.Module):
    """Tells which end belongs to which beginning, of the rows of a batch; two thirds of each row are its beginning."""

    def __init__(self, encoder: BertModel) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        """The `loss` of a batch [B, T]; labels, which other families need, are not read."""
        place = 2 * input_ids.shape[1] // 3
        parts = input_ids[:, :place], input_ids[:, place:]
        begins, ends = (F.normalize(self.encoder(input_ids=part).last_hidden_state.mean(1)) for part in parts)
        rows = torch.arange(len(begins), device=begins.device)
        return SimpleNamespace(loss=F.cross_entropy(begins @ ends.T * SCALE, rows))


class PairsFamily:
    """Makes bi-encoders as a `Family` makes its models."""

    def model(self, size: Size, attention: str, device: str = "cpu", seed: int = 0) -> Pairs:
        """The model in train mode, dropout on."""
        config = FAMILIES["bert"].config(size)
        assert isinstance(config, BertConfig)
        config._attn_implementation = attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder = BertModel(config, add_pooling_layer=False)
        return Pairs(encoder).to(device).train()
