"""Both measurements of codecs, gradient error and bandwidth, in one record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from adacc_hf.eval.repository import codec_bandwidth, codecs, gradient_error
from adacc_hf.eval.repository.gradient_error import Scheme
from adacc_hf.eval.trials.workload import Workload

INT8 = Scheme(name="int8", group_size=64, rounding="nearest")


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_error, "codec_schemes", lambda: [INT8])
    monkeypatch.setattr(gradient_error, "layer_specific_schemes", list)
    monkeypatch.setitem(codec_bandwidth.FLUSH_BYTES, "cpu", 1024)


@pytest.mark.usefixtures("_few")
def test_a_cut_run_completes_the_same_record(tiny: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, workload = tmp_path / "codecs.json", replace(tiny, attention="eager")
    argv = ["--steps", "1", "--batches", "1", "--tokens", "8", "--samples", "1", "--output", str(output)]

    def killed(*_) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gradient_error.Probe, "codec_errors", killed)
        with pytest.raises(KeyboardInterrupt):
            codecs.main(argv, workload)
    partial_points = json.loads(output.read_text())["train_info"]["points"]
    assert codecs.main(argv, workload) == 0
    points = json.loads(output.read_text())["train_info"]["points"]
    assert {key: points[key] for key in partial_points} == partial_points
    assert points.keys() - partial_points.keys() == {"gradient, int8, group_size=64, rounding=nearest"}
    report = output.with_suffix(".md").read_text()
    assert "Relative L2 error of the whole gradient" in report
    assert "| encode GB/s |" in report
