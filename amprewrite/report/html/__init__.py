"""Views of a plan for browsers: the HTML report, and the fragment that a notebook shows."""
