"""Parts of measurements: models and batches, methods, gradient checks before timing, and isolated processes."""
