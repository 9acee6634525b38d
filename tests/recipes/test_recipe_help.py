"""`--help` of each recipe: a short usage line, the docstring as written, then the recipe's own settings."""

import importlib

import pytest

FIRST_SETTING = {"gpt2_pile": "--model MODEL", "sft_lora": "--chats CHATS"}


@pytest.mark.parametrize("name", FIRST_SETTING)
def test_help_has_a_short_usage_the_docstring_and_the_settings(name: str, capsys: pytest.CaptureFixture[str]):
    if name == "sft_lora":
        pytest.importorskip("trl", reason="the sft extra installs trl")
        pytest.importorskip("peft", reason="the sft extra installs peft")
    recipe = importlib.import_module(name)
    with pytest.raises(SystemExit) as end:
        recipe.parse_settings(["--help"])
    assert end.value.code == 0
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    assert usage.endswith("[--SETTING VALUE ...]")
    assert "\n" not in usage
    assert rest.startswith(recipe.__doc__.strip())
    own_settings = rest[len(recipe.__doc__) :]
    assert 0 < own_settings.find(FIRST_SETTING[name]) < own_settings.find("--output_dir")
