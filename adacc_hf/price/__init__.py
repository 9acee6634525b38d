"""Profiling of a model: recording of blocks, measured times and codecs, predicted peaks, cache of measurements."""
