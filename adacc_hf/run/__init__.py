"""Execution of a block under its plan, call by call. The rules are in the NOTE of policy_handle.py."""
