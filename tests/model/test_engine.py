"""Opening engines, what prompts may be, and what is said about a drafter that does not help."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import pydflash
from pydflash import Engine, EngineOptions, InvalidArgumentError, SamplingOptions, builtin

EngineMaker = Callable[..., Engine]
ONE_THREAD = EngineOptions(n_ctx=512, n_threads=1)
MESSAGES = [{"role": "user", "content": "Write a Python function that adds two numbers."}]


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    """The built-in pair."""
    with Engine.open(options=ONE_THREAD) as engine:
        yield engine


def test_the_built_in_pair_speculates_by_default(demo: Engine) -> None:
    assert demo.draft is not None
    assert demo.draft.path == builtin.draft_path()
    assert demo.decoder.max_width == 16
    result = demo.generate("def quicksort(items):", SamplingOptions(max_tokens=60, width=16))
    assert result.stats.proposed > 0
    assert result.stats.accepted > 0
    assert "return" in result.text
    assert result.text.count("\n") >= 2


def test_drafters_are_named_found_or_left_out(
    f32_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pydflash")
    with Engine.open(builtin.target_path(), options=ONE_THREAD) as engine:
        assert engine.draft is not None
    with Engine.open(draft=None, options=ONE_THREAD) as engine:
        assert engine.draft is None
        assert engine.width_policy is None
        assert "no drafter" in repr(engine)
    assert "no drafter was named" not in caplog.text
    with Engine.open(f32_path("nano"), options=ONE_THREAD) as engine:
        assert engine.draft is None
    assert "no drafter was named for nano.gguf" in caplog.text
    with Engine.open(f32_path("nano"), f32_path("d-part"), ONE_THREAD) as engine:
        assert engine.draft is not None
        assert engine.decoder.max_width == 8


def test_a_drafter_of_another_target_is_refused(f32_path: Callable[[str], Path]) -> None:
    with pytest.raises(pydflash.PydflashError, match="target"):
        Engine.open(f32_path("nano"), builtin.draft_path(), ONE_THREAD)


def test_missing_and_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(pydflash.NotFoundError, match=r"none\.gguf"):
        Engine.open(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(pydflash.FormatError, match=r"text\.gguf"):
        Engine.open(tmp_path / "text.gguf")
    with pytest.raises(pydflash.NotFoundError):
        Engine.open(draft=tmp_path / "none.gguf", options=ONE_THREAD)


def test_opened_models_stay_open(
    f32_target: Callable[[str], pydflash.TargetModel], f32_drafter: Callable[[str], pydflash.DraftModel]
) -> None:
    target, drafter = f32_target("nano"), f32_drafter("d-part")
    with Engine.open(target, drafter, ONE_THREAD) as engine:
        assert engine.target is target
        assert engine.draft is drafter
    assert not target.closed
    assert not drafter.closed


def test_close_frees_what_was_opened() -> None:
    engine = Engine.open(options=ONE_THREAD)
    assert engine.draft is not None
    parts = (engine.target, engine.draft, engine.cache, engine.decoder)
    engine.close()
    engine.close()
    assert all(part.closed for part in parts)
    assert engine.closed
    assert "closed" in repr(engine)
    for call in (lambda: engine.generate("x"), lambda: engine.stream("x"), engine.__enter__):
        with pytest.raises(pydflash.ClosedError):
            call()
    engine.cancel()


def test_kinds_of_prompts_that_mean_the_same(demo: Engine) -> None:
    text = demo.apply_template(MESSAGES)
    ids = demo.encode(text)
    options = SamplingOptions(max_tokens=8)
    wanted = demo.generate(MESSAGES, options).token_ids
    for prompt in (text, ids, list(ids), np.array(ids, np.int32), np.array(ids, np.int64)):
        assert demo.generate(prompt, options).token_ids == wanted
    assert ids == tuple(demo.tokenizer.encode(text))
    assert len(ids) < len(text)


def test_malformed_prompts(demo: Engine) -> None:
    wrong: list[object] = ["", [], (), np.array([], np.int32)]
    for prompt in wrong:
        with pytest.raises(InvalidArgumentError, match="at least one token"):
            demo.generate(prompt)  # type: ignore[arg-type]
    for bad in ([1, -1], [1, demo.target.n_vocab]):
        with pytest.raises(InvalidArgumentError, match=r"prompt\[1\] is"):
            demo.generate(bad)
    for strange in ([1, "a"], [True, 2], [1.5], [{"role": "user", "content": "x"}, 3], ["a", "b"]):
        with pytest.raises(InvalidArgumentError, match="text, token ids, or chat messages"):
            demo.generate(strange)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="role"):
        demo.generate([{"content": "x"}])


def test_a_model_without_a_chat_template(make_engine: EngineMaker) -> None:
    engine = make_engine(None)
    engine._template = None
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        engine.generate(MESSAGES)
    assert len(engine.generate([1], SamplingOptions(max_tokens=2, ignore_eos=True)).token_ids) == 2


@pytest.mark.parametrize(("draft", "n", "state"), [("d-rand", 80, "help"), ("d-rand", 20, "on"), (None, 80, "off")])
def test_a_drafter_that_does_not_help_is_reported(
    make_engine: EngineMaker, caplog: pytest.LogCaptureFixture, draft: str | None, n: int, state: str
) -> None:
    engine = make_engine(draft)
    with caplog.at_level(logging.WARNING, "pydflash"):
        options = SamplingOptions(max_tokens=n, ignore_eos=True, temperature=1.0, seed=3, width=4)
        stats = engine.generate([1, 2, 3], options).stats
    if state == "help":
        assert stats.accepted == 0 < stats.proposed
        assert f"none of {stats.proposed} proposals was accepted in 80 tokens" in stats.drafter
        assert caplog.text.count("the drafter does not help") == 1
        with caplog.at_level(logging.WARNING, "pydflash"):
            assert engine.generate([1, 2, 3], options).stats.drafter == stats.drafter
        assert caplog.text.count("the drafter does not help") == 1
    else:
        assert stats.drafter == state
        assert caplog.text == ""


def test_plain_decoding_by_choice_is_no_problem(make_engine: EngineMaker, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    with caplog.at_level(logging.WARNING, "pydflash"):
        stats = engine.generate([1, 2, 3], SamplingOptions(max_tokens=80, ignore_eos=True, width=1)).stats
    assert (stats.drafter, stats.proposed, stats.widths) == ("off", 0, {1: 79})
    assert caplog.text == ""


def test_a_policy_that_never_drafts_is_reported(make_engine: EngineMaker, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    policy = engine.width_policy
    assert policy is not None
    for width in policy.widths[1:]:
        for _ in range(20):
            policy.measured(width, 1e6)
    with caplog.at_level(logging.WARNING, "pydflash"):
        stats = engine.generate([1, 2, 3], SamplingOptions(max_tokens=80, ignore_eos=True)).stats
    assert stats.widths == {1: 79}
    assert "no proposal was verified in 80 tokens" in stats.drafter
    assert "plain decoding is faster" in caplog.text


def test_warming_up_measures_every_width(make_engine: EngineMaker) -> None:
    engine = make_engine()
    policy = engine.width_policy
    assert policy is not None
    assert policy.cost(1) == 1.0
    assert all(policy._costs.measured(width) is not None for width in policy.widths)
    assert engine.decoder.position == 0
    assert engine.decoder.tokens == []


def test_a_context_too_small_to_warm_up(make_engine: EngineMaker) -> None:
    engine = make_engine(n_ctx=12)
    result = engine.generate([1, 2, 3], SamplingOptions(ignore_eos=True))
    assert len(result.token_ids) == 9
