"""Chats of a jsonl file: the rows that TRL trains on, rows that are refused, and the demo's tokenizer and model."""

import json
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="the sft extra installs trl")

import torch
from chats import demo_model, demo_tokenizer, load_chats, strings_in
from datasets import Dataset

MESSAGES = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
ROWS = {
    "messages": {"messages": MESSAGES},
    "conversations": {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."}]},
    "chat completions": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    "completions": {"prompt": "One?", "completion": "Two."},
    "text": {"body": "One? Two."},
}


def jsonl(rows: list[object], path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_every_kind_are_loaded(kind: str, tmp_path: Path):
    rows = load_chats(jsonl([ROWS[kind]] * 3, tmp_path / "chats.jsonl"), "body")
    assert len(rows) == 3
    assert strings_in(rows[0]) == strings_in(ROWS[kind])


def test_the_tokenizer_marks_what_the_assistant_says(tmp_path: Path):
    chats = Dataset.from_list([{"messages": MESSAGES}] * 4)
    tokenizer = demo_tokenizer(chats, tmp_path)
    tokens = tokenizer.apply_chat_template(MESSAGES, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    said = [n for n, is_said in zip(tokens["input_ids"], tokens["assistant_masks"], strict=True) if is_said]
    assert tokenizer.decode(said) == f"Two.{tokenizer.eos_token}"
    prompt = tokenizer.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == f"user: One?{tokenizer.eos_token}assistant: "


def test_the_model_fits_its_tokenizer_and_comes_from_its_seed(tmp_path: Path):
    tokenizer = demo_tokenizer(Dataset.from_list([{"messages": MESSAGES}] * 4), tmp_path)
    models = [demo_model(tokenizer, 64, seed) for seed in (0, 0, 1)]
    assert models[0].config.vocab_size == len(tokenizer)
    assert models[0].config.max_position_embeddings == 64
    weights = [model.lm_head.weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
