"""
`hf-mmparallel launch`: wraps `accelerate launch`, and lets workers die while others live. Imports only `world` and
`_environment` of the package.
"""
