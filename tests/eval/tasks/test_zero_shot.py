"""lm-eval's answers, compared with scores computed by hand and with log-likelihoods computed without lm-eval."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from adacc_hf.eval.tasks.lm_eval_tasks import PAPER_TASKS, load_tasks
from adacc_hf.eval.tasks.zero_shot import accuracy_stderr, score

Question = tuple[str, list[str], int]
"""Context that the model reads, the possible continuations, and the index of the correct one."""

# Counted with the numbers in the comments of the rows: the choice with the fewest unexpected letters wins, and the
# first of equal ones. Of "a" and "abcdefgh" the shorter one wins, because an expected letter is not certain either.
BY_HAND = {"lambada_openai": 2 / 4, "arc_easy": 2 / 3, "sciq": 1 / 2, "swag": 3 / 4}


def questions(name: str, rows: list[dict[str, Any]]) -> list[Question]:
    """Return the rows as questions, following the prompts in lm-eval's documentation of the tasks."""
    if name == "arc_easy":
        return [
            (f"Question: {r['question']}\nAnswer:", r["choices"]["text"], r["choices"]["label"].index(r["answerKey"]))
            for r in rows
        ]
    if name == "sciq":
        columns = ("distractor1", "distractor2", "distractor3", "correct_answer")
        return [
            (f"{r['support'].lstrip()}\nQuestion: {r['question']}\nAnswer:", [r[column] for column in columns], 3)
            for r in rows
        ]
    return [(r["startphrase"], [r[f"ending{place}"] for place in range(4)], r["label"]) for r in rows]


def best_choices(loglikelihood: Any, question_list: list[Question], per_character: bool) -> float:
    """Return the share of questions whose correct choice is the likeliest."""
    right = 0
    for context, choices, gold in question_list:
        values = [loglikelihood(context, f" {choice}") for choice in choices]
        if per_character:
            values = [value / len(choice) for value, choice in zip(values, choices, strict=True)]
        right += values.index(max(values)) == gold
    return right / len(question_list)


def scores(model: Any, tokenizer: Any, data_dir: Path, limit: int | None = None) -> dict[str, dict[str, Any]]:
    from lm_eval.models.huggingface import HFLM

    loaded = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3)
    return {name: score(loaded, task, limit) for name, task in load_tasks(PAPER_TASKS, data_dir).items()}


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_accuracy_is_the_one_worked_out_by_hand(name, alphabet_model, byte_tokenizer, data_dir, rows):
    result = scores(alphabet_model, byte_tokenizer, data_dir)[name]
    (own_rows,) = (lines for key, lines in rows.items() if key.startswith(name))
    num = len(own_rows)
    assert result["acc"] == BY_HAND[name]
    counts = [result[key] for key in ("num_samples", "num_samples_original", "num_fewshot", "version")]
    assert counts == [num, num, 0, 1.0]
    if name == "lambada_openai":
        words = [row["text"].rpartition(" ") for row in own_rows]
        total = sum(alphabet_model.loglikelihood(context, f" {word}") for context, _, word in words)
        # The tolerance is that of a float32 log-softmax over about ten letters, each about 1e-7 relative.
        assert result["perplexity"] == pytest.approx(math.exp(-total / num), rel=1e-5)
        assert result["acc_norm"] is None
    else:
        question_list = questions(name, own_rows)
        assert best_choices(alphabet_model.loglikelihood, question_list, per_character=False) == result["acc"]
        assert best_choices(alphabet_model.loglikelihood, question_list, per_character=True) == result["acc_norm"]
        assert result["perplexity"] is None


def test_a_model_that_diverged_has_no_perplexity(alphabet_model, byte_tokenizer, data_dir):
    with torch.no_grad():
        alphabet_model.logits.fill_(math.nan)
    result = scores(alphabet_model, byte_tokenizer, data_dir)
    assert result["lambada_openai"]["perplexity"] is None
    assert result["sciq"]["acc"] == 0.0  # the first choice wins, and the last one is correct


@pytest.mark.parametrize(("num_right", "num"), [(0, 5), (1, 4), (3, 7), (5, 5)])
def test_standard_error_is_lm_evals(num_right: int, num: int) -> None:
    from lm_eval.api.metrics import mean_stderr

    expected = mean_stderr([1] * num_right + [0] * (num - num_right))
    assert accuracy_stderr(num_right / num, num) == pytest.approx(expected)
