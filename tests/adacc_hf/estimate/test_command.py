"""adacc plan: what it prints and writes, and the options that it refuses."""

from pathlib import Path

import pytest

from adacc_hf.cli import main


def test_the_report_is_written(plan, tmp_path):
    plan("--no-largest", "--html", str(tmp_path / "report"))
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "full recomputation" in page
    assert "tokens per device, sdpa attention" in page
    assert "without adacc: plain training peaks at" in page
    assert "roofline" in page


def test_the_report_says_that_nothing_fits(plan, tmp_path):
    small = plan("--batch-size", "1", "--no-largest")["methods"]["adacc"]["peak_bytes"]
    plan("--batch-size", "64", "--no-largest", "--budget", str(small), "--html", str(tmp_path / "report"))
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert ": the least possible peak is" in page
    assert "The policy shown is full recomputation, because no policy fits the budget." in page


def test_the_text_names_sources_and_assumptions(folder, capsys):
    assert main(["plan", "--model", folder, "--device", "v100", "--dtype", "fp16-amp", "--no-largest"]) == 0
    text = capsys.readouterr().out
    assert "fits 28.31 GiB without adacc" in text
    for part in ("NVIDIA V100", "full recomputation", "largest batch", "peak: head and loss", "roofline", "outliers"):
        assert part in text


REFUSED = {
    "device": (["--device", "b200"], "--device=b200 is not in the table of devices: choose from h100"),
    "batch": (["--batch-size", "0"], "--batch-size=0 must be at least 1"),
    "short": (["--seq-len", "1"], "--seq-len=1 is outside its range \\(2 to 64"),
    "long": (["--seq-len", "65"], "--seq-len=65 is outside its range \\(2 to 64, the model's context\\)"),
    "budget": (["--budget", "1MiB"], "--budget=1.00 MiB is below the .* MiB that training takes .*--fsdp N"),
    "budget form": (["--budget", "much"], "--budget='much'"),
    "optimizer": (["--optimizer", "adam"], "--optimizer=adam is not known: choose from adamw"),
    "rank": (["--rank", "8"], "--rank=8 needs --optimizer compact: pass both"),
    "rank form": (["--optimizer", "compact", "--rank", "half"], "--rank=half must be a fraction of a layer's inputs"),
    "rank range": (["--optimizer", "compact", "--rank", "1.5"], "rank=1.5 must be a fraction of a layer's inputs"),
    "lora": (["--lora-rank", "8"], "--lora-rank needs --peft lora: pass both"),
    "lora rank": (["--peft", "lora", "--lora-rank", "0"], "--lora-rank=0 must be at least 1"),
    "lora targets": (["--peft", "lora", "--lora-targets", "nothing"], "--lora-targets=nothing"),
    "dtype": (["--device", "v100"], "--device=v100 cannot train in bfloat16: choose another --dtype"),
    "ddp": (["--ddp", "1"], "--ddp needs at least 2 devices, not 1"),
    "zero": (["--zero", "4", "2"], "--zero 4 2: ZeRO has no stage 4, choose 1, 2 or 3"),
    "outliers": (["--outlier-share", "2"], "--outlier-share=2.0 is outside 0 to 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(refusal_of, case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        raise ValueError(refusal_of(*options))


def test_an_unknown_model_is_refused(refusal_of, tmp_path: Path):
    line = refusal_of(model=str(tmp_path / "nothing"))
    assert "is not a preset (demo, " in line
    assert "could not be loaded as a hub id or folder" in line


def test_a_model_without_a_context_needs_a_length(refusal_of):
    assert "--seq-len must be set" in refusal_of(model="demo-t5")
