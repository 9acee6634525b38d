"""Application of policies to a model: execution and validation of calls of blocks, by the rules in policy_handle.py."""
