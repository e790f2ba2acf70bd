"""
The launcher that lets workers die while others live: `hf-mmparallel launch`, which wraps `accelerate launch`.

May be imported by the command line; imports nothing of the package but `world` and `_environment`.
"""
