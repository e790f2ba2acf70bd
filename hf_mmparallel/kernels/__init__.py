"""
Attention kernels: the definition of bitfield attention, its CPU path, Triton, its registration in transformers.
Imports nothing of the package except `_environment`; every other level may import it.
"""
