"""The command `adacc plan`: its text and report, and refused options."""

import subprocess
import sys
from pathlib import Path

import pytest

from adacc_hf.cli import USER_ERROR, main
from adacc_hf.estimate.plan_report import WIDTH
from adacc_hf.estimate.presets import PRESETS

REFUSED = {
    "device": ("--device b200", "--device=b200 is not in the table of devices: choose from h100"),
    "batch": ("--batch-size 0", "--batch-size=0 must be at least 1"),
    "short": ("--seq-len 1", "--seq-len=1 is outside its range \\(2 to 64"),
    "long": ("--seq-len 65", "--seq-len=65 is outside its range \\(2 to 64, the model's context\\)"),
    "budget": ("--budget 1MiB", "--budget=1.00 MiB is below the .* MiB that training takes .*--fsdp N"),
    "budget form": ("--budget much", "--budget='much'"),
    "optimizer": ("--optimizer adam", "--optimizer=adam is not known: choose from adamw"),
    "rank": ("--rank 8", "--rank needs --optimizer compact: pass both"),
    "rank form": ("--optimizer compact --rank half", "--rank=half must be a fraction of a layer's inputs"),
    "rank range": ("--optimizer compact --rank 1.5", "rank=1.5 must be a fraction of a layer's inputs"),
    "lora": ("--lora-rank 0", "--lora-rank needs --peft lora: pass both"),
    "lora dropout": ("--peft lora --lora-dropout 1", "--lora-dropout=1.0 must be at least 0 and below 1"),
    "images of a language model": ("--images 1", "--images: GPT2Config has no vision tower"),
    "lora rank": ("--peft lora --lora-rank 0", "--lora-rank=0 must be at least 1"),
    "lora targets": ("--peft lora --lora-targets nothing", "--lora-targets=nothing"),
    "dtype": ("--device v100", "--device=v100 cannot train in bfloat16: choose another --dtype"),
    "ddp": ("--ddp 1", "--ddp needs at least 2 devices, not 1"),
    "zero": ("--zero 4 2", "--zero 4 2: ZeRO has no stage 4, choose 1, 2 or 3"),
    "budget without unit": ("--budget 20", '--budget=20 is 20 bytes, which may have been meant as "20GiB"'),
    "budget as a fraction": ("--budget 0.5", "--budget=0.5 is 0 bytes: pass a size of at least 65536 bytes, such"),
    "budget in percent": ("--budget 50%", "--budget='50%' is not a size: pass a size of at least 65536 bytes, such"),
    "budget auto": ("--budget auto", "not a fraction, or leave out --budget"),
    "modules to save": ("--modules-to-save lm_head", "--modules-to-save needs --peft lora: pass both"),
    "4 bits": ("--load-in-4bit", "--load-in-4bit needs --peft lora: pass both"),
    "4 bits in parts": ("--load-in-4bit --peft lora --fsdp 2", "--fsdp is not planned with weights of 4 bits: choose"),
    "host memory without unit": (
        "--host-memory 64",
        '--host-memory=64 is 64 bytes, which may have been meant as "64GiB"',
    ),
    "host bandwidth alone": ("--host-bandwidth 25GB", "--host-bandwidth needs --host-memory: pass both"),
    "host memory of a CPU": ("--device cpu --host-memory 64GiB", "--host-memory: a CPU has no other memory"),
}


def test_the_text_is_narrow_and_progress_is_printed_before_it(folder, capsys):
    """The text has at most 100 columns. The first line on stderr needs no torch."""
    assert main(["plan", "--model", folder, "--batch-size", "2", "--budget", "40MiB"]) == 0
    printed = capsys.readouterr()
    long_lines = [line for line in printed.out.splitlines() if len(line) > WIDTH and folder not in line]
    assert not long_lines
    progress = [line for line in printed.err.splitlines() if line.startswith("[")]
    assert progress[0].endswith("] loading torch and Transformers")
    assert progress[-1].endswith("solving for a policy within 40.00 MiB")


def test_host_memory_is_planned(plan, folder, capsys):
    options = ("--batch-size", "64", "--dtype", "fp32")
    least = plan(*options, "--budget", "40MiB")["methods"]["adacc"]["peak_bytes"]
    budget = ("--budget", str(least))
    without = plan(*options, *budget)
    slow = plan(*options, *budget, "--host-memory", "64GiB", "--host-bandwidth", "1MB")
    fast = plan(*options, *budget, "--host-memory", "64GiB", "--host-bandwidth", "100TB")
    small = plan(*options, *budget, "--host-memory", "1MiB", "--host-bandwidth", "100TB")
    assert [each["host_memory_bytes"] for each in (without, fast, small)] == [None, 64 << 30, 1 << 20]
    host_bytes = [each["policy"]["predicted_host_bytes"] for each in (without, slow, fast, small)]
    assert host_bytes[0] == host_bytes[1] == 0
    assert host_bytes[2] > host_bytes[3] > 0
    assert host_bytes[3] <= 1 << 20
    ms = [each["methods"]["adacc"]["step_ms"] for each in (without, slow, fast, small)]
    assert ms[2] < ms[3] < ms[0] == ms[1]
    command = ["plan", "--model", folder, *options, *budget, "--host-memory", "1MiB", "--host-bandwidth", "100TB"]
    assert main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "in host memory under the policy" in text
    assert "Up to 1.00 MiB of host memory per device (--host-memory) may hold activations." in text
    assert "Copies are assumed to run at 100000 GB/s in each direction" in text


def test_the_text_names_sources_and_assumptions(folder, capsys):
    assert main(["plan", "--model", folder, "--device", "v100", "--dtype", "fp16-amp"]) == 0
    text = capsys.readouterr().out
    assert "fits the budget of 28.31 GiB without adacc" in text
    for part in ("NVIDIA V100", "full recomputation", "peak: head and loss", "roofline", "outliers"):
        assert part in text


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(refusal_of, case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        raise ValueError(refusal_of(*options.split()))


def test_wrong_options_are_refused_before_torch_is_imported() -> None:
    wrong = (
        ["--device", "b200"], ["--optimizer", "adam"], ["--zero", "4", "2"], ["--fsdp", "1"], ["--budget", "20"],
        ["--budget", "much"], ["--device", "v100"], ["--lora-rank", "8"], ["--model", "/no/such/folder"],
    )  # fmt: skip
    code = (
        "import sys; from adacc_hf.cli import main\n"
        f"for options in {wrong!r}: print(main(['plan', '--model', 'demo', *options]), 'torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == [f"{USER_ERROR} False"] * len(wrong), process.stderr


def test_the_help_names_every_preset_and_has_few_options_first(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert text.partition("more options:")[0].count("\n  --") == 11
    printed = " ".join(text.split())
    assert [name for name in PRESETS if f"{name}," not in printed and f"{name})" not in printed] == []


def test_an_unknown_model_is_refused(refusal_of, tmp_path: Path):
    line = refusal_of(model=str(tmp_path / "nothing"))
    assert "is not a preset (demo, " in line
    assert "could not be loaded as a hub id or folder" in line


def test_a_model_without_a_context_needs_a_length(refusal_of):
    assert "--seq-len must be set" in refusal_of(model="demo-t5")


@pytest.mark.parametrize(("options", "head"), [(["--zero", "3", "2"], "plain"), (["--fsdp", "2"], "auto")])
def test_zero_3_is_planned_with_the_plain_head(folder, monkeypatch, options, head):
    """ZeRO 3 has the output layer's weight only during the layer's forward."""
    heads = []

    def note_head(request):
        heads.append(request.workload.adacc.head)
        raise ValueError("enough")

    monkeypatch.setattr("adacc_hf.estimate.planning.plan", note_head)
    main(["plan", "--model", folder, *options])
    assert heads == [head]
