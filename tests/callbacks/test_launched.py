"""`adacc run` around real commands: losses equal those with the callback passed by hand, in every process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_runs import run_forked
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.callbacks import AdaccCallback, AdaccTrainerMixin
from adacc_hf.callbacks.launched import StepRecorder, add_adacc_callback
from adacc_hf.torch_glue.fingerprints import fingerprint

ADACC = (sys.executable, "-c", "import sys; from adacc_hf.cli import main; sys.exit(main())", "run")
OPTIONS = ("--memory-budget", "0.5", "--exact", "--")
SETTINGS = json.dumps({"memory_budget": 0.5, "exact": True})
LINE = "trains with AdaccCallback(memory_budget=0.5, exact=True) in process"

# Trains a GPT-2 twice, by hand if sys.argv[1] says so, and writes losses, gradient norms and the policies' actions.
SCRIPT = """
import json, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainer, Seq2SeqTrainingArguments

def train(callbacks, dropout):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=32, vocab_size=97, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(0, 97, (64, 32))
    trainer = Seq2SeqTrainer(
        model=GPT2LMHeadModel(config),
        args=Seq2SeqTrainingArguments(
            "out", max_steps=4, per_device_train_batch_size=4, logging_steps=1, report_to="none", save_strategy="no",
            disable_tqdm=True, use_cpu=True, dataloader_num_workers=dropout,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=callbacks,
    )
    trainer.train()
    own = [one for one in trainer.callback_handler.callbacks if type(one).__name__ == "AdaccCallback"]
    figures = [(record["loss"], record["grad_norm"]) for record in trainer.state.log_history if "loss" in record]
    weights = sum(weight.double().sum().item() for weight in trainer.model.parameters())
    counts = [{action: number for action, number in one.policy.action_counts().items()} for one in own]
    return {"figures": figures, "weights": weights, "num_steps": trainer.state.global_step, "actions": counts,
            "rank": trainer.args.process_index}

def by_hand():
    if sys.argv[1] != "by-hand":
        return []
    from adacc_hf import AdaccCallback
    return [AdaccCallback(memory_budget=0.5, exact=True)]

if __name__ == "__main__":
    # The second Trainer reads its batches in a worker process.
    results = [train(by_hand(), 0), train(by_hand(), 1)]
    open(f"{sys.argv[1]}-{results[0]['rank']}.json", "w").write(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "TOKENIZERS_PARALLELISM": "false",
        **environment,
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def results_of(folder: Path, name: str, num_ranks: int = 1) -> list:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def assert_equal_to_by_hand(folder: Path, launcher: tuple[str, ...], num_ranks: int) -> None:
    """Run the script plainly and by hand in forks, and with the launcher under `adacc run`."""
    ranks = None if num_ranks == 1 else num_ranks
    for name in ("plain", "by-hand", "launched"):
        if name == "launched":
            process = run(folder, *ADACC, *OPTIONS, *launcher, "train.py", name)
        else:
            process = run_forked(folder / "train.py", name, num_ranks=ranks, cwd=folder, ACCELERATE_USE_CPU="true")
        assert process.returncode == 0, process.stderr
        assert process.stderr.count(LINE) == (2 if name == "launched" else 0)  # a line per training, not per process
    plain, by_hand, launched = (results_of(folder, name, num_ranks) for name in ("plain", "by-hand", "launched"))
    for rank in range(num_ranks):
        for index in range(2):
            assert launched[rank][index]["figures"] == by_hand[rank][index]["figures"] == plain[rank][index]["figures"]
            assert launched[rank][index]["weights"] == by_hand[rank][index]["weights"] == plain[rank][index]["weights"]
            assert launched[rank][index]["num_steps"] == 4
            assert [counts["recompute"] > 0 for counts in launched[rank][index]["actions"]] == [True]
            assert plain[rank][index]["actions"] == []


def test_python_trains_as_by_hand(script: Path) -> None:
    assert_equal_to_by_hand(script, (sys.executable,), num_ranks=1)


def test_torchrun_trains_as_by_hand(script: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert_equal_to_by_hand(script, launcher, num_ranks=2)


def test_a_refused_training_ends_with_its_own_error(tmp_path: Path) -> None:
    """A model without blocks. Nothing is said of a training that did not begin."""
    code = (
        "import torch\nfrom transformers import Trainer, TrainingArguments\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.layer = torch.nn.Linear(2, 2)\n"
        "    def forward(self, x, labels=None): return {'loss': self.layer(x).sum()}\n"
        "args = TrainingArguments('out', report_to='none', use_cpu=True, disable_tqdm=True, max_steps=1)\n"
        "Trainer(model=Model(), args=args, train_dataset=[{'x': torch.ones(2), 'labels': 1}]).train()"
    )
    process = run(tmp_path, *ADACC, "--", sys.executable, "-c", code)
    assert process.returncode == 1
    assert "NoBlocksError" in process.stderr
    assert "before a Trainer began training" not in process.stderr


@pytest.fixture
def launched(monkeypatch):
    """Wrap the handler of callbacks, as the startup module does."""
    on_train_begin = CallbackHandler.on_train_begin

    def add_and_begin(handler, args, state, control, **kwargs):
        add_adacc_callback(handler, state, SETTINGS)
        return on_train_begin(handler, args, state, control, **kwargs)

    monkeypatch.setattr(CallbackHandler, "on_train_begin", add_and_begin)


def adacc_callbacks(trainer) -> list[AdaccCallback]:
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, AdaccCallback)]


def test_a_callback_is_added_when_training_begins(launched, make_trainer, capsys) -> None:
    trainer = make_trainer([])
    assert adacc_callbacks(trainer) == []
    trainer.train()
    (callback,) = adacc_callbacks(trainer)
    assert callback.config == AdaccConfig(memory_budget=0.5, exact=True)
    assert callback.policy.action_counts()["recompute"] > 0
    assert capsys.readouterr().err.splitlines() == [f"adacc run: Trainer {LINE} {os.getpid()}"]


def test_a_callback_of_the_script_is_kept(launched, make_trainer, capsys) -> None:
    own = AdaccCallback(memory_budget=0.6, actions=("retain", "recompute"))
    trainer = make_trainer([own])
    trainer.train()
    assert adacc_callbacks(trainer) == [own]
    error = capsys.readouterr().err
    assert "memory_budget=0.6" in error
    assert "the script added it, and its settings override adacc run's" in error


def test_a_trainer_with_the_mixin_is_kept(launched, make_trainer, capsys) -> None:
    trainer = make_trainer([])
    mixed = type("MixedTrainer", (AdaccTrainerMixin, type(trainer)), {})
    trainer = mixed(
        model=trainer.model,
        args=trainer.args,
        train_dataset=trainer.train_dataset,
        adacc_config=AdaccConfig(memory_budget=0.6),
    )
    trainer.train()
    assert adacc_callbacks(trainer) == [trainer.adacc_callback]
    assert "MixedTrainer trains with AdaccCallback(memory_budget=0.6) in process" in capsys.readouterr().err


def test_a_loop_without_a_trainer_is_refused(launched, make_trainer) -> None:
    handler = make_trainer([]).callback_handler
    with pytest.raises(RuntimeError, match=r"without a Trainer, .*: use AdaccSession in this loop"):
        handler.on_train_begin(None, TrainerState(), TrainerControl())


@pytest.mark.gate
def test_the_first_training_is_recorded_for_some_steps(make_trainer, lossless, tmp_path):
    callbacks = [AdaccCallback(**lossless) for _ in range(2)]
    for adacc in callbacks:
        trainer = make_trainer([adacc, StepRecorder(tmp_path, 2, adacc)], max_steps=5)
        trainer.train()
        assert trainer.state.global_step == 2
        weights = {f"weight {name}": list(fingerprint(p)) for name, p in trainer.model.named_parameters()}
        record = json.loads((tmp_path / "rank-0.json").read_text())
    assert [len(step) for step in record["records"]] == [len(weights) + 1] * 2 + [len(weights)]
    assert all(next(iter(step)) == "loss" for step in record["records"][:2])
    assert record["policy"] == json.loads(json.dumps(callbacks[0].policy.to_json()))
    assert len(record["step_ms"]) == 2
    names = [name.removeprefix("gradient of ") for name in record["records"][0]][1:]
    assert [f"weight {name}" for name in names] == list(record["records"][2])
