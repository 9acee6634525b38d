"""Tapes: records of a block's operators, from which replay recomputes values. Guards and call keys select the tape."""
