"""What people look at: a policy explained, and the report of a run with its pictures."""
