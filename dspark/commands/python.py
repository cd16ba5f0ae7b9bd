"""`dspark python`: run one of SGLang's own tools where its GPU packages are not installed.

Plain `python -m sglang.bench_serving` imports `sgl_kernel` and `torchvision`, which a machine
without a GPU does not have. Here the stand-ins are in place first, in this process and, since its
main module stays `dspark.cli`, in every process it spawns.
"""

import os
import runpy
import sys

from dspark.errors import UsageError
from dspark.standins import CPU_ENGINE, install_if_cpu


def main(argv: list[str]) -> None:
    """Run `-m MODULE`, `-c CODE` or a file, each with its arguments, as `python` does.

    Raises:
        UsageError: there is nothing to run.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault(CPU_ENGINE, "1")
        install_if_cpu()
    match argv:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__")
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [file, *_] if not file.startswith("-"):
            sys.argv = argv
            runpy.run_path(file, run_name="__main__")
        case _:
            raise UsageError("dspark python takes -m MODULE, -c CODE or a file, and its arguments.")
