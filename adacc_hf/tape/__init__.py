"""Record of a block's operators: recorded once, looked up by the key of a call, replayed exactly."""
