"""
Measurement of the times and memory of a model's layers on one device.

Uses `modeling` and `cost`; imported by the command line.
"""
