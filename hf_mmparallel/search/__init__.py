"""
Finds the best plan for a model, a dataset and a number of ranks, before training starts.

Uses `steps` and below and no `torch.distributed`; imported by the planner.
"""
