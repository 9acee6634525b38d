"""A block under its plan, call by call. The rules are in executor.py's NOTE."""
