"""`adacc verify`: bit-equal trainings give status 0. Faults are named by step and tensor, and give another status."""

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MixtralConfig, T5Config

from adacc_hf.cli import main
from adacc_hf.run import call
from adacc_hf.tape.replay import PreparedOperator
from adacc_hf.torch_glue import compat, fingerprints
from adacc_hf.verify import Outcome, Trial

LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64, "attention_dropout": 0.1}
CONFIGS = {
    "gpt2": GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=61, n_positions=64, bos_token_id=0, eos_token_id=0),
    "llama": LlamaConfig(**LLAMA),
    "mixtral": MixtralConfig(**LLAMA, num_local_experts=2),
    "t5": T5Config(num_layers=1, d_model=32, d_ff=64, num_heads=2, d_kv=16, vocab_size=61),
}
# Trains a GPT-2 that draws dropout. The Trainer makes two optimizer steps an epoch, of two micro-batches each.
SCRIPT = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=61, n_positions=64, bos_token_id=0, eos_token_id=0)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 61, (16, 32))]
args = TrainingArguments("out", max_steps=int(sys.argv[1]), per_device_train_batch_size=4, report_to="none",
                         gradient_accumulation_steps=2, save_strategy="epoch", use_cpu=True, disable_tqdm=True)
Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=data).train()
"""


def verify(config: str, folder: Path, *options: str, steps: int = 3) -> int:
    CONFIGS[config].save_pretrained(folder)
    model = ["--model", str(folder), "--batch-size", "2", "--seq-len", "32", "--device", "cpu"]
    return main(["verify", *model, "--steps", str(steps), *options])


@pytest.mark.parametrize(
    ("config", "options"),
    [pytest.param("gpt2", (), marks=pytest.mark.gate), ("llama", ("--peft", "lora")), ("mixtral", ()), ("t5", ())],
)
def test_an_exact_policy_is_bit_equal(config, options, one_thread, tmp_path, capsys):
    assert verify(config, tmp_path, "--exact", *options) == 0
    out = capsys.readouterr().out
    rows = {name: cells for name, *cells in (re.split(r"\s{2,}", line.strip()) for line in out.splitlines())}
    names = ("plain", "gradient checkpointing", "Adacc")
    assert [rows[name][-1] for name in names] == ["reference", "bit-equal", "bit-equal"]
    plain, checkpointing, adacc = (int(rows[name][1].removesuffix("%")) for name in names)
    assert max(checkpointing, adacc) < plain == 100
    assert re.search(r"policy: 2 blocks, .* [1-9]\d* recompute", out)
    assert "equal those of plain. Steps that did not follow the policy" in " ".join(out.split())  # the first step


@pytest.mark.gate
def test_a_broken_replay_is_named_by_step_and_tensor(one_thread, tmp_path, monkeypatch, capsys):
    """Recomputed values are wrong from the third step of the third training on, and no check of the replay sees it."""
    num_steps, run, read = [0], PreparedOperator.run, fingerprints.gradient_fingerprints

    def run_wrongly(self, bases):
        results = run(self, bases)
        is_wrong = num_steps[0] >= 10
        return [one * 1.01 if is_wrong and torch.is_tensor(one) and one.is_floating_point() else one for one in results]

    def count(parameters):
        num_steps[0] += 1
        return read(parameters)

    monkeypatch.setattr(call, "checksum", lambda _: torch.tensor(0))
    monkeypatch.setattr(PreparedOperator, "run", run_wrongly)
    monkeypatch.setattr(fingerprints, "gradient_fingerprints", count)
    assert verify("gpt2", tmp_path, "--exact", steps=4) == 1
    out = capsys.readouterr().out
    last = " ".join(out[out.index("Not bit-equal") :].split())
    assert last.startswith("Not bit-equal. First difference in step 3: gradient of transformer.h.1.")
    assert "largest difference" in last
    assert "This is a fault of adacc_hf: please report it with this output." in last


def test_plain_training_that_does_not_fit_is_replaced_by_checkpointing(one_thread, tmp_path, monkeypatch, capsys):
    train, too_large = Trial.train, Outcome("plain", failure="OutOfMemoryError: no memory")
    monkeypatch.setattr(Trial, "train", lambda *args: too_large if args[1] == "plain" else train(*args))
    assert verify("gpt2", tmp_path, "--exact") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "plain fails: OutOfMemoryError: no memory" in out
    assert "equal those of gradient checkpointing." in out


def test_an_approximate_policy_is_not_bit_equal(one_thread, tmp_path, monkeypatch, capsys):
    """GPT-2's activations are large enough for codecs here. A checkpointing that fails does not end the comparison."""

    def fail(*_, **__):
        raise RuntimeError("no checkpointing")

    monkeypatch.setattr(compat, "switch_checkpointing", fail)
    CONFIGS["gpt2"].save_pretrained(tmp_path)
    options = ["--batch-size", "16", "--seq-len", "64", "--steps", "2", "--memory-budget", "0.2"]
    assert main(["verify", "--model", str(tmp_path), *options]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "gradient checkpointing fails: RuntimeError: no checkpointing" in out
    assert "The policy is approximate: add --exact for one that is bit-equal." in out


def test_a_command_is_compared_with_itself(one_thread, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert main(["verify", "--exact", "--steps", "3", "--", sys.executable, "train.py", "9"]) == 0
    captured = capfd.readouterr()
    out = " ".join(captured.out.split())
    assert "the command alone" in out
    assert "gradients of 3 steps, and the weights after them, equal those of the command alone." in out
    assert captured.err.count("trains with AdaccCallback(memory_budget=0.5, exact=True)") == 1
    assert not list(Path("out").glob("checkpoint-*")), "training ends early, without a checkpoint"
    assert main(["verify", "--", sys.executable, "-c", "exit(3)"]) == 2
    assert "the command ended with status 3, and no Trainer trained" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "pass either --model MODEL or -- COMMAND"),
        (("--model", "demo", "--", "true"), "pass either --model MODEL or -- COMMAND"),
        (("--model", "demo", "--methods", "adacc"), "or --methods, with or without --output"),
        (("--methods", "adacc,none"), "--methods: unknown method 'none'; choose from plain, checkpointing, "),
        (("--model", "demo", "--steps", "1"), "--steps=1 must be at least 2"),
        (("--model", "demo", "--seq-len", "9999"), "--seq-len=9999 is outside its range (2 to 256"),
    ],
)
def test_a_wrong_option_is_named(options, message, capsys):
    assert main(["verify", *options]) == 2
    assert message in capsys.readouterr().err
