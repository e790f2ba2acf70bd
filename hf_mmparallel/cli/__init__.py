"""
The command `hf-mmparallel`: arguments of its subcommands, and what each prints.

The top of the package beside `trainer`; nothing imports it.
"""
