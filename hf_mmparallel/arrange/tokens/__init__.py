"""
Assignment of the tokens of a packed row to context-parallel ranks.

Pure functions of numbers; imported by the data loader, which permutes tokens, and by the planner.
"""
