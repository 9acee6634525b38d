"""Models and batches of trials are equal for equal settings, whatever the random generator's state."""

import argparse

import pytest
import torch

from adacc_hf.eval.trials.model_under_test import Subject, add_subject, first_sequences, subject_options


def parse(*argv: str) -> dict:
    parser = argparse.ArgumentParser()
    add_subject(parser)
    parser.set_defaults(device="cpu", seed=0)
    return subject_options(parser.parse_args(argv))


def test_tokens_default_to_the_context() -> None:
    assert parse()["tokens"] == 256
    assert parse("--preset", "gpt2-117m")["tokens"] == 1024
    assert parse("--preset", "demo-t5")["tokens"] == 1024
    assert parse("--tokens", "16")["tokens"] == 16


@pytest.mark.parametrize(
    ("argv", "message"),
    [(("--tokens", "257"), "257 is outside its range"), (("--preset", "./no-such"), "no-such is not a preset")],
    ids=["tokens", "preset"],
)
def test_what_cannot_be_is_refused(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*argv)


@pytest.mark.parametrize("preset", ["demo", "demo-llama", "demo-t5"])
def test_one_subject_is_one_model_and_batch(preset: str) -> None:
    subject = Subject(preset=preset, batch=2, tokens=8)
    torch.manual_seed(1)
    model, batch = subject.model(), subject.example()
    torch.manual_seed(2)
    again = subject.model()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(batch["input_ids"], subject.example()["input_ids"])
    assert batch["input_ids"].shape == (2, 8)
    assert not torch.equal(batch["input_ids"], Subject(preset=preset, batch=2, tokens=8, seed=1).example()["input_ids"])
    loss = subject.loss(model, first_sequences(batch, 1))
    assert loss.requires_grad
    assert loss.dtype == torch.float32


def test_bf16_is_autocast_over_float32_weights() -> None:
    subject = Subject(preset="demo-llama", batch=1, tokens=8, precision="bf16")
    model = subject.model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with subject.autocast():
        assert model(**subject.example()).logits.dtype == torch.bfloat16
