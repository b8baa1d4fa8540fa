"""A plan in a browser: the HTML report, and the view in a notebook."""
