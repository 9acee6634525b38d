"""Micro-batches by bytes: their sizes, gradients of a step, samples that do not fit, and resumed runs."""

import random

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from adacc_hf import AdaccSession
from adacc_hf.adapt.byte_batches import PaddedSizes, num_labels
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.solve import batch_costs

BUDGET = 4 * 2**20


@pytest.fixture(autouse=True)
def slow_launches(monkeypatch):
    """Let micro-batches be as large as fits, whatever times are measured."""
    monkeypatch.setattr(batch_costs, "LAUNCHES", 10**9)


def llama(model_class=LlamaForCausalLM, **settings):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return model_class(LlamaConfig(vocab_size=64, pad_token_id=0, **sizes, **settings)).train()


def samples_of(step):
    """Return the 16 samples of a step. Their prompts, a third of each, are masked in the labels."""
    return make_samples(random.Random(step).choices(range(3, 41), k=16), step)


def make_samples(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, 64, (length,), generator=generator) for length in lengths]
    return [
        {"input_ids": row.tolist(), "labels": [-100] * (len(row) // 3) + row[len(row) // 3 :].tolist()} for row in ids
    ]


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name, value):
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded("labels", -100)}


def steps_of(session, num_steps, rows=None, collate_fn=collate, order=None, batch_size=4):
    """Yield the steps of a session on `num_steps` times 16 samples."""
    rows = rows or [row for step in range(num_steps) for row in samples_of(step)]
    yield from session.batches(DataLoader(rows, batch_size=16, collate_fn=collate_fn, sampler=order), batch_size)


def run(model, num_steps=8, folder=None, resume=None, memory_budget=BUDGET, batch_size=4, **settings):
    """Train `num_steps` steps. Return the gradients and sizes of each, and save a checkpoint after the sixth."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    session = AdaccSession(model, optimizer, memory_budget=memory_budget, exact=True, **settings)
    gradients, sizes = [], []
    rows = [row for step in range(num_steps) for row in samples_of(step)]
    begin = 0
    if resume is not None:
        session.load(resume)
        begin = session.num_steps
        model.load_state_dict(torch.load(resume / "weights.pt"))
    order = range(16 * begin, len(rows))
    for step in steps_of(session, num_steps, order=order, rows=rows, batch_size=batch_size):
        with session.step():
            for batch, weight in step:
                with session.micro_batch(batch):
                    (model(**batch).loss * weight).backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
        sizes.append([tuple(batch["input_ids"].shape) for batch, _ in step])
        if folder is not None and session.num_steps == 6:
            session.save(folder)
            torch.save(model.state_dict(), folder / "weights.pt")
    session.close()
    return gradients, sizes, session


def train(session, optimizer, steps):
    for step in steps:
        with session.step():
            for batch, weight in step:
                with session.micro_batch(batch):
                    (session.state.model(**batch).loss * weight).backward()
            optimizer.step()
            optimizer.zero_grad()


def assert_close(gradients, expected):
    for one, other in zip(gradients, expected, strict=True):
        scale = max(g.abs().max() for g in other)
        assert max((a - b).abs().max() for a, b in zip(one, other, strict=True)) <= 1e-6 * max(1.0, scale)


def whole_batches(model, num_steps=8):
    """Return the gradients of each step in one batch, without a session."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    gradients = []
    for step in range(num_steps):
        model(**collate(samples_of(step))).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def adapted():
    torch.manual_seed(0)
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # which PEFT initializes with zeros
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [llama, adapted])
def test_gradients_are_those_of_the_samples_in_one_batch(one_thread, make):
    gradients, sizes, _ = run(make())
    assert_close(gradients, whole_batches(make()))
    assert {sum(number for number, _ in step) for step in sizes} == {16}
    assert max(number for number, _ in sizes[-1]) > 4


def test_a_resumed_run_makes_the_same_micro_batches(one_thread, tmp_path):
    gradients, sizes, _ = run(llama(), num_steps=12, folder=tmp_path)
    resumed_gradients, resumed_sizes, _ = run(llama(), num_steps=12, resume=tmp_path)
    assert resumed_sizes == sizes[6:]
    assert_close(resumed_gradients, gradients[6:])


def test_micro_batches_grow_with_the_budget(one_thread):
    _, small, session = run(llama(), memory_budget=1_000_000)
    _, large, _ = run(llama(), memory_budget=8 * BUDGET)
    assert len(small[-1]) > len(large[-1])
    assert max(event.get("peak_bytes", 0) for event in session.history) <= 1_000_000


def test_a_model_and_a_loader_that_accelerate_prepared(one_thread):
    accelerator = Accelerator(cpu=True)
    rows = [row for step in range(8) for row in samples_of(step)]
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, 16, collate_fn=collate))
    session = AdaccSession(model, optimizer, memory_budget=BUDGET, exact=True)
    gradients, sizes = [], []
    for step in session.batches(loader, batch_size=4):
        with session.step():
            for batch, weight in step:
                with session.micro_batch(batch):
                    accelerator.backward(model(**batch).loss * weight)
            gradients.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        sizes.append([len(batch["input_ids"]) for batch, _ in step])
    session.close()
    assert_close(gradients, whole_batches(llama()))
    assert max(sizes[-1]) > 4


def test_single_samples_are_joined_once_pairs_are_predicted(one_thread):
    _, sizes, _ = run(llama(), num_steps=20, batch_size=1)
    assert len(sizes[0]) == 16
    assert len(sizes[-1]) <= 4


def test_a_sample_that_does_not_fit_alone_is_reported_before_its_step(one_thread, caplog):
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    rows = [row for step in range(8) for row in samples_of(step)] + make_samples((2000, *range(3, 18)))
    session = AdaccSession(model, optimizer, memory_budget=BUDGET, exact=True, on_over_budget="error")
    with pytest.raises(InfeasibleBudgetError, match=r"2000 input_ids does not fit .* fits has \d+") as error:
        train(session, optimizer, steps_of(session, 9, rows))
    assert session.num_steps == 8
    longest = int(str(error.value).partition("fits has ")[2].split()[0])
    assert 40 < longest < 2000


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"memory_budget": 0.5}, "limits no batch"), ({"policy": lambda profile: None}, "leave policy out")],
)
def test_settings_without_predictions_are_refused(settings, message):
    model = llama()
    session = AdaccSession(model, torch.optim.SGD(model.parameters(), lr=1e-2), **settings)
    with pytest.raises(ValueError, match=message):
        next(steps_of(session, 1))


def flattened(rows):
    return {"input_ids": torch.tensor([[token for row in rows for token in row["input_ids"]]])}


@pytest.mark.parametrize("collate_fn", [flattened, list], ids=["one row", "no mapping"])
def test_batches_that_are_not_padded_are_refused(collate_fn):
    model = llama()
    session = AdaccSession(model, torch.optim.SGD(model.parameters(), lr=1e-2), memory_budget=BUDGET)
    loader = DataLoader(samples_of(0), batch_size=16, collate_fn=collate_fn)
    with pytest.raises(ValueError, match="padding_free"):
        next(session.batches(loader, batch_size=4))
    assert loader.collate_fn is collate_fn


def test_samples_without_lengths_are_refused():
    with pytest.raises(TypeError, match="mappings with lists"):
        PaddedSizes().lengths(3)


class TestPaddedSizes:
    """Shapes of batches, learned from some of them."""

    def test_padding_to_a_multiple_is_learned(self):
        sizes = PaddedSizes()
        sizes.fields = ["input_ids"]
        for longest, padded in ((30, 32), (33, 40)):
            sizes.learn((longest,), (("input_ids", (4, padded)),))
        assert sizes.sample((41,)) == (("input_ids", (1, 48)),)

    def test_padding_to_one_length_is_learned(self):
        sizes = PaddedSizes()
        sizes.fields = ["input_ids"]
        for longest in (30, 120):
            sizes.learn((longest,), (("input_ids", (4, 500)), ("label", (4,))))
        assert sizes.sample((41,)) == (("input_ids", (1, 500)), ("label", (1,)))

    def test_tensors_follow_their_own_fields(self):
        sizes = PaddedSizes()
        assert sizes.lengths({"labels": [1, 2], "input_ids": [1, 2, 3]}) == (3, 2)
        sizes.learn((9, 4), (("attention_mask", (2, 9)), ("input_ids", (2, 9)), ("labels", (2, 4))))
        assert dict(sizes.sample((7, 6))) == {"attention_mask": (1, 7), "input_ids": (1, 7), "labels": (1, 6)}

    def test_other_lengths_are_refused(self):
        sizes = PaddedSizes()
        sizes.fields = ["input_ids"]
        sizes.learn((9,), (("input_ids", (2, 9)),))
        with pytest.raises(ValueError, match="17 as the length"):
            sizes.learn((9,), (("input_ids", (2, 17)),))


@pytest.mark.parametrize(
    ("model_class", "expected"), [(LlamaForCausalLM, 5), (LlamaForSequenceClassification, 2)], ids=["tokens", "samples"]
)
def test_labels_are_counted_as_the_loss_does(model_class, expected):
    model = llama(model_class)
    labels = torch.tensor([[1, 2, 3, 4], [1, 2, 3, -100]]) if expected == 5 else torch.tensor([1, 0])
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": labels}
    assert num_labels(batch, model) == expected
    assert num_labels({"input_ids": batch["input_ids"]}, model) == 2


def test_labels_of_an_encoder_decoder_are_not_shifted():
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    assert num_labels({"labels": torch.ones(2, 4, dtype=torch.long)}, T5ForConditionalGeneration(config)) == 8
