"""`adacc plan`: predicts memory and time before a run, with fake models that run without the device."""
