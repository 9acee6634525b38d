"""The GPU tests as a runner: selection of files, and results parsed from pytest's lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adacc_hf.eval import gpu_tests
from adacc_hf.eval.gpu_tests import FILES, outcomes_of, root
from adacc_hf.eval.records.schemas import check_record

OUTPUT = """
tests/a/test_gpu.py::test_one PASSED                                     [ 20%]
tests/a/test_gpu.py::test_two[bf16] FAILED                               [ 40%]
[gw3] [ 60%] SKIPPED tests/a/test_gpu.py::test_three
[gw0] [ 80%] ERROR tests/a/test_gpu.py::test_four
tests/a/test_gpu.py::test_under_way
=================================== short test summary info ===================================
FAILED tests/a/test_gpu.py::test_two[bf16] - AssertionError: 1 is no 2
"""


def test_outcomes_are_read_off_lines_of_one_process_or_several() -> None:
    assert outcomes_of(OUTPUT) == {
        "tests/a/test_gpu.py::test_one": "PASSED",
        "tests/a/test_gpu.py::test_two[bf16]": "FAILED",
        "tests/a/test_gpu.py::test_three": "SKIPPED",
        "tests/a/test_gpu.py::test_four": "ERROR",
    }


@pytest.mark.usefixtures("checkout")
def test_every_file_with_tests_for_a_gpu_is_run() -> None:
    own = Path(__file__).name
    gpu_files = {
        str(path.relative_to(root()))
        for path in (root() / "tests").rglob("test_*.py")
        if path.name != own and "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    }
    assert gpu_files == set(FILES)


@pytest.mark.usefixtures("checkout")
def test_tests_for_a_gpu_are_found_where_what_others_need_is_missing() -> None:
    code = (
        "import sys, pytest\n"
        "sys.modules |= dict.fromkeys(['datasets', 'jsonschema', 'lm_eval', 'trl', 'peft', 'matplotlib'])\n"
        "sys.exit(pytest.main(['-m', 'gpu', '--collect-only', '-q', '-p', 'no:cacheprovider']))"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=root(), capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-3000:]
    assert {line.partition("::")[0] for line in process.stdout.splitlines() if "::" in line} == set(FILES)


@pytest.mark.usefixtures("checkout")
def test_a_failing_file_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    ends = {FILES[0]: (1, OUTPUT), FILES[1]: (0, OUTPUT), FILES[2]: (None, OUTPUT)}
    output = tmp_path / "gpu_tests.json"
    argv = ["--device=cuda", "--files", *ends, "--output", str(output)]
    assert gpu_tests.main(argv, lambda file, timeout_s: ends[file]) == 1
    record = json.loads(output.read_text())
    check_record(record)
    points = record["train_info"]["points"]
    assert [points[file]["status"] for file in ends] == ["error", "measured", "timeout"]
    assert points[FILES[0]]["failed"] == ["tests/a/test_gpu.py::test_four", "tests/a/test_gpu.py::test_two[bf16]"]
    assert "1 is no 2" in points[FILES[0]]["reason"]
    assert "- tests/a/test_gpu.py::test_four" in output.with_suffix(".md").read_text()


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="use --device=cuda"):
        gpu_tests.main([])
