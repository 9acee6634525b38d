"""Records that grow point by point, survive a killed run, and belong to one run."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from adacc_hf.eval.records.ledger import Ledger, RecordError, lock_folder, open_ledger
from adacc_hf.eval.records.records import OUT_OF_TIME
from adacc_hf.reports.run_record import Settings


class KilledError(Exception):
    """Error that represents any reason for which a run ends early."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(runner="letters", output=tmp_path / "record.json")


def run(settings: Settings, keys: str, resume: bool | None = None, status: str = "measured", **run_info: int) -> str:
    """Return the points that a run with one point per letter of `keys` measured. "!" ends the run early."""
    measured_keys = []
    with open_ledger(settings, {"letters": "abc", **run_info}, resume) as ledger:
        for key in keys:
            if key == "!":
                raise KilledError
            ledger.measure(
                key, lambda key=key: measured_keys.append(key) or {"status": status, "order": len(measured_keys)}
            )
        ledger.finish(total=len(ledger.points))
    return "".join(measured_keys)


def load_record(settings: Settings) -> dict:
    return json.loads(settings.output.read_text())


def test_a_killed_run_goes_on_where_it_stopped(settings: Settings) -> None:
    with pytest.raises(KilledError):
        run(settings, "ab!c")
    assert load_record(settings)["meta_info"]["status"] == "running"
    assert run(settings, "abc") == "c"
    record = load_record(settings)
    assert record["meta_info"]["status"] == "complete"
    assert list(record["train_info"]["points"]) == ["a", "b", "c"]
    assert record["train_info"]["total"] == 3


def test_a_complete_record_is_measured_anew_unless_resumed(settings: Settings) -> None:
    assert run(settings, "abc") == "abc"
    assert run(settings, "abc", resume=True) == ""
    assert run(settings, "abc") == "abc"
    assert run(settings, "abc", resume=False) == "abc"


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_what_may_be_the_machines_fault_is_tried_again(settings: Settings, status: str) -> None:
    run(settings, "ab", status=status)
    assert run(settings, "abc", resume=True) == "abc"


def test_where_time_is_short_failures_wait_and_no_point_begins_that_may_take_longer(settings: Settings) -> None:
    in_time = replace(settings, until=time.monotonic() + 60)
    run(settings, "ab", status="error")
    assert run(in_time, "abc", resume=True) == "c"
    with open_ledger(in_time, {}, False) as ledger:
        ledger.measure("short", lambda: {"status": "measured"})
        ledger._longest_s = 61.0
        with pytest.raises(SystemExit) as exit_info:
            ledger.measure("too long", lambda: pytest.fail("there is no time for it"))
    assert exit_info.value.code == OUT_OF_TIME
    assert list(load_record(settings)["train_info"]["points"]) == ["short"]
    assert load_record(settings)["meta_info"]["status"] == "running"


@pytest.mark.parametrize("status", ["out_of_memory", "cannot_run", "red"])
def test_results_without_a_time_are_kept(settings: Settings, status: str) -> None:
    run(settings, "ab", status=status)
    assert run(settings, "abc", resume=True) == "c"


def test_another_runs_record_is_not_continued(settings: Settings) -> None:
    with pytest.raises(KilledError):
        run(settings, "ab!", batch=1)
    with pytest.raises(RecordError, match=r"measured with another batch: .* --no-resume"):
        run(settings, "abc", resume=True, batch=2)
    assert run(settings, "abc", batch=2) == "abc"


def test_a_damaged_record_is_reported_and_kept(settings: Settings) -> None:
    settings.output.write_text("{")
    with pytest.raises(RecordError, match="is not JSON"):
        run(settings, "abc", resume=True)
    settings.output.write_text('{"unknown": 1}')
    with pytest.raises(RecordError, match="another kind of record"):
        run(settings, "abc", resume=True)


def test_two_runs_in_one_folder_are_refused(settings: Settings) -> None:
    with lock_folder(settings.output.parent), pytest.raises(RecordError, match=r"locked by another run, .*--output"):
        run(settings, "abc")
    assert run(settings, "abc") == "abc"


def test_a_record_can_be_reported_on_again(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    with open_ledger(settings, {"letters": "a"}, None) as ledger:
        ledger.measure("a", lambda: {"status": "measured"})
        ledger.finish(pair=(1, 2))
        ledger.publish("the report\n")
    assert settings.output.with_suffix(".md").read_text() == "the report\n"
    assert capsys.readouterr().out == f"the report\n\nsaved as {settings.output}\n"
    loaded = Ledger.load(settings.output)
    assert (loaded.settings, loaded.points) == (settings, ledger.points)
    assert (loaded.run_info["letters"], loaded.run_info["runner"], loaded.summary) == ("a", "letters", {"pair": [1, 2]})
