"""JSON files are complete or absent."""

from dataclasses import dataclass

import pytest

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import COMPILED_FILE, POLICY_FILE, policy_file, read_json, write_json


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "a" / "b" / "record.json"
    write_json(path, {"é": [1, 2.5, None]})
    assert read_json(path, AdaccError, "record") == {"é": [1, 2.5, None]}


@dataclass
class Pair:
    left: object
    right: object


@pytest.mark.parametrize("indent", [1, None])
def test_dataclasses_are_written_by_their_fields(tmp_path, indent):
    path = tmp_path / "record.json"
    write_json(path, {"pairs": (Pair(1, Pair("a", None)),)}, indent)
    assert read_json(path, AdaccError, "record") == {"pairs": [{"left": 1, "right": {"left": "a", "right": None}}]}
    assert len(path.read_text().splitlines()) == (1 if indent is None else 11)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, 1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, [1, object()])
    assert read_json(path, AdaccError, "record") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"record file .*none\.json does not exist"):
        read_json(tmp_path / "none.json", AdaccError, "record")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", 100_000 * b"["], ids=["empty", "cut", "bytes", "deep"])
def test_a_file_that_is_not_json_is_refused_by_the_callers_error(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(AdaccError, match=r"record file .*record\.json is not JSON"):
        read_json(path, AdaccError, "record")


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"record file .* is a folder: name the record file in it"):
        read_json(tmp_path, AdaccError, "record")


def test_the_policy_file_of_a_folder_is_found(tmp_path):
    path = tmp_path / "policy.json"
    assert policy_file(path) == path, "another path is not changed"
    with pytest.raises(FileNotFoundError, match=r"has no policy file, adacc_policy\.json: pass the folder of a run"):
        policy_file(tmp_path, (POLICY_FILE,))
    (tmp_path / COMPILED_FILE).touch()
    assert policy_file(str(tmp_path)) == tmp_path / COMPILED_FILE
    (tmp_path / POLICY_FILE).touch()
    assert policy_file(tmp_path) == tmp_path / POLICY_FILE
    assert policy_file(tmp_path, (COMPILED_FILE,)) == tmp_path / COMPILED_FILE
