"""Profiling of a model. Blocks are recorded, operators and codecs are timed, and peaks of memory are measured and
predicted. Measurements are cached."""
