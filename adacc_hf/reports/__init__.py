"""Explanations of policies of blocks, and reports of runs with their pictures."""
