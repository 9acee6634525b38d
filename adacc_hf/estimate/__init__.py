"""Predictions of memory and time before a run, by fake models whose forward and backward need no device."""
