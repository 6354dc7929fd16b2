"""Fast inference of Qwen3.5-family GGUF models with DFlash speculative decoding."""

from pydflash._abi import __version__

__all__ = ["__version__"]
