"""Commands of other packages, once as they are and once under `adacc run --exact`, compared bit by bit.

python tests/others/run_commands.py [--examples DIR] [NAME ...]

DIR is the folder examples/pytorch of a copy of Transformers. TRL's commands are those of the environment. Models and
data are made as for `make test-others`, and nothing is downloaded.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

from othersrun import cases, tiny  # noqa: E402

from adacc_hf.artifacts.files import POLICY_FILE  # noqa: E402
from adacc_hf.artifacts.policy import Policy  # noqa: E402

RUNS = cases.RUNS / "commands"
ADACC = ("adacc", "run", "--memory-budget", "0.6", "--exact", "--")
NUM_STEPS = 6
TIMES = ("_runtime", "_per_second", "step_time", "total_flos")
"""Endings of logged names that are not results of the training."""
METRIC = """
import datasets
import evaluate

class Untried(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int64")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", features=features)
"""
"""Code of a metric that scripts load before they train, and do not use without evaluation."""


@dataclass(frozen=True)
class Command:
    """Training command, without its output folder."""

    name: str
    words: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


def transformers_commands(examples: Path) -> list[Command]:
    """Return commands that run the example scripts of Transformers."""
    data = {name: str(RUNS / "data" / f"{name}.json") for name in (*DATA, "answers")}
    text = {"train_file": str(RUNS / "data" / "text.txt"), "block_size": 32}
    bert, gpt2, t5 = (str(RUNS / "models" / name) for name in MODELS)

    def both(name: str) -> dict[str, str]:
        return {"train_file": data[name], "validation_file": data[name]}

    def python(script: str, model: str, **options: Any) -> Command:
        words = ("python", str(examples / f"{script}.py"), "--do_train")
        return Command(Path(script).name, words, {"model_name_or_path": model, **options})

    lines = {"train_file": text["train_file"], "max_seq_length": 32}
    clm = python("language-modeling/run_clm", gpt2, **text)
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=2", *clm.words[1:])
    accelerate = ("accelerate", "launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no")
    answers = {"max_seq_length": 64, "doc_stride": 16}
    translated = {"source_lang": "en", "target_lang": "ro", "max_source_length": 32, "max_target_length": 32}
    return [
        clm,
        Command("run_clm, torchrun", torchrun, clm.options),
        Command("run_clm, accelerate", (*accelerate, "--dynamo_backend=no", *clm.words[1:]), clm.options),
        python("language-modeling/run_mlm", bert, **lines),
        python("text-classification/run_glue", bert, max_seq_length=32, **both("feelings")),
        python("text-classification/run_classification", bert, max_seq_length=32, **both("feelings")),
        python("question-answering/run_qa", bert, train_file=data["answers"], **answers),
        python("multiple-choice/run_swag", bert, max_seq_length=32, **both("endings")),
        python("token-classification/run_ner", bert, **both("tags")),
        python("translation/run_translation", t5, **translated, **both("translations")),
    ]


def trl_commands() -> list[Command]:
    """Return the commands of TRL that have a case in `make test-others`."""
    names = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "distillation")
    scripts = {case.name: case for case in cases.SCRIPTS}
    return [Command(f"trl {name}", ("trl", name, *scripts[f"trl {name}.py"].arguments)) for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=Path, metavar="DIR", help="folder examples/pytorch of Transformers")
    parser.add_argument("names", nargs="*", metavar="NAME", help="commands to run (default: all)")
    arguments = parser.parse_args()
    make_files()
    commands = trl_commands() + ([] if arguments.examples is None else transformers_commands(arguments.examples))
    verdicts = {}
    for command in commands:
        if not arguments.names or command.name in arguments.names:
            verdicts[command.name] = verdict_of(command)
            print(f"{command.name:24} {verdicts[command.name]}", flush=True)
    num_equal = sum(verdict.startswith("bit-equal") for verdict in verdicts.values())
    print(f"{num_equal} of {len(verdicts)} bit-equal")
    return 0 if num_equal == len(verdicts) else 1


def verdict_of(command: Command) -> str:
    """Run the command twice, and describe the difference."""
    outcomes = []
    for mode, prefix in (("plain", ()), ("adacc", ADACC)):
        target = RUNS / "output" / f"{command.name.replace(' ', '-')}.{mode}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        log = target / "log.txt"
        with log.open("w") as stream:
            words = [*prefix, *command.words, *options_of(command, target)]
            status = subprocess.run(words, cwd=RUNS, env=environment(), stdout=stream, stderr=stream).returncode
        text = log.read_text()
        if status:
            last_line = text.strip().splitlines()[-1]
            return f"{mode}: status {status}: {next((e for e in text.splitlines() if 'Error: ' in e), last_line)[:200]}"
        if (text.count("adacc run: ") == 1) != (mode == "adacc"):
            return f"{mode}: {text.count('adacc run: ')} lines of adacc run in {log}"
        checkpoint = next(
            target.rglob(f"checkpoint-{NUM_STEPS}"), None
        )  # some scripts add folders to the output folder
        if checkpoint is None:
            return f"{mode}: no checkpoint after {NUM_STEPS} steps in {target}"
        outcomes.append(outcome(checkpoint))
    plain, adacc = outcomes
    num_recomputed = Policy.load(checkpoint.parent / POLICY_FILE).action_counts()["recompute"]
    if not num_recomputed:
        return "the policy recomputes nothing"
    different = [name for name in plain if plain[name] != adacc[name]]
    return f"DIFFERS in {different}" if different else f"bit-equal, {num_recomputed} activations recomputed"


def options_of(command: Command, target: Path) -> list[str]:
    common = {
        "output_dir": target,
        "max_steps": NUM_STEPS,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": NUM_STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": "true",
        "disable_tqdm": "true",
    }
    return [str(word) for name, value in {**command.options, **common}.items() for word in (f"--{name}", value)]


def outcome(checkpoint: Path) -> dict[str, Any]:
    """Return all results of a training: what it logged, and a hash of each file of weights."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    logs = [
        {name: value for name, value in record.items() if not name.startswith("adacc/") and not name.endswith(TIMES)}
        for record in state["log_history"]
    ]
    assert sum("loss" in record for record in logs) == NUM_STEPS
    files = sorted(checkpoint.glob("*.safetensors"))
    return {"logs": logs, **{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}}


def environment() -> dict[str, str]:
    own_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": own_path,
        "PYTHONPATH": str(FOLDER),
        "HF_HOME": str(cases.MADE),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_USE_CPU": "true",
    }


# Models, data and metrics for the scripts of Transformers.

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {**SMALL, "max_position_embeddings": 256},
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 256},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
}
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>",
           "mask_token": "<|user|>", "cls_token": "<|system|>", "sep_token": "<|end|>"}  # fmt: skip
"""Tokens of `tiny.tokenizer()`, in the roles that the scripts need."""
_text, _short = tiny.DATA["text"], tiny.DATA["prompts"]
DATA: dict[str, list[dict[str, Any]]] = {
    "feelings": tiny.DATA["feelings"],
    "tags": [{"tokens": row["text"].split(), "ner_tags": [word[0] for word in row["text"].split()]} for row in _text],
    "endings": [
        {
            "sent1": row["text"],
            "sent2": "so",
            "label": number % 4,
            **{f"ending{n}": _short[n]["prompt"] for n in range(4)},
        }
        for number, row in enumerate(_text)
    ],
    "translations": [{"translation": {"en": row["text"], "ro": row["text"][::-1]}} for row in _text],
}
_answers = [
    {
        "id": str(number),
        "context": row["text"],
        "question": "what was it?",
        "answers": {"text": [row["text"].split()[2]], "answer_start": [len(" ".join(row["text"].split()[:2])) + 1]},
    }
    for number, row in enumerate(_text)
]


def make_files() -> None:
    """Make models, data and metrics anew."""
    tiny.make(cases.MADE)
    shutil.rmtree(RUNS, ignore_errors=True)
    (RUNS / "data").mkdir(parents=True)
    for name, rows in DATA.items():
        (RUNS / "data" / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (RUNS / "data" / "answers.json").write_text(json.dumps({"data": _answers}))
    (RUNS / "data" / "text.txt").write_text("\n".join(row["text"] for row in _text * 3))
    for name in ("accuracy", "seqeval", "sacrebleu", "squad"):
        (RUNS / name).mkdir()
        (RUNS / name / f"{name}.py").write_text(METRIC)
    for name in MODELS:
        make_model(name)


def make_model(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForPreTraining, AutoModelForSeq2SeqLM

    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    tokens = {"vocab_size": tiny.VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = AutoConfig.for_model(name, **MODELS[name], **tokens)
    torch.manual_seed(0)
    maker = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}.get(name, AutoModelForPreTraining)
    maker.from_config(config).save_pretrained(RUNS / "models" / name)
    tokenizer.save_pretrained(RUNS / "models" / name)


if __name__ == "__main__":
    sys.exit(main())
