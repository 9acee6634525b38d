"""What a profile is made of: operators, codecs and the moments of a step, timed, counted and kept for the next run."""
