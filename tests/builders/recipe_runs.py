"""Command lines of the recipes."""


def with_setting(argv, **settings):
    """Return `argv` with further settings. argparse uses the last of repeated options."""
    return [*argv, *(text for name, value in settings.items() for text in (f"--{name}", str(value)))]
