"""No function of dflash.h can be brought down by what it is given.

The functions, their parameters and the option structs are read from the compiled interface, so a function that is added
to the header is covered without a change here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pydflash
from pydflash import _ffi, builtin, errors
from pydflash._ffi import NULL, ffi, lib
from pydflash._handle import NativeHandle

HEADER = Path(__file__).resolve().parents[2] / "native" / "capi" / "dflash.h"

FUNCTIONS = {name: ffi.typeof(getattr(lib, name)) for name in dir(lib) if name.startswith("dflash_")}
HANDLES = {
    name.removesuffix("_free"): kind.args[0] for name, kind in FUNCTIONS.items() if name.endswith("_free")
}  # by C type
INVALID = lib.DFLASH_STATUS_INVALID


def name_of(ctype: Any) -> str:
    return str(ctype.cname).removeprefix("struct ")


def handle_type(argument: Any) -> str | None:
    """Name of the handle that a parameter takes."""
    return next((name for name, kind in HANDLES.items() if same_pointer(argument, kind)), None)


def same_pointer(left: Any, right: Any) -> bool:
    return left.kind == "pointer" and left.item.cname == right.item.cname


def has_struct_size(argument: Any) -> bool:
    return (
        argument.kind == "pointer"
        and argument.item.kind == "struct"
        and name_of(argument.item)
        not in {*HANDLES, "dflash_error"}  # cffi aborts when asked for fields of opaque structs
        and bool(argument.item.fields)
        and argument.item.fields[0][0] == "struct_size"
    )


def returns_status(kind: Any) -> bool:
    return kind.result.kind == "enum"


FALLIBLE = sorted(name for name, kind in FUNCTIONS.items() if returns_status(kind) and name != "dflash_log_take")
WITH_HANDLE = [
    (name, i)
    for name in FALLIBLE
    for i, argument in enumerate(FUNCTIONS[name].args)
    if handle_type(argument) is not None
]
WITH_OPTIONS = [
    (name, i) for name in FALLIBLE for i, argument in enumerate(FUNCTIONS[name].args) if has_struct_size(argument)
]
# Handles that may be NULL, by function and index of the parameter.
OPTIONAL = {
    *(("dflash_decoder_new", i) for i in (2, 3)),
    ("dflash_prefix_snapshot_take", 2),
    *(("dflash_prefix_snapshot_import", i) for i in (2, 3)),
    ("dflash_prefix_snapshot_restore", 2),
    ("dflash_prefix_snapshot_restore_chain", 0),
}


class Arguments:
    """Arguments that a function accepts as far as types go: open handles, zeroed outputs, default options."""

    def __init__(self, handles: dict[str, Any], number: int = 0) -> None:
        self.handles = handles
        self.number = number  # what every number is
        self.keep: list[Any] = []

    def of(self, name: str) -> list[Any]:
        return [self.value(argument) for argument in FUNCTIONS[name].args]

    def value(self, argument: Any) -> Any:
        if argument.kind == "primitive":
            return self.number
        if argument.kind == "enum":
            return 0
        if argument.kind == "function":
            return NULL
        name = handle_type(argument)
        if name is not None:
            return self.handles[name]
        return self.memory(argument)

    def memory(self, argument: Any) -> Any:
        item = argument.item
        if item.kind == "void":
            made = ffi.new("char[]", 4096)
        elif item.cname == "char":
            made = ffi.new("char[]", str(builtin.target_path()).encode().ljust(4096, b"\0"))
        else:
            n = 1 if item.kind == "struct" else 4096
            made = ffi.new(f"{item.cname}[{n}]")
        if item.kind == "struct" and item.fields and item.fields[0][0] == "struct_size":
            init = getattr(lib, f"{name_of(item)}_init", None)
            if init is None:
                made[0].struct_size = ffi.sizeof(item)
            else:
                init(made)
        self.keep.append(made)
        return made


def snapshot_of(target: pydflash.TargetModel) -> pydflash.PrefixSnapshot:
    with pydflash.TargetCache(target, 128) as cache:
        cache.forward([1, 2, 3])
        return pydflash.PrefixSnapshot.take(cache, tokens=[1, 2, 3])


@pytest.fixture(scope="module")
def family() -> Iterator[dict[str, NativeHandle]]:
    target = pydflash.TargetModel.open(n_threads=1)
    draft = pydflash.DraftModel.open(None, target)
    cache = pydflash.TargetCache(target, 128, capture_layers=draft.config.target_layer_ids)
    context = pydflash.DraftContext(draft, full_rows=128)
    objects: dict[str, NativeHandle] = {
        "dflash_gguf": pydflash.GgufFile.open(builtin.target_path()),
        "dflash_target_model": target,
        "dflash_target_cache": cache,
        "dflash_draft_model": draft,
        "dflash_draft_context": context,
        "dflash_draft_feature_mirror": pydflash.DraftFeatureMirror(draft, capacity=64),
        "dflash_decoder": pydflash.Decoder(cache, context),
        "dflash_prefix_snapshot": snapshot_of(target),
    }
    yield objects
    for member in objects.values():
        member.close()


@pytest.fixture
def arguments(family: dict[str, NativeHandle]) -> Arguments:
    return Arguments({name: member._ptr for name, member in family.items()})


@pytest.fixture(scope="module")
def closed(family: dict[str, NativeHandle]) -> dict[str, Any]:
    """Pointers that were handles. The live family is older, so that none of it can have their memory."""
    target = pydflash.TargetModel.open(n_threads=1)
    draft = pydflash.DraftModel.open(None, target)
    cache = pydflash.TargetCache(target, 128)
    members: dict[str, NativeHandle] = {
        "dflash_gguf": pydflash.GgufFile.open(builtin.target_path()),
        "dflash_decoder": pydflash.Decoder(cache),
        "dflash_draft_feature_mirror": pydflash.DraftFeatureMirror(draft, capacity=64),
        "dflash_draft_context": pydflash.DraftContext(draft, full_rows=128),
        "dflash_target_cache": cache,
        "dflash_draft_model": draft,
        "dflash_target_model": target,
        "dflash_prefix_snapshot": snapshot_of(target),
    }
    addresses = {name: int(ffi.cast("intptr_t", member._ptr)) for name, member in members.items()}
    for member in members.values():
        member.close()
    return {name: ffi.cast(f"{name} *", address) for name, address in addresses.items()}


def outputs_cleared(name: str, values: list[Any]) -> bool:
    """A constructor's output is NULL after a failure."""
    first = FUNCTIONS[name].args[0]
    is_output = first.kind == "pointer" and first.item.kind == "pointer"
    return not is_output or values[0] == NULL or values[0][0] == NULL


def call(name: str, values: list[Any]) -> tuple[int, str]:
    err = _ffi.new_error()
    status = getattr(lib, name)(*values[:-1], err)
    return int(status), _ffi.text_of(err.message)


def test_the_header_is_covered() -> None:
    declared = HEADER.read_text().count("\nDFLASH_API ")
    assert len(FUNCTIONS) == declared
    assert set(HANDLES) == {
        "dflash_gguf", "dflash_target_model", "dflash_target_cache", "dflash_draft_model", "dflash_draft_context",
        "dflash_draft_feature_mirror", "dflash_decoder", "dflash_prefix_snapshot",
    }  # fmt: skip
    assert all(name_of(FUNCTIONS[name].args[-1].item) == "dflash_error" for name in FALLIBLE)
    assert len(WITH_HANDLE) > 50
    structs = {name_of(FUNCTIONS[name].args[i].item) for name, i in WITH_OPTIONS}
    assert structs == {name.removesuffix("_init") for name in FUNCTIONS if name.endswith("_init")}


@pytest.mark.parametrize("name", FALLIBLE)
def test_all_null(name: str) -> None:
    values = [0 if argument.kind == "primitive" else NULL for argument in FUNCTIONS[name].args]
    status, message = call(name, values)
    assert status == INVALID
    assert "NULL" in message
    assert getattr(lib, name)(*values) == INVALID  # also without room for the error


@pytest.mark.parametrize(("name", "i"), WITH_HANDLE)
def test_null_handle(name: str, i: int, arguments: Arguments) -> None:
    values = arguments.of(name)
    values[i] = NULL
    status, message = call(name, values)
    if (name, i) in OPTIONAL:
        first = FUNCTIONS[name].args[0].item
        if status == 0 and first.kind == "pointer":
            getattr(lib, f"{name_of(first.item)}_free")(values[0][0])
        return
    assert status == INVALID
    assert "NULL" in message
    assert outputs_cleared(name, values)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", FALLIBLE)
def test_one_null_at_a_time(name: str, number: int, arguments: Arguments) -> None:
    arguments.number = number
    first = FUNCTIONS[name].args[0]
    for i, argument in enumerate(FUNCTIONS[name].args[:-1]):
        if argument.kind != "pointer":
            continue
        values = arguments.of(name)
        values[i] = NULL
        status, message = call(name, values)
        assert status in errors.STATUS_TO_ERROR or status == 0
        assert status == 0 or message
        if status == 0 and first.item.kind == "pointer":  # an option or an optional handle was NULL
            getattr(lib, f"{name_of(first.item.item)}_free")(values[0][0])
        elif status != 0:
            assert outputs_cleared(name, values)


@pytest.mark.parametrize(("name", "i"), WITH_HANDLE)
def test_closed_handle(name: str, i: int, arguments: Arguments, closed: dict[str, Any]) -> None:
    values = arguments.of(name)
    kind = handle_type(FUNCTIONS[name].args[i])
    assert kind is not None
    values[i] = closed[kind]
    assert values[i] not in arguments.handles.values()
    status, message = call(name, values)
    assert status == INVALID
    assert "closed" in message
    assert outputs_cleared(name, values)


@pytest.mark.parametrize(("name", "i"), WITH_HANDLE)
def test_handle_of_another_type(name: str, i: int, arguments: Arguments) -> None:
    values = arguments.of(name)
    kind = handle_type(FUNCTIONS[name].args[i])
    other = "dflash_gguf" if kind != "dflash_gguf" else "dflash_decoder"
    values[i] = ffi.cast(f"{kind} *", arguments.handles[other])
    status, message = call(name, values)
    assert status == INVALID
    assert "not of type" in message
    assert outputs_cleared(name, values)


@pytest.mark.parametrize("offset", [0, 1, -8])
@pytest.mark.parametrize(("name", "i"), [case for case in WITH_HANDLE if case not in OPTIONAL])
def test_pointer_to_no_handle(name: str, i: int, offset: int, arguments: Arguments) -> None:
    values = arguments.of(name)
    memory = ffi.new("char[]", 64)
    values[i] = ffi.cast(FUNCTIONS[name].args[i], int(ffi.cast("intptr_t", memory)) + 16 + offset)
    status, message = call(name, values)
    assert status == INVALID
    assert "was not made by this process" in message


@pytest.mark.parametrize("size", [0, 1, 4, "one byte short"])
@pytest.mark.parametrize(("name", "i"), WITH_OPTIONS)
def test_struct_size_too_small(name: str, i: int, size: int | str, arguments: Arguments) -> None:
    values = arguments.of(name)
    whole = ffi.sizeof(FUNCTIONS[name].args[i].item)
    values[i][0].struct_size = whole - 1 if isinstance(size, str) else size
    status, message = call(name, values)
    assert status == INVALID
    assert "struct_size" in message
    assert f">= {whole}" in message
    assert outputs_cleared(name, values)


@pytest.mark.parametrize(("name", "i"), WITH_OPTIONS)
def test_struct_with_fields_of_a_later_version(name: str, i: int, arguments: Arguments) -> None:
    item = FUNCTIONS[name].args[i].item
    whole = ffi.sizeof(item)
    memory = ffi.new("char[]", whole + 64)
    longer = ffi.cast(FUNCTIONS[name].args[i], memory)
    getattr(lib, f"{name_of(item)}_init")(longer)
    longer.struct_size = whole + 64
    values = arguments.of(name)
    values[i] = longer
    memory[whole + 9] = b"\1"
    status, message = call(name, values)
    assert status == lib.DFLASH_STATUS_UNSUPPORTED
    assert f"byte {whole + 9}" in message
    assert outputs_cleared(name, values)


@pytest.mark.parametrize("name", sorted(HANDLES))
def test_free_takes_null_closed_and_foreign_handles(name: str, closed: dict[str, Any], arguments: Arguments) -> None:
    free = getattr(lib, f"{name}_free")
    free(NULL)
    if closed[name] not in arguments.handles.values():
        free(closed[name])
    other = "dflash_gguf" if name != "dflash_gguf" else "dflash_decoder"
    free(ffi.cast(f"{name} *", arguments.handles[other]))
    n = ffi.new("int64_t *")
    assert lib.dflash_gguf_tensor_count(arguments.handles["dflash_gguf"], n, NULL) == 0
    assert n[0] > 0


def test_functions_without_a_status_take_null() -> None:
    for name, kind in FUNCTIONS.items():
        if kind.result.kind == "void":
            getattr(lib, name)(*(NULL for _ in kind.args))
    assert lib.dflash_log_take(NULL, NULL, 8, NULL) == INVALID


@pytest.mark.parametrize("size", [0, 4, 8, 9, 20, 1024, 4000])
def test_an_error_of_any_size_is_filled_within_its_bounds(size: int) -> None:
    memory = ffi.new("char[]", b"\x55" * 4096)
    err = ffi.cast("dflash_error *", memory)
    err.struct_size = size
    assert lib.dflash_gguf_open(NULL, b"x", err) == INVALID
    known = ffi.sizeof("dflash_error") if size == 0 else min(size, ffi.sizeof("dflash_error"))
    data = bytes(ffi.buffer(memory))
    assert data[max(known, 4) : 4096] == b"\x55" * (4096 - max(known, 4))
    if known > 8:
        assert err.status == INVALID
        assert data[8:known].split(b"\0")[0] == b"out is NULL"[: known - 9]
