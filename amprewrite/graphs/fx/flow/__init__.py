"""How values go on in a captured graph: in many small steps, and to many readers."""
