"""Pictures of a plan: SVG and PNG drawings, DOT text for Graphviz, and node data for Model Explorer."""
