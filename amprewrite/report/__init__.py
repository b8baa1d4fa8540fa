"""Views of a cast plan: sentences, listing, SVG, DOT, HTML report, Model Explorer overlay. They read a plan and change nothing."""
