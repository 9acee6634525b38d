"""Measurement of a profile: operator and codec prices, memory of a step, and the cache of prices."""
