"""Options that runners share, and the settings that they become."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adacc_hf.eval.records.command_line import CLOCKS, parse, runner_parser
from adacc_hf.reports.run_record import Settings


def parsed(*argv: str) -> Settings:
    return parse(runner_parser("bench", ""), argv, clock=True)[1]


def test_settings_take_effect() -> None:
    parsed("--threads", "2")
    assert torch.get_num_threads() == 2


def test_each_device_has_a_record_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parsed().output == Path("runs/eval/cpu/bench.json")
    assert parsed("--device", "cuda").output == Path("runs/eval/cuda/bench.json")
    assert parsed("--device", "cuda", "--output", "mine.json").output == Path("mine.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_settings_refuse_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="sees no CUDA device: use --device=cpu"):
        parsed("--device", "cuda")


BUSY = "import time\nwhile time.process_time() < 0.2: pass"


def test_cpu_time_counts_finished_children() -> None:
    start = CLOCKS["cpu"]()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert CLOCKS["cpu"]() - start >= 0.2
