"""The exception tree and the translation of status codes."""

from __future__ import annotations

import pickle

import pytest

from pydflash import errors
from pydflash.errors import (
    STATUS_TO_ERROR,
    Cancelled,
    CapacityError,
    ChatTemplateError,
    FormatError,
    InternalError,
    InvalidArgumentError,
    ModelError,
    NotFoundError,
    PydflashError,
    UnsupportedModelError,
    error_from_status,
)

CODES = {
    -1: "InvalidArgumentError",
    -2: "OutOfMemoryError",
    -3: "Cancelled",
    -4: "NotFoundError",
    -5: "FormatError",
    -6: "UnsupportedModelError",
    -7: "SnapshotMismatchError",
    -8: "CapacityError",
    -9: "BusyError",
    -10: "PoisonedError",
    -11: "DeviceError",
    -99: "InternalError",
}
CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, PydflashError)]


def test_every_code_has_its_class() -> None:
    assert {code: cls.__name__ for code, cls in STATUS_TO_ERROR.items()} == CODES


@pytest.mark.parametrize("code", CODES)
def test_native_error_keeps_code_operation_and_message(code: int) -> None:
    error = error_from_status(code, "70 rows do not fit a mirror of 64", operation="mirror_append")
    assert type(error) is STATUS_TO_ERROR[code]
    assert error.status == code
    assert error.operation == "mirror_append"
    assert error.message == "70 rows do not fit a mirror of 64"
    assert str(error) == "mirror_append: 70 rows do not fit a mirror of 64"


def test_default_status_of_a_class_is_its_code() -> None:
    assert {cls.default_status for cls in STATUS_TO_ERROR.values()} == set(STATUS_TO_ERROR)
    assert all(cls.default_status == code for code, cls in STATUS_TO_ERROR.items())


def test_unknown_code_is_an_internal_error_that_keeps_the_code() -> None:
    error = error_from_status(-57, "something new")
    assert type(error) is InternalError
    assert error.status == -57


def test_ok_is_no_error() -> None:
    with pytest.raises(InvalidArgumentError, match="status is 0"):
        error_from_status(0, "")


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (InvalidArgumentError, ValueError),
        (errors.OutOfMemoryError, MemoryError),
        (errors.SnapshotMismatchError, ValueError),
        (errors.ClosedError, ValueError),
        (NotFoundError, FileNotFoundError),
        (FormatError, ModelError),
        (UnsupportedModelError, ModelError),
        (ChatTemplateError, InvalidArgumentError),
    ],
)
def test_can_be_caught_as(cls: type[PydflashError], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)
    with pytest.raises(builtin):
        raise cls.from_native("x")


def test_cancelled_is_no_error_of_another_kind() -> None:
    assert Cancelled.__bases__ == (PydflashError,)


def test_docstring_draws_every_class() -> None:
    assert errors.__doc__ is not None
    assert len(CLASSES) == 16
    for cls in CLASSES:
        assert cls.__name__ in errors.__doc__


def test_invalid_argument_names_field_value_and_limit() -> None:
    error = InvalidArgumentError("temperature", -1.0, ">= 0")
    assert str(error) == "temperature is -1.0, expected >= 0"
    assert (error.field, error.value, error.limit, error.status) == ("temperature", -1.0, ">= 0", -1)


def test_invalid_argument_cuts_a_long_value() -> None:
    error = InvalidArgumentError("prompt", "x" * 10_000, "a shorter text")
    assert len(str(error)) < 200
    assert error.value == "x" * 10_000


def test_not_found_shows_its_message_and_not_an_errno() -> None:
    assert str(NotFoundError("no such file: a.gguf")) == "no such file: a.gguf"


def test_capacity_carries_numbers() -> None:
    error = CapacityError("9 tokens do not fit, 4 are left", needed=9, available=4)
    assert (error.needed, error.available, error.status) == (9, 4, -8)
    assert CapacityError.from_native("full").needed is None


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("stops", "", "non-empty strings", operation="generate"),
        CapacityError("full", needed=9, available=4, operation="append"),
        ChatTemplateError("no system role", line=12),
        NotFoundError("no such file: a.gguf"),
        error_from_status(-57, "something new", operation="step"),
        errors.OutOfMemoryError("12 GiB", status=-2),
    ],
)
def test_survives_pickling(error: PydflashError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.args == error.args
    expected = dict(error.__dict__)
    if isinstance(error, InvalidArgumentError):
        expected["value"] = None
    assert copy.__dict__ == expected


def test_pickling_does_not_need_the_value_to_be_picklable() -> None:
    copy = pickle.loads(pickle.dumps(InvalidArgumentError("callback", lambda: 0, "None")))
    assert copy.field == "callback"
    assert copy.value is None
