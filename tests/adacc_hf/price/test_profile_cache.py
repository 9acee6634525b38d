"""The folder of profiles: its keys, several processes at once, and foreign files."""

import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from adacc_hf.artifacts.files import PROFILES_VARIABLE
from adacc_hf.cli import USER_ERROR, main
from adacc_hf.price.profile_cache import PriceKey, ProfileCache, ProfileCacheError, default_folder

KEY = PriceKey(tape="t", shapes="s", dtype="float32", device="a GPU", torch="2.13", settings="x")
PRICES = {
    "operators": [{"name": "aten.mm.default", "ms": 1.5}],
    "activations": [{"value": 3, "name": "mlp:mm", "nbytes": 2048, "codecs": []}],
}


@pytest.fixture
def store(tmp_path, monkeypatch) -> ProfileCache:
    monkeypatch.setenv(PROFILES_VARIABLE, str(tmp_path / "folder" / "profiles"))
    return ProfileCache()


def test_prices_come_back_for_exactly_their_key(store):
    assert store.get(KEY) is None
    store.put(KEY, "GPT2Block", PRICES)
    assert store.get(KEY).prices == PRICES
    for field in fields(PriceKey):
        assert store.get(replace(KEY, **{field.name: "other"})) is None, field.name


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from adacc_hf.price.profile_cache import PriceKey, ProfileCache

key = PriceKey(tape="t", shapes="s", dtype="float32", device="a GPU", torch="2.13", settings="x")
for number in range(10):
    ProfileCache(Path(sys.argv[1])).put(replace(key, tape=f"{sys.argv[2]}-{number}"), "GPT2Block", {})
"""


def test_several_processes_write_at_once(store):
    commands = [[sys.executable, "-c", WRITER, str(store.folder), str(process)] for process in range(3)]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(store.list()) == 30


@pytest.mark.parametrize("content", ["not JSON", "[]", '{"version": 1, "record": {}}'])
def test_a_file_that_cannot_be_read_is_reported_and_cleared(store, content):
    store.put(KEY, "GPT2Block", PRICES)
    (path,) = store.folder.iterdir()
    path.write_text(content)
    for use in (store.list, lambda: store.get(KEY)):
        with pytest.raises(ProfileCacheError, match=re.escape(str(path))):
            use()
    assert store.clear() == 1
    assert store.list() == []


def test_other_files_in_the_folder_are_left_alone(store):
    store.put(KEY, "GPT2Block", PRICES)
    for name in ("profile.json", "profiles.sqlite3"):
        (store.folder / name).write_text("theirs")
    assert len(store.list()) == store.clear() == 1
    assert sorted(path.name for path in store.folder.iterdir()) == ["profile.json", "profiles.sqlite3"]


def test_prices_of_which_the_digest_alone_is_the_same_are_not_taken(store, monkeypatch):
    monkeypatch.setattr(PriceKey, "name", "same")
    store.put(KEY, "GPT2Block", PRICES)
    assert store.get(KEY).prices == PRICES
    assert store.get(replace(KEY, tape="other")) is None


def test_the_folder_is_where_caches_are(monkeypatch, tmp_path):
    monkeypatch.delenv(PROFILES_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "adacc_hf" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "adacc_hf" / "profiles"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, capsys):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for variable in (PROFILES_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ProfileCacheError, match=f"no folder for profiles .*set {PROFILES_VARIABLE} to a writable"):
        ProfileCache().put(KEY, "GPT2Block", PRICES)
    assert main(["codecs"]) == 0
    assert main(["profiles", "list"]) == USER_ERROR


def test_the_command_needs_no_torch(store):
    store.put(KEY, "GPT2Block", PRICES)
    code = (
        "import sys; from adacc_hf.cli import main; status = main(['profiles', 'list']); "
        "sys.exit(status or 3 * ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_the_command_lists_shows_and_clears(store, capsys):
    assert main(["profiles", "list"]) == 0
    assert "no profiles in" in capsys.readouterr().out
    store.put(KEY, "GPT2Block", PRICES)
    assert main(["profiles", "list"]) == 0
    number, header, line = capsys.readouterr().out.splitlines()
    assert number == f"1 profile in {store.folder}, the newest first"
    assert line.startswith(f"{KEY.name}  GPT2Block")
    assert "1.500  float32, a GPU, torch 2.13, 20" in line
    assert header.index("operators") + len("operators") == line.index("1.500") - len("     ") - 1
    assert main(["profiles", "show", KEY.name[:6]]) == 0
    assert "2.00 KiB  mlp:mm" in capsys.readouterr().out
    assert main(["profiles", "show", "zz"]) == USER_ERROR
    assert "0 profiles have names that begin with 'zz'" in capsys.readouterr().err
    assert main(["profiles", "clear"]) == 0
    assert "removed 1 profiles" in capsys.readouterr().out
    assert store.list() == []
