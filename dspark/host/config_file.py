"""`config.json` of the model that is to be served, read before SGLang looks at it."""

import functools
import json
import os
from pathlib import Path
from typing import Any

from dspark.errors import UsageError

ARCHITECTURE = "DeepseekV4ForCausalLM"


@functools.cache
def read_config(model_path: str, revision: str | None) -> dict[str, Any]:
    """`config.json` of a directory or hub repository; {} where there is none to be found.

    Not being able to find it is SGLang's to report: it knows every way a model can be named.

    Raises:
        UsageError: the directory has one, but it cannot be read or is no JSON object.
    """
    if os.path.isdir(model_path):
        file = Path(model_path) / "config.json"
        return _read(file) if file.exists() else {}
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(model_path, revision=revision)[0]
    except (OSError, ValueError):
        return {}


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds no JSON object.")
    return content


def is_deepseek_v4(model_path: str, revision: str | None) -> bool:
    return ARCHITECTURE in (read_config(model_path, revision).get("architectures") or ())
