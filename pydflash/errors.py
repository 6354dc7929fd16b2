"""Every exception that pydflash raises on purpose.

::

    PydflashError                            .status  .operation  .message
    ├─ InvalidArgumentError (ValueError)     .field  .value  .limit
    │  └─ ChatTemplateError                  .line
    ├─ ModelError
    │  ├─ FormatError                        a model or snapshot file is damaged or contradicts itself
    │  └─ UnsupportedModelError              the file is sound, but asks for something pydflash cannot do
    ├─ OutOfMemoryError (MemoryError)        host or device memory
    ├─ CapacityError                         context or ring full; .needed and .available
    ├─ SnapshotMismatchError (ValueError)    a snapshot of another model or cache
    ├─ ClosedError (ValueError)              the object was closed
    ├─ BusyError                             another thread is inside the same object, or a view pins it
    ├─ PoisonedError                         an earlier failure left the object unusable; only close() works
    ├─ DeviceError                           a backend or driver failed
    ├─ Cancelled                             only after cancel(); a caller's own exception is re-raised as itself
    ├─ NotFoundError (FileNotFoundError)     a file, tensor, key or device does not exist
    └─ InternalError                         a bug in pydflash

Programs react to the class or to ``status``; ``message`` is for people and may change.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


class PydflashError(Exception):
    """Base of all exceptions of this package.

    Attributes:
        status: the C status code the exception stands for (negative).
        operation: what was being done, for example ``"target_cache_rewind"``; None where it adds nothing.
        message: one line that names the offending value and its limit.
    """

    default_status: ClassVar[int] = -99

    status: int
    operation: str | None
    message: str

    def __init__(self, message: str, *, operation: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.operation = operation
        self.status = self.default_status if status is None else status

    def __str__(self) -> str:
        return self.message if self.operation is None else f"{self.operation}: {self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        # The constructors of subclasses differ, so a pickled exception is rebuilt without calling them.
        return _rebuild, (type(self), self.message, dict(self.__dict__))

    @classmethod
    def from_native(cls, message: str, *, operation: str | None = None, status: int | None = None) -> Self:
        """Make an exception out of a message the native side has written.

        Attributes that only Python-side constructors know (``field``, ``needed``, ...) are None.
        """
        # MemoryError.__new__ refuses classes that inherit from something before it; BaseException's is the one that
        # calling such a class uses.
        allocator = BaseException if issubclass(cls, MemoryError) else cls
        error = allocator.__new__(cls, message)
        PydflashError.__init__(error, message, operation=operation, status=status)
        return error


def _rebuild(cls: type[PydflashError], message: str, attributes: dict[str, object]) -> PydflashError:
    error = cls.from_native(message)
    error.__dict__.update(attributes)
    return error


class InvalidArgumentError(PydflashError, ValueError):
    """An argument is outside its limits.

    ``InvalidArgumentError("temperature", -1.0, ">= 0")`` reads "temperature is -1.0, expected >= 0".
    """

    default_status = -1

    field: str | None = None
    value: object = None
    limit: str | None = None

    def __init__(self, field: str, value: object, limit: str, *, operation: str | None = None) -> None:
        super().__init__(f"{field} is {_REPR.repr(value)}, expected {limit}", operation=operation)
        self.field = field
        self.value = value
        self.limit = limit

    def __reduce__(self) -> tuple[object, ...]:
        # The value may be anything, also something that cannot be pickled; its text is in the message.
        return _rebuild, (type(self), self.message, {**self.__dict__, "value": None})


class ChatTemplateError(InvalidArgumentError):
    """A chat template is malformed, refused the messages, or exceeded its limits.

    Attributes:
        line: line of the template, counted from 1; None where it is not known.
    """

    line: int | None = None

    def __init__(self, message: str, *, line: int | None = None) -> None:
        where = "chat template" if line is None else f"chat template line {line}"
        PydflashError.__init__(self, f"{where}: {message}")
        self.field = "chat_template"
        self.line = line


class ModelError(PydflashError):
    """A model file cannot be used."""

    default_status = -5


class FormatError(ModelError):
    """A file is damaged, truncated, or its parts contradict each other."""

    default_status = -5


class UnsupportedModelError(ModelError):
    """The file is sound but needs an architecture, type or option that this version does not have."""

    default_status = -6


class OutOfMemoryError(PydflashError, MemoryError):
    """Host or device memory ran out; nothing was changed."""

    default_status = -2


class CapacityError(PydflashError):
    """A context, ring or batch is full.

    Attributes:
        needed: how many entries the call wanted, in the unit the message names; None if unknown.
        available: how many there were.
    """

    default_status = -8

    needed: int | None = None
    available: int | None = None

    def __init__(
        self,
        message: str,
        *,
        needed: int | None = None,
        available: int | None = None,
        operation: str | None = None,
    ) -> None:
        super().__init__(message, operation=operation)
        self.needed = needed
        self.available = available


class SnapshotMismatchError(PydflashError, ValueError):
    """A snapshot belongs to another model, cache shape or base snapshot."""

    default_status = -7


class ClosedError(PydflashError, ValueError):
    """The object was closed."""

    default_status = -1


class BusyError(PydflashError):
    """Another thread is inside the same object, or a pinned view forbids the change."""

    default_status = -9


class PoisonedError(PydflashError):
    """An earlier failure left the object unusable; close it."""

    default_status = -10


class DeviceError(PydflashError):
    """A compute device or its driver failed."""

    default_status = -11


class Cancelled(PydflashError):  # noqa: N818 - it reports a wish that was met, not an error
    """``cancel()`` was called while the operation ran."""

    default_status = -3


class NotFoundError(PydflashError, FileNotFoundError):
    """A file, tensor, key or device does not exist."""

    default_status = -4


class InternalError(PydflashError):
    """A bug in pydflash. Please report it with the message."""

    default_status = -99


#: C status code -> exception class. 0 (OK) has none.
STATUS_TO_ERROR: Mapping[int, type[PydflashError]] = MappingProxyType(
    {
        -1: InvalidArgumentError,
        -2: OutOfMemoryError,
        -3: Cancelled,
        -4: NotFoundError,
        -5: FormatError,
        -6: UnsupportedModelError,
        -7: SnapshotMismatchError,
        -8: CapacityError,
        -9: BusyError,
        -10: PoisonedError,
        -11: DeviceError,
        -99: InternalError,
    }
)


def error_from_status(status: int, message: str, *, operation: str | None = None) -> PydflashError:
    """The exception for a status code returned by the native side.

    A code without a class (a native part newer than this file) gives an InternalError that keeps the code.

    Raises:
        InvalidArgumentError: ``status`` is 0, which is no failure.
    """
    if status == 0:
        raise InvalidArgumentError("status", status, "a negative status code")
    cls = STATUS_TO_ERROR.get(status, InternalError)
    return cls.from_native(message, operation=operation, status=status)
