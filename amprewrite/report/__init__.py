"""Views of a cast plan: sentences, listing, SVG, DOT, HTML report, Model Explorer overlay. A view reads a plan and changes nothing."""
