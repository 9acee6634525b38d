"""Tiny models of Transformers' architectures, and batches for them."""
