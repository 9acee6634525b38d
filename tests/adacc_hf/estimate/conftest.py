"""A small GPT-2 to plan, and plans of it by the command line."""

import json

import pytest
from transformers import GPT2Config

from adacc_hf.cli import USER_ERROR, main


@pytest.fixture(scope="session")
def planned_config() -> GPT2Config:
    """A GPT-2 of three blocks and a context of 64 tokens."""
    return GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=64, vocab_size=500, bos_token_id=0, eos_token_id=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, planned_config) -> str:
    """A folder with the configuration of a small GPT-2."""
    path = tmp_path_factory.mktemp("model")
    planned_config.save_pretrained(path)
    return str(path)


@pytest.fixture
def plan(folder, capsys):
    """`plan(*options)`: the record that `adacc plan --json` prints."""

    def run(*options: str, model: str = folder) -> dict:
        status = main(["plan", "--model", model, "--json", *options])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return json.loads(printed.out)

    return run


@pytest.fixture
def refusal_of(folder, capsys):
    """`refused(*options)`: the one line on stderr of a plan that is refused."""

    def run(*options: str, model: str = folder) -> str:
        assert main(["plan", "--model", model, *options]) == USER_ERROR
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("adacc plan")]
        return line

    return run
