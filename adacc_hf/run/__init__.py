"""Application of policies to a model: execution of calls of blocks, by the rules in policy_handle.py."""
