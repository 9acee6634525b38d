"""`adacc plan`: predicts memory and time before a run, with presets, a table of devices, and fake models."""
