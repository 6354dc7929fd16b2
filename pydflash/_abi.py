"""Check at import that the extension module and the library it loads speak the same version of the C interface."""

from __future__ import annotations

try:
    from pydflash._native import ffi, lib
except ModuleNotFoundError as missing:
    if missing.name != "pydflash._native":
        raise
    raise ImportError(
        "pydflash is imported from a folder without its compiled module: install it (pip install .) and run Python "
        "outside the source tree"
    ) from missing


def require_same_abi(compiled: int, loaded: int) -> None:
    """Raise ImportError unless the module was compiled against the version that the library implements."""
    if compiled != loaded:
        raise ImportError(
            f"pydflash's extension module was compiled for version {compiled} of dflash.h, the library beside it has "
            f"version {loaded}: reinstall pydflash"
        )


require_same_abi(lib.DFLASH_ABI_VERSION, lib.dflash_abi_version())

__version__: str = ffi.string(lib.dflash_version()).decode()
"""Release of the native library, which is that of the package."""
