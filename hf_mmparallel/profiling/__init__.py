"""
Measurements for the predictions: the device and its links, and the times and memory of a model's layers.
Uses `modeling`, `cost` and `world`; imported by the planner, the Trainer and the command line.
"""
