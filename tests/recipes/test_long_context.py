from dataclasses import replace
from pathlib import Path

import long_context
import pytest
import torch
from planned_run import find_device
from recipe_runs import assert_one_error, command_line, with_setting
from transformers import LlamaConfig, LlamaForCausalLM

STORED_BY_PLAIN = "that plain training stores"


@pytest.fixture(autouse=True)
def _quick_devices(monkeypatch: pytest.MonkeyPatch):
    """Skip measuring rates and simulating devices. Every device of the table is traced as the CPU runs it."""
    monkeypatch.setattr(
        "planned_run.find_device", lambda name: replace(find_device("l4" if name == "cpu" else name), trace="cpu")
    )


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    """Return the config folder of a LLaMA that trains in milliseconds, with a context of 32 tokens."""
    folder = tmp_path / "tiny-llama"
    LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        vocab_size=290,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_run(tiny_llama: Path, jsonl_file: Path, tmp_path: Path) -> list[str]:
    """Return the command line of four steps of four times the context into tmp_path / "run"."""
    settings = {
        "model": tiny_llama,
        "dataset": jsonl_file,
        "seq_len": 128,
        "memory_budget": "0.5",
        "exact": True,
        "per_device_train_batch_size": 2,
        "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "run",
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return with_setting([], **settings)


def test_a_run_prints_its_plan_and_keeps_to_it(tiny_run, tmp_path, monkeypatch, capsys):
    assert command_line(long_context, tiny_run, monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())  # the plan is wrapped
    assert "2 blocks, 2 x 128 tokens per device" in text
    assert any(line.startswith("fits ") for line in lines)
    assert "with adacc: 2 blocks" in text
    (line,) = [line for line in lines if line.startswith("4 steps, loss ")]
    share = int(line.partition("that is ")[2].partition("%")[0])
    assert 0 < share <= 60  # half was planned for; memory besides activations differs slightly
    assert STORED_BY_PLAIN in line
    model = LlamaForCausalLM.from_pretrained(tmp_path / "run")
    assert model.config.max_position_embeddings == 128


def test_a_folder_of_text_is_taken_and_documents_fill_each_sequence(tiny_run: list[str], tmp_path: Path):
    books = tmp_path / "books"
    books.mkdir()
    for name in ("one", "two"):
        (books / f"{name}.txt").write_text(f"{name}, a word and a word. " * 40)
    recipe, training = long_context.parse_settings(with_setting(tiny_run, dataset=books, seq_len=64))
    trainer = long_context.make_trainer(recipe, training, long_context.long_config(recipe), None)
    assert {len(row["input_ids"]) for row in trainer.train_dataset} == {64}


def test_a_plan_alone_needs_neither_the_device_nor_text(tiny_run, tmp_path, monkeypatch, capsys):
    settings = {"device": "h100", "bf16": True, "memory_budget": "auto", "dataset": "gone.txt", "seq_len": 32768}
    argv = with_setting(tiny_run, plan_only=True, rope_theta=1e6, **settings)
    assert command_line(long_context, argv, monkeypatch) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 x 32768 tokens per device, sdpa attention, adamw, on NVIDIA H100" in out
    assert not (tmp_path / "run").exists()


def test_pretrained_weights_are_taken_with_longer_positions(tiny_run: list[str], tmp_path: Path, tiny_llama: Path):
    torch.manual_seed(1)
    saved_model = LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_llama))
    saved_model.save_pretrained(tiny_llama)
    argv = with_setting(tiny_run, from_pretrained=True, rope_theta=5e5)
    recipe, training = long_context.parse_settings(argv)
    model = long_context.make_trainer(recipe, training, long_context.long_config(recipe), None).model
    assert torch.equal(model.lm_head.weight, saved_model.lm_head.weight)
    assert model.config.max_position_embeddings == 128
    assert model.config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dataset": "gone.txt"}, "--dataset=gone.txt: no such file"),
        ({"model": "no-such/model"}, "--model=no-such/model is not a preset (demo"),
        ({"model": "gpt2-117m"}, "--model=gpt2-117m has no rotary positions to extend"),
        ({"tokenizer": "no-such/tokenizer"}, "--tokenizer=no-such/tokenizer could not be loaded"),
        ({"seq_len": 1}, "--seq_len=1 is outside its range"),
        ({"seq_len": 4096}, "--seq_len=4096 is longer than all training text"),
        ({"per_device_train_batch_size": 99}, "sequences of --seq_len=128 tokens, less than one batch of 99"),
        ({"device": "abacus"}, "--device=abacus is not in the table of devices"),
        ({"optim": "adagrad"}, "--optim=adagrad is not known to the planner; choose from adamw_torch_fused"),
        ({"memory_budget": "much"}, "memory_budget='much'"),
        ({"memory_budget": "0.001"}, "memory_budget=0.001 allows"),
        ({"memory_budget": "100KiB"}, "--memory_budget=100KiB: `adacc plan` says: --budget=100.00 KiB is below"),
        ({"memory_budget": "3MiB", "seq_len": 2048}, "--seq_len=2048 does not fit: the least possible peak is "),
        ({"no_such_setting": 1}, "--no_such_setting"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_setting_ends_with_one_message_and_status_2(setting, message, tiny_run, tmp_path, monkeypatch, capsys):
    assert_one_error(long_context, with_setting(tiny_run, **setting), message, monkeypatch, capsys)
    assert not (tmp_path / "run").exists()
