"""Lines that native code has logged, handed to ``logging.getLogger("pydflash.native")``.

Native code never writes to the terminal: it queues its lines, and whoever calls it takes them out afterwards.
"""

from __future__ import annotations

import logging
from typing import Final

from pydflash._ffi import NULL, ffi, lib

log: Final = logging.getLogger("pydflash.native")

_LEVELS: Final = {
    lib.DFLASH_LOG_DEBUG: logging.DEBUG,
    lib.DFLASH_LOG_INFO: logging.INFO,
    lib.DFLASH_LOG_WARNING: logging.WARNING,
    lib.DFLASH_LOG_ERROR: logging.ERROR,
}
_NONE_WAITS: Final = lib.DFLASH_STATUS_NOT_FOUND
_OK: Final = lib.DFLASH_STATUS_OK


def drain() -> None:
    """Hand over all waiting lines. Without any it costs a fraction of a microsecond. Any thread."""
    # A peek: no buffer, so a waiting line stays where it is.
    if lib.dflash_log_take(NULL, NULL, 0, NULL) != _NONE_WAITS:
        _take_all()


def _take_all() -> None:
    level, needed = ffi.new("int32_t *"), ffi.new("uint64_t *")
    buffer = ffi.new("char[]", 512)
    while (status := lib.dflash_log_take(level, buffer, len(buffer), needed)) != _NONE_WAITS:
        if status == _OK:
            text = ffi.string(buffer).decode("utf-8", "replace")
            log.log(_LEVELS.get(level[0], logging.ERROR), "%s", text)
        else:  # the line is longer than the buffer
            buffer = ffi.new("char[]", max(needed[0], 2 * len(buffer)))
