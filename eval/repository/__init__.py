"""Runners that measure the figures of this repository and write its pages. The wheel does not have them."""
