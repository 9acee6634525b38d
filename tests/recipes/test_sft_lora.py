import importlib
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="the sft extra installs trl")
pytest.importorskip("peft", reason="the sft extra installs peft")

import chats as chat_files
import sft_lora
from transformers import AutoTokenizer, LlamaForCausalLM

# peft 0.21 reads the older attribute of a model of Transformers 5.23.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture
def tiny_run(tmp_path: Path) -> list[str]:
    """Return the command line of the demo, with fewer and shorter steps, into tmp_path / "run"."""
    settings = {
        "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "run",
        "max_steps": 5,
        "max_length": 64,
        "pad_to_multiple_of": 64,
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return with_setting([], **settings)


def with_setting(argv: list[str], **settings: object) -> list[str]:
    """Return `argv` with further settings. argparse uses the last of repeated options."""
    return [*argv, *(text for name, value in settings.items() for text in (f"--{name}", str(value)))]


def trained(argv: list[str], is_plain: bool = False) -> tuple[sft_lora.SFTTrainer, sft_lora.AdaccCallback]:
    settings = sft_lora.parse_settings(argv)
    callback = sft_lora.make_callback(settings[0])
    trainer = sft_lora.make_trainer(settings, [] if is_plain else [callback])
    return sft_lora.train(trainer, callback), callback


def losses(trainer: sft_lora.SFTTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_demo_trains_and_stores_half(tiny_run, tmp_path, capsys, caplog):
    trainer, callback = trained(tiny_run)
    assert "checkpointing=True" not in caplog.text  # TRL's arguments switch checkpointing on, the recipe off
    assert len(losses(trainer)) == 5
    assert callback.policy.predicted_stored_bytes <= 0.5 * callback.profile.plain_stored_bytes
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("5 steps, loss ")]
    assert callback.policy.summary() in line
    assert "tokens/s" in line
    assert "that plain training stores; saved in" in line
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert AutoTokenizer.from_pretrained(tmp_path / "run").chat_template == chat_files.CHAT_TEMPLATE


def test_without_compression_losses_are_those_of_plain_training(tiny_run: list[str], one_thread: None):
    argv = with_setting(tiny_run, exact=True)
    plain, _ = trained(argv, is_plain=True)
    trainer, callback = trained(argv)
    assert callback.policy.action_counts()["recompute"] > 0
    assert losses(trainer) == losses(plain)


CHATS = {
    "messages": {"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two. " * 5}]},
    "chat completions": {
        "prompt": [{"role": "user", "content": "One?"}],
        "completion": [{"role": "assistant", "content": "Two. " * 5}],
    },
    "completions": {"prompt": "One?", "completion": " Two." * 5},
    "text": {"text": "One two three. " * 5},
}


def jsonl(rows: list[object], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", CHATS)
def test_a_file_of_ones_own_is_taken(kind: str, tiny_run: list[str], tmp_path: Path):
    chats = jsonl([CHATS[kind]] * 8, tmp_path / "chats.jsonl")
    settings = sft_lora.parse_settings(with_setting(tiny_run, chats=chats, max_steps=3))
    callback = sft_lora.make_callback(settings[0])
    trainer = sft_lora.make_trainer(settings, [callback])
    text = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])
    assert all(content in text for content in chat_files.strings_in(CHATS[kind]))
    if kind == "messages":
        sft_lora.train(trainer, callback)
        assert len(losses(trainer)) == 3
        assert callback.policy is not None


def test_a_command_line_of_trl_sft_trains_and_evaluates(tiny_run: list[str], tmp_path: Path):
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        jsonl([CHATS["messages"]] * 8, folder / f"{split}.jsonl")
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1}
    settings = sft_lora.parse_settings(with_setting(tiny_run, dataset_name=folder, **evaluation))
    callback = sft_lora.make_callback(settings[0])
    trainer = sft_lora.train(sft_lora.make_trainer(settings, [callback]), callback)
    assert len(losses(trainer)) == 5
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry][:2] == [2, 4]
    assert callback.policy is not None


def test_every_setting_of_trl_sft_is_accepted():
    usage = importlib.import_module("trl.scripts.sft").make_parser().format_usage()
    trl_settings = {name.removeprefix("no_") for name in re.findall(r"\[--(\w+)", usage)}
    assert {"dataset_name", "model_name_or_path", "max_length", "lora_r"} <= trl_settings
    settings = sft_lora.parse_settings([])
    assert trl_settings <= {field.name for group in settings for field in fields(group)}


def test_a_saved_model_is_taken_and_all_its_weights_can_be_trained(tiny_run: list[str], tmp_path: Path):
    tokenizer = sft_lora.demo_tokenizer(chat_files.load_chats(sft_lora.DEMO_CHATS, "text"), tmp_path / "cache")
    sft_lora.demo_model(tokenizer, 64, seed=0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    argv = with_setting(tiny_run, model_name_or_path=tmp_path / "model", use_peft=False, memory_budget="0.5")
    trainer, callback = trained(with_setting(argv, max_steps=3, report_to="none", assistant_only_loss=True))
    assert isinstance(trainer.model, LlamaForCausalLM)
    assert callback.policy.predicted_stored_bytes <= 0.5 * callback.profile.plain_stored_bytes


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"chats": "gone.jsonl"}, "--chats=gone.jsonl: no such file"),
        ({"chats": "a.jsonl", "dataset_name": "b"}, "--chats=a.jsonl cannot be combined with --dataset_name"),
        ({"dataset_name": "no-such/data"}, "no-such/data"),
        ({"chats": ["no row"]}, "is not a jsonl file"),
        ({"chats": []}, "is not a jsonl file"),
        ({"chats": [{"question": "One?"}]}, "has rows with the keys ['question']; write rows {\"messages\""),
        ({"chats": [{"messages": "One?"}]}, "has rows with the keys ['messages']; write rows {\"messages\""),
        ({"chats": [CHATS["text"], CHATS["messages"]]}, "has rows without text, which the first row has"),
        ({"memory_budget": "much"}, "memory_budget='much'"),
        ({"memory_budget": "1.5"}, "memory_budget=1.5 is outside (0, 1]"),
        ({"load_in_4bit": True}, "--load_in_4bit quantizes the weights of a hub id or folder"),
        ({"load_in_4bit": True, "model_name_or_path": "x", "use_peft": False}, "leaves nothing to train"),
        ({"load_in_4bit": True, "model_name_or_path": "x"}, "--load_in_4bit needs bitsandbytes"),
        ({"model_name_or_path": "no-such/model"}, "--model_name_or_path=no-such/model could not be loaded"),
        ({"no_such_setting": 1}, "--no_such_setting"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_setting_ends_with_one_message_and_status_2(setting, message, tiny_run, tmp_path, monkeypatch, capsys):
    find_spec = sft_lora.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))
    if isinstance(setting.get("chats"), list):
        setting = {"chats": jsonl(setting["chats"], tmp_path / "chats.jsonl")}
    monkeypatch.setattr(sys, "argv", ["sft_lora.py", *with_setting(tiny_run, **setting)])
    assert sft_lora.command_line() == 2
    error = capsys.readouterr().err
    assert message in error
    assert "sft_lora.py: error: " in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()
