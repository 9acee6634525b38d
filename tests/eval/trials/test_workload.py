"""Models and batches for measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adacc_hf.eval.trials.workload import TEXT_BYTES, Workload, library_bytes


def test_model_depends_on_the_seed_alone(tiny: Workload) -> None:
    rng_state = torch.get_rng_state()
    weights = [tiny.model(seed=seed).transformer.wte.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), rng_state)


def test_model_is_what_was_asked_for(tiny: Workload) -> None:
    model = tiny.model()
    assert model.training
    assert (model.config.n_embd, model.config.n_layer, model.config._attn_implementation) == (32, 2, "sdpa")


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        ("gpt2", ["transformer.h"]),
        ("llama", ["model.layers"]),
        ("t5", ["encoder.block", "decoder.block"]),
        ("bert", ["bert.encoder.layer"]),
    ],
)
def test_every_family_trains(tiny: Workload, family: str, blocks: list[str]) -> None:
    workload = replace(tiny, family=family)
    model = workload.model()
    assert sum(len(model.get_submodule(path)) for path in blocks) == tiny.layers
    assert model.config.use_cache is False
    loss = model(**next(workload.batches())).loss
    assert 4 < loss.item() < 8  # a guess among 256 bytes has a loss of 5.5


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="family='gpt9' is unknown: choose from gpt2, llama, t5, bert"):
        Workload(width=32, layers=2, batch=4, tokens=128, family="gpt9")


def test_batches_are_stretches_of_the_text(tiny: Workload) -> None:
    batches = tiny.batches(seed=3)
    first, second = next(batches), next(batches)
    assert first["input_ids"].shape == first["labels"].shape == (4, 128)
    assert torch.equal(first["input_ids"], first["labels"])
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert torch.equal(first["input_ids"], next(tiny.batches(seed=3))["input_ids"])
    stretch = bytes(first["input_ids"][0].tolist())
    assert stretch in library_bytes().numpy().tobytes()


def test_text_is_long_enough() -> None:
    # The 200 steps of the gradient-error table draw 0.4 MiB from the text.
    assert 2**20 <= len(library_bytes()) <= TEXT_BYTES
