"""Tapes: records of a block's operators. Guards and the key of a call select the tape, which replay runs exactly."""
