"""Explanation and report of a policy for compiled graphs."""

from dataclasses import replace
from pathlib import Path

import pytest

from adacc_hf.artifacts.policy import RETAIN, Action, Choice
from adacc_hf.cli import main
from adacc_hf.compiler import CompiledPolicy, RegionPlan
from adacc_hf.compiler.compiled_policy import GraphTensor
from adacc_hf.compiler.graph_report import compiled_report, explain_compiled

INT8 = Choice(action=Action.COMPRESS, codec="int8", options=(("group_size", 64),))


def tensor(name: str, module: str, action: str, stored_bytes: int, codec: str | None = None) -> GraphTensor:
    return GraphTensor(
        name=name, module=module, operator="aten.mul.Tensor", shape=(8, 32), dtype="float32", nbytes=1024,
        action=action, codec=codec, stored_bytes=stored_bytes,
    )  # fmt: skip


@pytest.fixture
def policy() -> CompiledPolicy:
    blocks = RegionPlan(
        digest="a", region="0", calls=3, plain_bytes=3072, stored_bytes=1312, peak_bytes=2336, overhead_ms=1.5,
        stored=(("gelu", INT8), ("norm", RETAIN)),
        tensors=(
            tensor("norm", "h.0.norm", "retain", 1024),
            tensor("gelu", "h.0.mlp.act", "compress", 288, "int8"),
            tensor("mul", "", "recompute", 0),
        ),
    )  # fmt: skip
    loss = RegionPlan(digest="b", region="2", calls=1, plain_bytes=64, stored_bytes=64, reason="everything fits")
    return CompiledPolicy(share=0.5, regions=(blocks, loss))


HISTORY = [
    {"step": 1, "event": "policy", "region": "0", "stored_bytes": 1312},
    {"step": 2, "event": "change", "share": 0.5, "reason": "a measured peak of 2 KiB"},
    {"step": 4, "event": "memory", "measured_peak_bytes": 4000, "budget_bytes": 4096},
]


def test_explanation_has_totals_over_calls_and_a_line_per_tensor(policy: CompiledPolicy) -> None:
    lines = explain_compiled(policy).splitlines()
    assert lines[0] == (
        "2 compiled regions, 4 calls per micro-batch, each allowed 0.5 of its bytes: 3.91 KiB of 9.06 KiB stored "
        "(43.1 %), overhead 4.50 ms"
    )
    assert lines[2].endswith("; called 3 times")
    row = next(line for line in lines if "h.0.mlp.act" in line)
    assert row.split() == ["h.0.mlp.act", "gelu", "(mul.Tensor)", "float32[8,", "32]", "1.00", "KiB", "compress",
                           "int8", "288", "B"]  # fmt: skip
    assert "region 2: partitioned by torch.compile: everything fits" in lines


@pytest.mark.parametrize(
    ("allowed", "words"),
    [({"share": None}, "the least possible"), ({"share": None, "budget_bytes": 2048}, "each allowed 2.00 KiB")],
    ids=["least", "bytes"],
)
def test_explanation_names_what_was_allowed(policy: CompiledPolicy, allowed: dict, words: str) -> None:
    assert words in explain_compiled(replace(policy, **allowed)).splitlines()[0]


def test_report_has_map_run_and_events(policy: CompiledPolicy, tmp_path: Path) -> None:
    text = compiled_report(policy=policy, history=HISTORY).save(tmp_path / "out").read_text()
    for heading in ("## Policy map", "## The run", "## Tensors", "## Events"):
        assert heading in text
    assert "| 0 | 3 | 3.00 KiB | 1.28 KiB | 42.7 % | 2.28 KiB | 1.50 | planned |" in text
    for picture in ("policy_map.png", "timeline.png"):
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")
        assert picture in text
    assert (tmp_path / "out" / "report.html").is_file()


def test_command_tells_the_file_by_what_it_says_it_is(policy, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "adacc_compiled.json"
    policy.save(file)
    assert main(["explain", str(file)]) == 0
    assert capsys.readouterr().out == f"{explain_compiled(policy)}\n"
    assert main(["report", str(file), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.md").is_file()
    assert main(["explain", str(file), "--profile", "profile.json"]) == 2
    assert "is for compiled graphs, which have no profile" in capsys.readouterr().err
