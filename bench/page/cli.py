"""`dspark report`: one HTML page from the record of a run, to pass on or to keep.

    dspark bench pair --model-path DIR --json run.json
    dspark report run.json -o report.html

The page is one file: charts and styles are in it, and it asks for nothing from elsewhere.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dspark.bench.page import charts, content


class NoPage(ValueError):
    """A record that no page can be made of; the message is one sentence."""


def render(record: Mapping[str, Any]) -> str:
    """The page's HTML; whatever text the record holds is escaped.

    Raises:
        NoPage: a record of another kind, or one that lacks a field of its kind.
    """
    try:
        page = content.page(record)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise NoPage(f"the record is not complete: {type(error).__name__}: {error}.") from None
    except ValueError as error:
        raise NoPage(str(error)) from None
    templates = Environment(
        loader=PackageLoader("dspark.bench.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html.j2").render(page=page, size=charts)


def read_record(file: Path) -> Mapping[str, Any]:
    """NoPage where the file cannot be read or holds no JSON object."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoPage(f"{file} cannot be read: {error}.") from None
    if not isinstance(record, dict):
        raise NoPage(f"{file} holds no record.")
    return record


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="dspark report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN.json", help="of bench serve, pair or exact")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE")
    options = parser.parse_args(argv)
    try:
        page = render(read_record(options.run))
        options.output.write_text(page, encoding="utf-8")
    except NoPage as error:
        print(f"dspark report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"dspark report: {options.output} cannot be written: {error}.", file=sys.stderr)
        return 2
    print(f"Wrote {options.output}.")
    return 0
