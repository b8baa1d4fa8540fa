"""Run captured graphs: store and run the graphs of each called module, and renew them if hooks, weights or decisions change."""
