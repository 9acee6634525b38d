"""The database of profiles: its keys, several processes at once, and files that are no database."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest

from adacc_hf.cli import USER_ERROR, main
from adacc_hf.price.price_store import VARIABLE, Key, ProfileStore, ProfileStoreError, default_path

KEY = Key(tape="t", shapes="s", dtype="float32", device="a GPU", torch="2.13", settings="x")
PRICES = {
    "operators": [{"name": "aten.mm.default", "ms": 1.5}],
    "activations": [{"value": 3, "name": "mlp:mm", "nbytes": 2048, "codecs": []}],
}


@pytest.fixture
def store(tmp_path, monkeypatch) -> ProfileStore:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "folder" / "profiles.sqlite3"))
    return ProfileStore()


def test_prices_come_back_for_exactly_their_key(store):
    assert store.get(KEY) is None
    store.put(KEY, "GPT2Block", PRICES)
    assert store.get(KEY).prices == PRICES
    for field in fields(Key):
        assert store.get(replace(KEY, **{field.name: "other"})) is None, field.name


def test_the_last_prices_of_a_key_stand(store):
    store.put(KEY, "GPT2Block", PRICES)
    store.put(KEY, "GPT2Block", {"operators": [], "activations": []})
    (row,) = store.list()
    assert row.prices["operators"] == []


def test_reading_makes_no_file(store):
    assert store.list() == []
    assert store.clear() == 0
    assert not store.path.parent.exists()


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from adacc_hf.price.price_store import Key, ProfileStore

key = Key(tape="t", shapes="s", dtype="float32", device="a GPU", torch="2.13", settings="x")
for number in range(10):
    ProfileStore(Path(sys.argv[1])).put(replace(key, tape=f"{sys.argv[2]}-{number}"), "GPT2Block", {})
"""


def test_several_processes_write_at_once(store):
    commands = [[sys.executable, "-c", WRITER, str(store.path), str(process)] for process in range(3)]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(store.list()) == 30


def test_a_locked_database_is_reported(store, monkeypatch):
    store.put(KEY, "GPT2Block", PRICES)
    monkeypatch.setattr("adacc_hf.price.price_store.WAIT_SECONDS", 0.01)
    other = sqlite3.connect(store.path)
    try:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ProfileStoreError, match=r"cannot be used \(database is locked\): free it, or set"):
            store.put(KEY, "GPT2Block", PRICES)
    finally:
        other.close()
    assert store.get(KEY).prices == PRICES


def test_a_file_that_is_no_database_is_reported_and_cleared(store):
    store.path.parent.mkdir()
    store.path.write_text("not a database, and longer than the header of one is: " + 100 * "x")
    for use in (store.list, lambda: store.get(KEY), lambda: store.put(KEY, "GPT2Block", PRICES)):
        with pytest.raises(ProfileStoreError, match=r"cannot be read .*`adacc profiles clear` sets it aside"):
            use()
    content = store.path.read_text()
    assert store.clear() is None
    assert store.aside.read_text() == content  # the path may have been mistaken
    store.put(KEY, "GPT2Block", PRICES)
    assert len(store.list()) == 1


def test_another_programs_database_is_left_as_it_is(store):
    store.path.parent.mkdir()
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("CREATE TABLE theirs (name TEXT)")
    before = store.path.read_bytes()
    for use in (store.list, lambda: store.put(KEY, "GPT2Block", PRICES)):
        with pytest.raises(ProfileStoreError, match=r"its tables are not ours.*set ADACC_HF_PROFILES if it is another"):
            use()
    assert store.path.read_bytes() == before


def test_another_format_is_reported(store):
    store.put(KEY, "GPT2Block", PRICES)
    connection = sqlite3.connect(store.path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ProfileStoreError, match="its format is 99, this release reads 1"):
        store.list()


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileStoreError, match=r"cannot be made .*writable file"):
        ProfileStore(tmp_path / "file" / "profiles.sqlite3").put(KEY, "GPT2Block", PRICES)


def test_the_file_is_where_caches_are(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "adacc_hf" / "profiles.sqlite3"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_path() == Path.home() / ".cache" / "adacc_hf" / "profiles.sqlite3"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, capsys):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for variable in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(
        ProfileStoreError, match=f"no place for the database of profiles .*set {VARIABLE} to a writable"
    ):
        ProfileStore().put(KEY, "GPT2Block", PRICES)
    assert main(["codecs"]) == 0
    assert main(["profiles", "list"]) == USER_ERROR


def test_the_command_lists_shows_and_clears(store, capsys):
    assert main(["profiles", "list"]) == 0
    assert "no profiles in" in capsys.readouterr().out
    store.put(KEY, "GPT2Block", PRICES)
    assert main(["profiles", "list"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"{KEY.name}  GPT2Block")
    assert "1.500 ms  float32  a GPU  torch 2.13" in line
    assert main(["profiles", "show", KEY.name[:6]]) == 0
    assert "2.00 KiB  mlp:mm" in capsys.readouterr().out
    assert main(["profiles", "show", "zz"]) == USER_ERROR
    assert "0 profiles have names that begin with 'zz'" in capsys.readouterr().err
    assert main(["profiles", "clear"]) == 0
    assert "removed 1 profiles" in capsys.readouterr().out
    assert store.list() == []
