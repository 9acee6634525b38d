"""Plans for runs that were never started: a model without memory, on a device that need not be here."""
