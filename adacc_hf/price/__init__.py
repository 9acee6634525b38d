"""Profiling of a model: recorded blocks, cached times of operators and codecs, and peaks of memory."""
