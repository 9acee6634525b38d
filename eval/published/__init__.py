"""Training memory that others measured and published, and what the planner says of it."""
