"""Execution and validation of a block's calls under its plan. The rules are in the NOTE of policy_handle.py."""
