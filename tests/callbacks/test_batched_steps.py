"""A Trainer with batch_by_bytes: gradients of a step, resumed runs, several ranks, and what is refused."""

import json
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from forked_runs import run_forked
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from adacc_hf import AdaccCallback

BUDGET = 4 * 2**20
MULTIPLE = 4


def llama(**settings):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, **sizes, **settings)).train()


class Rows(torch.utils.data.Dataset):
    """Samples of 3 to 40 tokens, whose first third is masked in the labels."""

    def __init__(self, number=192):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 41, (number,), generator=generator).tolist()
        self.ids = [torch.randint(1, 64, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = self.ids[index].clone()
        labels[: len(labels) // 3] = -100
        return {"input_ids": self.ids[index], "labels": labels, "index": index}


def collate(rows):
    longest = -(-max(len(row["input_ids"]) for row in rows) // MULTIPLE) * MULTIPLE
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for number, row in enumerate(rows):
        ids[number, : len(row["input_ids"])] = row["input_ids"]
        labels[number, : len(row["labels"])] = row["labels"]
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


class Recorder(TrainerCallback):
    """Samples, sizes and gradients of each step."""

    def __init__(self):
        self.batches, self.steps, self.gradients = [], [], []

    def collate(self, rows):
        self.batches.append([row["index"] for row in rows])
        return collate(rows)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(self.batches[:])
        self.batches.clear()
        self.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])


class WithoutItems(Trainer):
    """Trainer of a model whose loss is a mean, and takes no number of items."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


def trainer_of(folder, recorder, callback, trainer_class=Trainer, model=None, **settings):
    arguments = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "include_num_input_tokens_seen": "non_padding",
    }
    return trainer_class(
        model=model or llama(),
        args=TrainingArguments(str(folder), **{**arguments, **settings}),
        train_dataset=Rows(),
        data_collator=recorder.collate,
        callbacks=[callback, recorder],
    )


def by_bytes(**settings):
    return AdaccCallback(**{"memory_budget": BUDGET, "exact": True, "batch_by_bytes": True, **settings})


def reference_gradients(steps, model=None):
    """Return the gradients of steps of plain training, each on all of its samples in one batch."""
    model, rows, gradients = model or llama(), Rows(), []
    for indices in steps:
        model.zero_grad()
        model(**collate([rows[index] for index in indices])).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-2 * parameter.grad
    return gradients


def assert_close(gradients, expected):
    assert len(gradients) == len(expected)
    for one, other in zip(gradients, expected, strict=True):
        worst = max((torch.as_tensor(a) - b).abs().max().item() for a, b in zip(one, other, strict=True))
        assert worst <= 1e-6 * max(1.0, *(g.abs().max().item() for g in other))


@pytest.mark.parametrize("trainer_class", [Trainer, WithoutItems])
def test_steps_have_the_samples_and_the_gradients_of_plain_training(one_thread, tmp_path, trainer_class):
    recorder, plain = Recorder(), Recorder()
    trainer = trainer_of(tmp_path / "run", recorder, by_bytes(), trainer_class)
    trainer.train()
    trainer_of(tmp_path / "plain", plain, TrainerCallback(), trainer_class).train()
    steps = [list(chain(*step)) for step in recorder.steps]
    order = [index for step in plain.steps for batch in step for index in batch]  # its loader reads one batch ahead
    assert [sorted(step) for step in steps] == [sorted(order[16 * n : 16 * n + 16]) for n in range(6)]
    assert_close(recorder.gradients, reference_gradients(steps))
    assert any([len(batch) for batch in step] != [4, 4, 4, 4] for step in recorder.steps)
    rows = Rows()
    assert trainer.state.num_input_tokens_seen == sum(len(rows[i]["input_ids"]) for step in steps for i in step)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    with torch.no_grad():
        model = llama()
        assert float(losses[0]) == pytest.approx(model(**collate([rows[i] for i in steps[0]])).loss.item(), rel=1e-4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_makes_the_same_micro_batches(one_thread, tmp_path, num_workers):
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 7, "dataloader_num_workers": num_workers}
    first, resumed = Recorder(), Recorder()
    trainer_of(tmp_path, first, by_bytes(), **settings).train()
    trainer = trainer_of(tmp_path, resumed, by_bytes(), **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert resumed.steps == first.steps[7:]
    assert_close(resumed.gradients, first.gradients[7:])


def test_ranks_have_equal_numbers_of_micro_batches_and_common_gradients(tmp_path, one_thread):
    process = run_forked(Path(__file__), str(tmp_path), num_ranks=2)
    assert process.returncode == 0, process.stderr[-6000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [len(step) for step in ranks[0]["steps"]] == [len(step) for step in ranks[1]["steps"]]
    steps = [list(chain(*a, *b)) for a, b in zip(*(rank["steps"] for rank in ranks), strict=True)]
    assert all(len(set(step)) == 32 for step in steps)
    for rank in ranks:
        assert_close(rank["gradients"], reference_gradients(steps))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sft_trainer(one_thread, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = Rows()
    dataset = datasets.Dataset.from_list([{"input_ids": rows[i]["input_ids"].tolist()} for i in range(len(rows))])
    settings = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "use_cpu": True}
    args = trl.SFTConfig(str(tmp_path), report_to="none", save_strategy="no", disable_tqdm=True, **settings)
    shapes = []

    class Watched(trl.SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            shapes.append(tuple(inputs["input_ids"].shape))
            return super().compute_loss(model, inputs, *args, **kwargs)

    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    callback = by_bytes(memory_budget="32MiB")
    trainer = Watched(model=llama(), args=args, train_dataset=dataset, processing_class=tokenizer, callbacks=[callback])
    trainer.train()
    assert sum(number for number, _ in shapes) == 6 * 16
    assert len(shapes) != 6 * 4
    assert callback.policy is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}, "one sample per step"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    ],
)
def test_other_settings_are_refused(tmp_path, settings, message):
    callback = by_bytes()
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, Recorder(), callback, **settings).train()


if __name__ == "__main__":
    from trainer_builders import write_rank_results

    own = Recorder()
    trainer_of(sys.argv[1], own, by_bytes()).train()
    results = {"steps": own.steps, "gradients": [[g.tolist() for g in step] for step in own.gradients]}
    write_rank_results(Path(sys.argv[1]), results)
