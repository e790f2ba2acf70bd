"""
The command `hf-mmparallel`: arguments and output of its subcommands.

The top of the package beside `trainer`; nothing imports it.
"""
