"""Run captured graphs: store the graphs of each module that is called, run them, and plan them anew after certain events."""
