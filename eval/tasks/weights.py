"""Which weights a checkpoint folder holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "config.json", "tokenizer.json")
_READ_BYTES = 1 << 20


def weights_digest(model: str | Path) -> str | None:
    """SHA-256 over the weights, the configuration and the tokenizer of a folder; None for a hub id."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted({path for pattern in WEIGHT_FILES for path in folder.glob(pattern)}):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
