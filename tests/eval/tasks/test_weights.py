"""A digest that changes with what a checkpoint computes, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from adacc_hf.eval.tasks.weights import weights_digest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "training_args.bin", "trainer_state.json"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_changes_with_the_model(name: str, checkpoint: Path) -> None:
    before = weights_digest(checkpoint)
    (checkpoint / name).write_bytes(b"other")
    assert weights_digest(checkpoint) != before


def test_stays_with_another_history(checkpoint: Path) -> None:
    before = weights_digest(checkpoint)
    for name in ("training_args.bin", "trainer_state.json", "cloze.jsonl"):
        (checkpoint / name).write_bytes(b"other")
    assert weights_digest(str(checkpoint)) == before


def test_a_hub_id_has_none() -> None:
    assert weights_digest("no-such/model") is None
