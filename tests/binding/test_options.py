"""Options refuse values outside their limits when they are made, and name field, value and limit."""

import dataclasses
import math
import pickle

import numpy as np
import pytest

from pydflash import CacheOptions, EngineOptions, InvalidArgumentError, SamplingOptions

GOOD_SAMPLING: list[dict[str, object]] = [
    {},
    {"temperature": 0},
    {"temperature": np.float32(0.5), "top_k": np.int64(5)},
    {"top_p": 0.0, "min_p": 1.0, "typical_p": 0.5},
    {"repeat_penalty": 0.5, "presence_penalty": -2.0, "frequency_penalty": 2.0, "penalty_last_n": -1},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"logit_bias": {5: -math.inf, np.int32(7): 3}},
    {"stop": ["a", "b"]},
    {"stop": "abc"},
    {"max_tokens": 1, "logprobs": 20, "width": 64},
]

BAD_SAMPLING: list[tuple[str, object]] = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", 1.0),
    ("top_k", 2**31),
    ("top_p", 1.01),
    ("top_p", -0.01),
    ("min_p", math.nan),
    ("typical_p", 2),
    ("repeat_penalty", 0.0),
    ("repeat_penalty", -1.0),
    ("repeat_penalty", math.inf),
    ("presence_penalty", math.inf),
    ("frequency_penalty", math.nan),
    ("penalty_last_n", -2),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.5),
    ("logit_bias", [1, 2]),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: "x"}),
    ("logit_bias", {"1": 1.0}),
    ("stop", [""]),
    ("stop", ""),
    ("stop", [b"x"]),
    ("max_tokens", 0),
    ("ignore_eos", 1),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("width", 0),
    ("width", 65),
]


@pytest.mark.parametrize("values", GOOD_SAMPLING, ids=str)
def test_sampling_options(values: dict[str, object]) -> None:
    options = SamplingOptions(**values)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options) == hash(dataclasses.replace(options))
    assert isinstance(options.temperature, float)
    assert all(type(token) is int and type(bias) is float for token, bias in options.logit_bias.items())
    assert isinstance(options.stop, tuple)


def test_one_stop_text_is_one_text() -> None:
    assert SamplingOptions(stop="abc").stop == ("abc",)


def test_the_mapping_is_a_copy() -> None:
    bias = {1: 2.0}
    options = SamplingOptions(logit_bias=bias)
    bias[2] = 3.0
    assert options.logit_bias == {1: 2.0}


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING, ids=repr)
def test_sampling_options_outside_their_limits(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        SamplingOptions(**{field: value})  # type: ignore[arg-type]
    assert caught.value.limit
    assert field in (caught.value.field or "")
    assert isinstance(caught.value, ValueError)


BAD_ENGINE: list[tuple[str, object]] = [
    ("n_ctx", 1),
    ("n_ctx", "4096"),
    ("k_type", "f64"),
    ("v_type", None),
    ("device", ""),
    ("device", None),
    ("draft_device", ""),
    ("n_threads", -1),
    ("embedding", "disk"),
    ("pack_weights", 1),
    ("prefill_chunk", 0),
    ("max_verify", 0),
    ("fa_window", -1),
    ("draft_k_type", "bf16"),
    ("draft_full_rows", 0),
    ("draft_slack", -1),
    ("on_draft_failure", "ignore"),
    ("feature_capacity", -1),
    ("feature_type", "q8_0"),
    ("mirror_type", "q5_0"),
    ("draft_weights", "q3"),
]


@pytest.mark.parametrize(("field", "value"), BAD_ENGINE, ids=repr)
def test_engine_options_outside_their_limits(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        EngineOptions(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [SamplingOptions, EngineOptions, CacheOptions])
def test_options_are_frozen_and_closed(cls: type[SamplingOptions]) -> None:
    options = cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(options, dataclasses.fields(cls)[0].name, 1)
    with pytest.raises(TypeError):
        cls(unknown=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        cls(1.0)  # type: ignore[misc]
    assert options == cls()
