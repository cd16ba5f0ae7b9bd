"""Hooks: arguments and flags of the server."""

from dspark.host import arguments


def resolve_arguments(original, server_args):
    """ServerArgs.__post_init__: our refusals and defaults, then SGLang's own resolution."""
    arguments.resolve(original, server_args)


def add_flags(original, parser):
    """ServerArgs.add_cli_args: any model's server takes them, and only ours reads them."""
    from dspark.host.command_line import add_flags

    add_flags(parser)
    original(parser)


def hide_keys(original, server_args):
    """ServerArgs.__repr__, which SGLang writes into its log: for every model."""
    from dspark.host.command_line import hide_keys

    return hide_keys(original(server_args), server_args)
