"""Explanations of policies as text, and reports of runs as Markdown and HTML with pictures."""
