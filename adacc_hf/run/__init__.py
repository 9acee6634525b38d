"""A block under its plan, call by call. The rules are in policy_handle.py's NOTE."""
