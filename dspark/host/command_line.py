"""SGLang's command line: read before SGLang reads it, and with our flags in it."""

import argparse
import difflib
import itertools
import re

from dspark import options
from dspark.errors import UsageError

UNKNOWN = "unrecognized arguments: "
SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")


def flag_value(argv: list[str], *flags: str) -> str | None:
    """Last value of a flag, written as two words or with `=`; None if it is absent."""
    value = None
    for word, following in itertools.pairwise([*argv, None]):
        name, equals, given = (word or "").partition("=")
        if name in flags:
            value = given if equals else following
    return value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `dspark.options`; errors become a UsageError instead of the long usage."""
    options.add_flags(parser)

    def refuse(message: str):
        raise UsageError(sentence(message, list(parser._option_string_actions)))

    parser.error = refuse  # type: ignore[assignment]


def sentence(message: str, known: list[str]) -> str:
    """What argparse found wrong, and for an unknown flag the nearest one there is."""
    if not message.startswith(UNKNOWN):
        return re.sub(r"\.?$", ".", message, count=1)
    words = message.removeprefix(UNKNOWN).split()
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if flag is None:
        return f"{' '.join(words)} belongs to no flag."
    nearest = difflib.get_close_matches(flag, known, n=1)
    return f"there is no flag {flag}" + (f"; did you mean {nearest[0]}?" if nearest else ".")


def print_help() -> None:
    """`dspark serve --help`: our flags first, then SGLang's."""
    from sglang.srt.server_args import ServerArgs

    usage = "dspark serve --model-path MODEL [FLAGS]"
    parser = argparse.ArgumentParser(prog="dspark serve", usage=usage)
    ServerArgs.add_cli_args(parser)  # hooked, so ours are among them
    parser.print_help()


def hide_keys(text: str, server_args) -> str:
    """`text` is SGLang's representation of its arguments; secrets in it become `***`."""
    for field in SECRETS:
        value = getattr(server_args, field)
        if value:
            text = text.replace(f"{field}={value!r}", f"{field}='***'")
    return text
