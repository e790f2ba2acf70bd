"""
Attention kernels: the definition of bitfield attention, its CPU path, Triton, its registration in transformers.

Uses nothing of the package but `_environment`; may be imported by everything above.
"""
