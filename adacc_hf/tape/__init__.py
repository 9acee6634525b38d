"""The record of a block's operators: made once, known again by what a call is given, replayed exactly."""
