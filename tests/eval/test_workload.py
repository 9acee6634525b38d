"""Models and batches to measure on."""

from __future__ import annotations

import torch

from adacc_hf.eval.workload import TEXT_BYTES, Workload, library_bytes


def test_model_depends_on_the_seed_alone(tiny: Workload) -> None:
    before = torch.get_rng_state()
    weights = [tiny.model(seed=seed).transformer.wte.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_model_is_what_was_asked_for(tiny: Workload) -> None:
    model = tiny.model()
    assert model.training
    assert (model.config.n_embd, model.config.n_layer, model.config._attn_implementation) == (32, 2, "sdpa")


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
    # The 200 steps of the gradient-error table draw 0.4 MiB from it.
    assert 2**20 <= len(library_bytes()) <= TEXT_BYTES
