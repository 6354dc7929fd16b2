"""Where the built-in model pair lies. pydflash/models/MODEL_CARD.md says what the models are and are not."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from pydflash.errors import NotFoundError


def target_path() -> Path:
    """The built-in target, a GGUF file.

    Raises:
        NotFoundError: the package was installed without its models.
    """
    return _path("demo-target-q8_0.gguf")


def draft_path() -> Path:
    """The drafter of the built-in target, a GGUF file.

    Raises:
        NotFoundError: the package was installed without its models.
    """
    return _path("demo-draft-bf16.gguf")


def _path(name: str) -> Path:
    path = Path(str(files("pydflash").joinpath("models", name)))
    if not path.is_file():
        raise NotFoundError(f"the built-in model {path} is missing: reinstall pydflash, or name a model file")
    return path
