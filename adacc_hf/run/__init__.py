"""Application of policies to a model; execution and validation of blocks' calls. Rules: NOTE of policy_handle.py."""
