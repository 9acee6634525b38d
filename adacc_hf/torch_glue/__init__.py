"""Interface to torch and Transformers: their private names, differences between releases, and missing functions."""
