"""Run the recipe from a plain checkout on a machine where the package is not installed.

Links the folders into the package layout that pyproject.toml declares, then runs
`python -m dspark.bench.train_embedded` with the same arguments. A run that fails is repeated once
with `--no-compile --resume`, so that a compiler problem does not cost the machine.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def link_package(directory: Path) -> None:
    """`directory/dspark` as an importable package of links."""
    package = directory / "dspark"
    package.mkdir()
    for entry in (REPOSITORY / "dspark").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    for name in ("target", "kernels", "state", "bench"):
        (package / name).symlink_to(REPOSITORY / name)


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        link_package(Path(directory))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                filter(None, [directory, os.environ.get("PYTHONPATH", "")])
            ),
            "PYTHONDONTWRITEBYTECODE": "1",
            # Otherwise `-m` would find the checkout's own dspark folder before the links.
            "PYTHONSAFEPATH": "1",
        }
        command = [sys.executable, "-u", "-m", "dspark.bench.train_embedded", *sys.argv[1:]]
        code = subprocess.run(command, env=environment).returncode
        if code:
            print(f"Failed with {code}; once more without compilation.", flush=True)
            command += ["--no-compile", "--resume"]
            code = subprocess.run(command, env=environment).returncode
        return code


if __name__ == "__main__":
    sys.exit(main())
