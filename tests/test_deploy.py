"""Container file and unit: what they copy is there and suffices, what they start parses."""

import configparser
import json
import re
import shlex
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGE = (ROOT / "docs/deploy/Dockerfile").read_text()
UNIT = ROOT / "docs/deploy/dspark.service"


def instructions(name: str) -> list[str]:
    """What stands behind an instruction, each time that it comes."""
    joined = IMAGE.replace("\\\n", " ")
    return re.findall(rf"^\s*{name}\s+(.*?)\s*$", joined, re.MULTILINE)


def copied() -> set[str]:
    return {source for line in instructions("COPY") for source in line.split()[:-1]}


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters="=")
    parser.optionxform = str
    parser.read(UNIT)
    return parser


def test_the_image_copies_what_a_build_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {
        Path(path).parts[0] for path in project["tool"]["setuptools"]["package-dir"].values()
    }
    named = {project["project"]["readme"], *project["project"]["license-files"]}
    assert copied() >= folders | named | {"pyproject.toml"}
    assert all((ROOT / source).exists() for source in copied())


def test_the_image_serves_as_somebody_who_is_not_root():
    assert instructions("USER") == ["dspark"]
    (entry,) = map(json.loads, instructions("ENTRYPOINT"))
    assert entry[:2] == ["dspark", "serve"]


def test_the_image_has_the_sglang_that_is_served():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (wanted,) = project["project"]["optional-dependencies"]["cuda"]
    assert f"pip install --no-cache-dir {wanted}" in IMAGE


def test_the_flags_of_the_image_parse(server_flags):
    (entry,), (command,) = instructions("ENTRYPOINT"), instructions("CMD")[-1:]
    given = server_flags.parse_args(json.loads(entry)[2:] + json.loads(command))
    (exposed,) = instructions("EXPOSE")
    assert (given.tp_size, given.port) == (8, int(exposed))
    assert f"127.0.0.1:{exposed}/health" in IMAGE


def test_the_flags_of_the_unit_parse(server_flags):
    program, command, *flags = shlex.split(unit()["Service"]["ExecStart"])
    assert (Path(program).is_absolute(), Path(program).name, command) == (True, "dspark", "serve")
    assert server_flags.parse_args(flags).tp_size == 8


def test_the_unit_lets_a_server_drain():
    parsed = unit()
    assert set(parsed.sections()) == {"Unit", "Service", "Install"}
    service = parsed["Service"]
    # systemd's default of 90 seconds is shorter than a long answer.
    assert (service["KillSignal"], service["TimeoutStopSec"]) == ("SIGTERM", "10min")
    # `control-group` would send the signal to the ranks too, which end at once.
    assert service["KillMode"] == "mixed"
    assert service["LimitMEMLOCK"] == "infinity"
