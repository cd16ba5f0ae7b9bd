"""Subcommands of `dspark` that run servers or read what they wrote."""
