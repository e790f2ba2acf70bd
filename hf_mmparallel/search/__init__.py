"""
The best plan for a model, a dataset and a number of ranks, found before a rank is used.

Uses `steps` and below and no `torch.distributed`; imported by the planner.
"""
