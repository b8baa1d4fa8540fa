"""What crosses the library's edge, checked: arguments, JSON, text that is printed, files that are written."""
