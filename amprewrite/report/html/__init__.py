"""A plan in a browser: the HTML report, and what a notebook shows."""
