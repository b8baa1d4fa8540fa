"""Plain data that passes read and write: the op graph, evidence about values, policies, plans, prices. Also the base class of passes."""
