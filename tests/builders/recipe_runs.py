"""Command lines of the recipes."""

import sys


def with_setting(argv, **settings):
    """Return `argv` with further settings. argparse uses the last of repeated options."""
    return [*argv, *(text for name, value in settings.items() for text in (f"--{name}", str(value)))]


def command_line(recipe, argv, monkeypatch):
    """Return the exit status of the recipe with the options `argv`."""
    monkeypatch.setattr(sys, "argv", [f"{recipe.__name__}.py", *argv])
    return recipe.command_line()


def assert_one_error(recipe, argv, message, monkeypatch, capsys):
    """Assert that the recipe ends with status 2 and one message, which contains `message`. Return the output."""
    assert command_line(recipe, argv, monkeypatch) == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"{recipe.__name__}.py: error: " in error
    assert "Traceback" not in error
    return error
