"""The benchmark of codec bandwidth: its byte counts, the settings that it refuses to time, and a run."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adacc_hf.eval.records.ledger import Ledger
from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.repository import codec_bandwidth
from adacc_hf.eval.repository.codec_bandwidth import Contender, Row, time_contender
from adacc_hf.eval.repository.codecs import main
from adacc_hf.reports.run_record import Settings, Spread


def test_bytes_moved_are_tensor_and_payload() -> None:
    spread = {ms: Spread.of([ms]) for ms in (1.0, 2.0, 4.0)}
    row = Row(
        what="half",
        shape=(1000, 1000),
        dtype="float32",
        tensor_bytes=4_000_000,
        payload_bytes=2_000_000,
        copy_ms=spread[1.0],
        encode_ms=spread[2.0],
        decode_ms=spread[4.0],
        round_trip_error=0.25,
    )
    cells = row.cells()
    assert cells["rate"] == "2.00"
    assert cells["copy GB/s"] == "8.0"
    assert cells["encode GB/s"] == "3.0"
    assert cells["encode / copy GB/s"] == "38%"  # 3.0 / 8.0
    assert cells["decode time / copy"] == "4.00"


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "Goal on NVIDIA H100 80GB HBM3: 85% of a copy. Missed by: int8 encode (80%)."),
        ("NVIDIA H200", "Goal on NVIDIA H200: 70% of a copy. Missed by: none."),
        ("NVIDIA A100-SXM4-80GB", None),
        (None, None),
    ],
)
def test_each_card_has_its_own_goal(tmp_path: Path, card: str | None, expected: str | None) -> None:
    """Speeds of other libraries' code do not count towards a card's goal."""
    settings = Settings(runner="codec_bandwidth", output=tmp_path / "x.json")
    spread = {"low": 1.0, "median": 1.0, "high": 1.0}
    point = {
        "status": "measured",
        "what": "int8",
        "shape": [10],
        "dtype": "bfloat16",
        "round_trip_error": 0.0,
        "tensor_bytes": 1000,
        "payload_bytes": 1000,
        "copy_ms": spread,
        "encode_ms": spread,
        "decode_ms": spread,
    }
    slow = point | {"encode_ms": dict.fromkeys(spread, 1.25)}
    points = {"bandwidth, int8": slow, "bandwidth, plain": slow | {"what": "plain torch reference"}}
    info = {"samples": 1} | ({"card": card} if card else {})
    text = codec_bandwidth.report_text(Ledger(settings, info, points))
    assert [line for line in text.splitlines() if line.startswith("Goal")] == ([expected] if expected else [])


def test_a_broken_codec_is_not_timed() -> None:
    broken = Contender("broken", lambda x: x, torch.zeros_like, lambda x: x.nbytes)
    with pytest.raises(
        WrongResultError, match=r"broken: not timed, since the round trip has a relative error of 1.000"
    ):
        time_contender(broken, torch.ones(8, 8), samples=1)


def test_a_rival_that_cannot_run_here_is_left_out_in_words(monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise AttributeError("no such kernel")

    functional = ModuleType("functional")
    functional.quantize_4bit = fail
    functional.quantize_blockwise = lambda x, blocksize: (x, None)
    functional.dequantize_blockwise = lambda x, _: x
    package = ModuleType("bitsandbytes")
    package.functional, package.__spec__ = functional, ModuleSpec("bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional", raising=False)  # the import's next place
    names = [rival.name for rival in codec_bandwidth.rivals(torch.ones(8, 64), with_compile=False)]
    assert names == ["plain torch reference", "bitsandbytes quantize_blockwise"]
    expected = "bitsandbytes quantize_4bit nf4 is left out of the comparison: AttributeError: no such kernel"
    assert expected in capsys.readouterr().err
    del package.functional
    assert len(list(codec_bandwidth.rivals(torch.ones(8, 64), with_compile=False))) == 1
    assert "bitsandbytes is left out of the comparison: ImportError" in capsys.readouterr().err


def test_attention_is_that_of_the_whole_micro_batch() -> None:
    """On a GPU one sequence's softmax and mask would fit into the cache."""
    block = codec_bandwidth.Block(width=16, inner=64, heads=2)
    settings = Settings(runner="codec_bandwidth", output=Path("unused"))
    pairs = codec_bandwidth.contenders(block, torch.bfloat16, 1024, False, settings)
    shapes = {contender.name: tuple(tensor.shape) for contender, tensor in pairs}
    assert shapes["asymmetric_int4"] == shapes["bitmask"] == (2, 2, 512, 512)
    assert shapes["outlier_int4"] == (1024, 64)


def test_no_line_is_dirty_when_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """More bytes than a cache holds are read before each sample, and nothing is written."""
    monkeypatch.setitem(codec_bandwidth.FLUSH_BYTES, "cpu", 2**20)
    order: list[str] = []

    class RecordOrder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            order.append(
                f"{func.overloadpacket.__name__} {args[0].nbytes if args and hasattr(args[0], 'nbytes') else 0}"
            )
            return func(*args, **(kwargs or {}))

    with RecordOrder():
        codec_bandwidth.sample_ms(lambda: order.append("run"), "cpu", samples=1)
    assert [name for name in order if not name.startswith("zeros")] == [f"sum {2**20}", "run"] * 3


def test_every_codec_and_rival_gets_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(codec_bandwidth.FLUSH_BYTES, "cpu", 1024)
    threads = torch.get_num_threads()
    output = tmp_path / "bandwidth.json"
    options = ["--only", "bandwidth", "--tokens", "8", "--samples", "1", "--dtype", "bfloat16", "float32"]
    try:
        main([*options, "--output", str(output)])
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(output.read_text())["train_info"]["points"].values()
    names = {row["what"] for row in rows}
    codecs = {"outlier_int4", "token_int4", "int8", "fp8", "channel_int4", "asymmetric_int4", "bitmask"}
    assert names >= codecs | {"plain torch reference", "outlier_int4 num_outliers=8"}
    assert {row["dtype"] for row in rows if row["what"] == "int8"} == {"bfloat16", "float32"}
    assert all(row["encode_ms"]["median"] > 0 for row in rows)
    table = capsys.readouterr().out
    assert table.count("\n| ") == len(rows) + 2
    assert output.with_suffix(".md").read_text() in table
    errors = {row["what"]: row["round_trip_error"] for row in rows if row["dtype"] != "bfloat16"}
    assert errors["bitmask"] == 0.0 < errors["int8"] < errors["token_int4"]
    assert "encode / copy GB/s" in table


def test_sizes_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tokens", "0"])
    assert "argument --tokens: '0' is not a whole number of 1 or more" in capsys.readouterr().err
