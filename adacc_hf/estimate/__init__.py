"""Predictions of memory and time before a run: fake models whose forward and backward run without the device."""
