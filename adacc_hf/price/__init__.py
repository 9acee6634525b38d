"""Profiles: recorded blocks, times of operators, codecs of activations, memory of a step, and the cache of times."""
