"""Layout of a recipe's `--help`: the recipe's docstring with line breaks, and a short usage line."""

import argparse
from typing import Any


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Formatter that keeps the line breaks of the description and adds the defaults to the settings' texts."""


def parser_settings(docstring: str | None) -> dict[str, Any]:
    """Return keyword arguments of a recipe's parser. `docstring` is the recipe's and becomes the description.

    A recipe accepts about 150 settings. The usage line does not repeat these settings, because the list below the usage
    line has all settings.
    """
    return {
        "description": docstring,
        "usage": "%(prog)s [--SETTING VALUE ...]",
        "formatter_class": HelpFormatter,
        "allow_abbrev": False,
    }
