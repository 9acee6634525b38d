"""What is measured, and how: models and batches, methods, gates before the clock, and processes of their own."""
