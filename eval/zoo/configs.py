"""The architectures that are checked, as one table: tiny random configurations of Transformers' own model classes."""

from __future__ import annotations

import transformers

from adacc_hf.eval.zoo.architecture import Architecture
from adacc_hf.eval.zoo.experts import EXPERTS_AND_STATES
from adacc_hf.eval.zoo.language import MULTIMODAL
from adacc_hf.eval.zoo.media import MEDIA
from adacc_hf.eval.zoo.text import TEXT

BLOCK_CLASSES = {
    "albert": ("AlbertLayer",),
    "mllama": ("MllamaVisionEncoderLayer", "MllamaSelfAttentionDecoderLayer", "MllamaCrossAttentionDecoderLayer"),
}


def _config_class(model_class: str) -> str:
    """The configuration of a model class, as Transformers names it on the class itself."""
    return getattr(transformers, model_class).config_class.__name__


def architectures() -> dict[str, Architecture]:
    """Every architecture of the table, by name, in the table's order."""
    return {
        name: Architecture(
            name=name,
            family=family,
            model_class=model_class,
            config_class=_config_class(model_class),
            settings=settings,
            batch=batch,
            block_classes=BLOCK_CLASSES.get(name),
        )
        for family, rows in {**TEXT, **MEDIA, **MULTIMODAL, **EXPERTS_AND_STATES}.items()
        for name, (model_class, settings, batch) in rows.items()
    }
