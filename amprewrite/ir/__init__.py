"""Plain data that passes read and write: the op graph, evidence on numbers, policies, plans, prices, and the base class of passes."""
