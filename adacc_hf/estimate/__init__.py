"""Predictions of memory and time for runs that are not started, with fake tensors on a device that is not present."""
