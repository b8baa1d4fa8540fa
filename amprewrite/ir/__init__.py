"""Plain data that passes read and write: the op graph, facts about numbers, policies, plans, prices. Also the base class of passes."""
