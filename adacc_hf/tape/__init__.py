"""Tapes: records of a block's operators, from which replay recomputes tensors. Guards and call keys select a call's
tape."""
