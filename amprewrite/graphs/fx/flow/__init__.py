"""How values go on in a captured graph: in many small steps, to many readers, and beyond the range."""
