"""Explanations of policies, and reports of runs with their pictures."""
