"""Profiles: records a model's blocks to measure operators, codecs and the memory of a step; the cache of prices."""
