"""
From the samples of a global batch to the arrangement, the program and the predicted time of its step.
Uses plans, arrangements, costs and schedules; imported by the search, and by data, runtime and Trainer at every step.
"""
