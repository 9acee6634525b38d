"""lm-eval's answers against scores worked out by hand, and against log-likelihoods computed without it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adacc_hf.eval.tasks.lm_eval_tasks import PAPER_TASKS, load_tasks
from adacc_hf.eval.tasks.zero_shot import ModelSource, TaskScore, accuracy_stderr, evaluate, language_model, score

Question = tuple[str, list[str], int]
"""What the model reads, the choices that may follow, and which one is right."""

# As counted beside the rows: the choice with the fewest unexpected letters wins, the first of equally good ones; of "a"
# and "abcdefgh" the shorter one, because even an expected letter is not certain.
BY_HAND = {"lambada_openai": 2 / 4, "arc_easy": 2 / 3, "sciq": 1 / 2, "swag": 3 / 4}


def questions(name: str, rows: list[dict[str, Any]]) -> list[Question]:
    """The rows as questions, written out after the prompts in lm-eval's documentation of the tasks."""
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


def best_choices(loglikelihood: Any, asked: list[Question], per_character: bool) -> float:
    """The share of questions whose right choice is the likeliest."""
    right = 0
    for context, choices, gold in asked:
        values = [loglikelihood(context, f" {choice}") for choice in choices]
        if per_character:
            values = [value / len(choice) for value, choice in zip(values, choices, strict=True)]
        right += values.index(max(values)) == gold
    return right / len(asked)


def scores(source: ModelSource, data_dir: Path, limit: int | None = None) -> dict[str, TaskScore]:
    return evaluate(source, load_tasks(PAPER_TASKS, data_dir), limit)


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_accuracy_is_the_one_worked_out_by_hand(
    name: str,
    alphabet_model: PreTrainedModel,
    byte_tokenizer: PreTrainedTokenizerBase,
    data_dir: Path,
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    with language_model(ModelSource(model=alphabet_model, tokenizer=byte_tokenizer, batch_size=3)) as model:
        got = score(model, load_tasks([name], data_dir)[name])
    (own_rows,) = (lines for key, lines in rows.items() if key.startswith(name))
    num = len(own_rows)
    assert got.acc == BY_HAND[name]
    assert (got.num_samples, got.num_samples_original, got.num_fewshot, got.version) == (num, num, 0, 1.0)
    if name == "lambada_openai":
        words = [row["text"].rpartition(" ") for row in own_rows]
        total = sum(alphabet_model.loglikelihood(context, f" {word}") for context, _, word in words)
        # float32 log-softmax over some ten letters, each of about 1e-7 relative.
        assert got.perplexity == pytest.approx(math.exp(-total / num), rel=1e-5)
        assert got.acc_norm is None
    else:
        asked = questions(name, own_rows)
        assert best_choices(alphabet_model.loglikelihood, asked, per_character=False) == got.acc
        assert best_choices(alphabet_model.loglikelihood, asked, per_character=True) == got.acc_norm
        assert got.perplexity is None


@torch.no_grad()
def test_a_gpt2_scores_what_its_loglikelihoods_say(
    tiny_gpt2: PreTrainedModel,
    text_tokenizer: PreTrainedTokenizerBase,
    data_dir: Path,
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    got = scores(ModelSource(model=tiny_gpt2, tokenizer=text_tokenizer, batch_size=4), data_dir)
    tiny_gpt2.eval()

    def token_logprobs(context: str, text: str) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] of the text's tokens, and [T] whether each is the likeliest; one text at a time, without padding."""
        num_context = len(text_tokenizer.encode(context))
        ids = torch.tensor(text_tokenizer.encode(context + text))
        logprobs = tiny_gpt2(ids[None]).logits[0, num_context - 1 : -1].log_softmax(-1)
        targets = ids[num_context:]
        return logprobs.gather(1, targets[:, None])[:, 0], logprobs.argmax(-1) == targets

    def loglikelihood(context: str, text: str) -> float:
        return token_logprobs(context, text)[0].sum().item()

    for name in PAPER_TASKS[1:]:
        (own_rows,) = (lines for key, lines in rows.items() if key.startswith(name))
        asked = questions(name, own_rows)
        assert got[name].acc == best_choices(loglikelihood, asked, per_character=False)
        assert got[name].acc_norm == best_choices(loglikelihood, asked, per_character=True)

    words = [row["text"].rpartition(" ") for row in rows["lambada_openai/test"]]
    answers = [token_logprobs(context, f" {word}") for context, _, word in words]
    assert got["lambada_openai"].acc == sum(greedy.all().item() for _, greedy in answers) / len(answers)
    mean = sum(logprobs.sum().item() for logprobs, _ in answers) / len(answers)
    # Padding and batching change the order of float32 sums.
    assert got["lambada_openai"].perplexity == pytest.approx(math.exp(-mean), rel=1e-4)


def test_the_model_and_the_tokenizer_stay_as_they_were(
    tiny_gpt2: PreTrainedModel, text_tokenizer: PreTrainedTokenizerBase, data_dir: Path
) -> None:
    tiny_gpt2.transformer.h[0].eval()  # as a user freezes a part
    modes = [module.training for module in tiny_gpt2.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    scores(ModelSource(model=tiny_gpt2, tokenizer=text_tokenizer), data_dir)
    assert [module.training for module in tiny_gpt2.modules()] == modes
    assert text_tokenizer.pad_token is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_limit_shows_in_the_counts(
    alphabet_model: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerBase, data_dir: Path
) -> None:
    got = scores(ModelSource(model=alphabet_model, tokenizer=byte_tokenizer), data_dir, limit=1)
    assert {name: one.num_samples for name, one in got.items()} == dict.fromkeys(PAPER_TASKS, 1)
    assert [got[name].num_samples_original for name in PAPER_TASKS] == [4, 3, 2, 4]
    assert [one.acc for one in got.values()] == [1.0] * 4  # every data set's first row is answered rightly
    assert all(one.acc_stderr is None for one in got.values())


def test_a_model_that_diverged_has_no_perplexity(
    alphabet_model: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerBase, data_dir: Path
) -> None:
    with torch.no_grad():
        alphabet_model.logits.fill_(math.nan)
    got = scores(ModelSource(model=alphabet_model, tokenizer=byte_tokenizer), data_dir)
    assert got["lambada_openai"].perplexity is None
    assert got["sciq"].acc == 0.0  # the first choice wins, and the right one is the last


@pytest.mark.parametrize(("num_right", "num"), [(0, 5), (1, 4), (3, 7), (5, 5)])
def test_standard_error_is_lm_evals(num_right: int, num: int) -> None:
    from lm_eval.api.metrics import mean_stderr

    expected = mean_stderr([1] * num_right + [0] * (num - num_right))
    assert accuracy_stderr(num_right / num, num) == pytest.approx(expected)


def test_a_model_in_memory_needs_its_tokenizer(tiny_gpt2: PreTrainedModel) -> None:
    with (
        pytest.raises(ValueError, match="pass the one it was trained with"),
        language_model(ModelSource(model=tiny_gpt2)),
    ):
        pass
