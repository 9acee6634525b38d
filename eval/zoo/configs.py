"""Table of all checked architectures: tiny random configurations of Transformers' own model classes."""

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


def architectures() -> dict[str, Architecture]:
    """Return all architectures that the installed Transformers has, by name, in the table's order."""
    return {
        name: Architecture(
            name=name,
            family=family,
            model_class=model_class,
            config_class=getattr(transformers, model_class).config_class.__name__,
            settings=settings,
            batch=batch,
            block_classes=BLOCK_CLASSES.get(name),
        )
        for family, rows in {**TEXT, **MEDIA, **MULTIMODAL, **EXPERTS_AND_STATES}.items()
        for name, (model_class, settings, batch) in rows.items()
        if hasattr(transformers, model_class)
    }
