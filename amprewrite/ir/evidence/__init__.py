"""Evidence by which passes choose the format of each op, low or fp32: ranges of values, constants that a low format cannot hold, values
that count something (positions, lengths), summands of linear ops, formats of the same ops in earlier graphs, and accuracy searches.
"""
