"""Predictions of memory and time before a run (`adacc plan`): model presets, a table of devices, and fake models."""
