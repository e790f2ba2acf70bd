"""
Times of a model's layers, measured on one device.

Uses `modeling` and `cost`; imported by the command line.
"""
