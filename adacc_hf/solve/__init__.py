"""Solver for the policies of blocks: integer programs, and a search for the fastest policy within a memory budget."""
