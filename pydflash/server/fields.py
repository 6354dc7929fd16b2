"""Fields of requests: read, checked, and turned into sampling options. What is not supported is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pydflash.options import MAX_LOGPROBS, SamplingOptions
from pydflash.server.errors import ApiError, refuse
from pydflash.text import Tokenizer

_F = TypeVar("_F", bound="Fields")

# Fields of other servers that this one does not have -> values with which they change nothing, and are accepted.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "adaptive_decay": (0,),
    "adaptive_target": (-1,),
    "audio": (),
    "backend_sampling": (False,),
    "best_of": (1,),
    "dry_allowed_length": (2,),
    "dry_base": (1.75,),
    "dry_multiplier": (0,),
    "dry_penalty_last_n": (-1, 0, 64),
    "dry_sequence_breakers": (["\n", ":", '"', "*"], []),
    "dynatemp_exponent": (1,),
    "dynatemp_range": (0,),
    "echo": (False,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "lora": ([],),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5,),
    "modalities": (["text"],),
    "n_cache_reuse": (0,),
    "n_indent": (0,),
    "post_sampling_probs": (False,),
    "preserved_tokens": ([],),
    "samplers": (
        ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        ["top_k", "typ_p", "top_p", "min_p", "temperature"],
        ["penalties", "top_k", "typ_p", "top_p", "min_p", "temperature"],
    ),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "top_n_sigma": (-1,),
    "verbose": (False,),
    "verbosity": ("medium",),
    "xtc_probability": (0,),
    "xtc_threshold": (0.1,),
}
# Fields that say something about the caller, or about a context shift, which is never done: they change no answer.
WITHOUT_EFFECT: Final = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "n_keep", "n_discard"}
)


class Fields(BaseModel):
    """A request's fields. null counts as absent; a value of another type, or an unknown field, is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept: dict[str, object] = {}
        for name, value in values.items():
            if value is None or name in WITHOUT_EFFECT:
                continue
            if name in NEUTRAL and name not in cls.model_fields:
                if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
                    wanted = " or ".join(json.dumps(neutral) for neutral in NEUTRAL[name]) or "nothing"
                    raise ValueError(f"{name} is not supported: only {wanted} is accepted")
                continue
            kept[name] = value
        return kept


def _same(value: object, neutral: object) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    if isinstance(value, float) and isinstance(neutral, int | float):
        return abs(value - neutral) < 1e-6  # clients keep such numbers in single precision
    return value == neutral


Unit = Annotated[float, Field(ge=0, le=1)]
LogitBias = dict[str, float] | list[list[Any]]


class SamplingFields(Fields):
    """What all request forms say about sampling, under llama.cpp's and OpenAI's names."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: int | None = None
    top_p: Unit | None = None
    min_p: Unit | None = None
    typical_p: Unit | None = None
    typ_p: Unit | None = None
    repeat_penalty: Annotated[float, Field(gt=0)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: LogitBias | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=16)] | None = None
    stream: bool = False
    cache_prompt: bool = True
    id_slot: Annotated[int, Field(ge=-1)] | None = None
    t_max_predict_ms: int | None = None
    return_progress: bool = False
    return_tokens: bool = False
    return_drafts: bool = False
    timings_per_token: bool = False
    sse_ping_interval: int | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    draft_n_max: int | None = Field(default=None, ge=0, le=63, alias="speculative.n_max")

    @property
    def n_choices(self) -> int:
        """How many answers are wanted."""
        return self.n or self.n_cmpl or 1

    @property
    def slot(self) -> int | None:
        """The slot that has to answer."""
        return None if self.id_slot in (None, -1) else self.id_slot

    @property
    def max_predict_ms(self) -> int | None:
        """Limit of the decoding time."""
        return None if self.t_max_predict_ms is None or self.t_max_predict_ms <= 0 else self.t_max_predict_ms


def read_fields(kind: type[_F], body: bytes) -> _F:
    """The fields of a JSON body. ApiError 400 that names each one at fault."""
    return check_fields(kind, read_json(body))


def read_json(body: bytes) -> object:
    """A JSON body. ApiError 400 for what is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {str(error)[:200]}") from error


def check_fields(kind: type[_F], values: object) -> _F:
    """The fields in a parsed body. ApiError 400 that names each one at fault."""
    if not isinstance(values, dict):
        raise ApiError(400, "the body is no JSON object")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ApiError(400, describe(error)) from error


def describe(error: ValidationError) -> str:
    """One line about all fields at fault."""
    lines: dict[str, None] = {}
    for entry in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(part) for part in entry["loc"] if not str(part).startswith(("function-", "constrained")))
        if entry["type"] == "extra_forbidden":
            lines[f"{where} is not supported"] = None
        elif entry["type"] == "missing":
            lines[f"{where} is missing"] = None
        else:
            text = entry["msg"].removeprefix("Value error, ")
            lines[f"{where}: {text}" if where else text] = None
    return "; ".join(list(lines)[:8])


def sampling_options(
    fields: SamplingFields,
    defaults: SamplingOptions,
    tokenizer: Tokenizer,
    *,
    logprobs: int | None = None,
    index: int = 0,
    extra_stop: Sequence[str] = (),
) -> SamplingOptions:
    """How the answer of this index is drawn.

    Raises:
        ApiError, InvalidArgumentError: a value is outside its limits.
    """
    values = (
        ("temperature", fields.temperature),
        ("top_k", None if fields.top_k is None else max(fields.top_k, 0)),
        ("top_p", fields.top_p),
        ("min_p", fields.min_p),
        ("typical_p", fields.typ_p if fields.typical_p is None else fields.typical_p),
        ("repeat_penalty", fields.repeat_penalty),
        ("penalty_last_n", fields.repeat_last_n),
        ("presence_penalty", fields.presence_penalty),
        ("frequency_penalty", fields.frequency_penalty),
        ("ignore_eos", fields.ignore_eos),
    )
    given: dict[str, Any] = {name: value for name, value in values if value is not None}
    if fields.seed is not None:
        # -1 and 2**32 - 1 are llama.cpp's ways to ask for a random one.
        random = fields.seed in (-1, 2**32 - 1)
        given["seed"] = None if random else (fields.seed + index) % 2**64 if fields.seed >= 0 else fields.seed
    elif defaults.seed is not None:
        given["seed"] = (defaults.seed + index) % 2**64
    stop = [fields.stop] if isinstance(fields.stop, str) else list(fields.stop or ())
    stop += extra_stop
    if stop:
        given["stop"] = tuple(text for text in stop if text)
    most = max_tokens(fields)
    if most is not None:
        given["max_tokens"] = most if most > 0 else None
    if fields.logit_bias is not None:
        given["logit_bias"] = logit_bias(fields.logit_bias, tokenizer)
    if logprobs is not None:
        if not 0 <= logprobs <= MAX_LOGPROBS:
            raise refuse("the number of log-probabilities", logprobs, f"0 to {MAX_LOGPROBS}")
        given["logprobs"] = logprobs
    if fields.draft_n_max is not None:
        given["width"] = fields.draft_n_max + 1
    return replace(defaults, **given)


def max_tokens(fields: SamplingFields) -> int | None:
    """The limit on an answer; -1: none; None: not given. ApiError for 0, which gives no answer."""
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        value: int | None = getattr(fields, name)
        if value is not None:
            if value == 0 or value < -1:
                raise refuse(name, value, "an integer >= 1, or -1 for no limit")
            return value
    return None


def logit_bias(given: LogitBias, tokenizer: Tokenizer) -> dict[int, float]:
    """Token -> bias, from OpenAI's object or llama.cpp's pairs of an id or a text and a number or false."""
    pairs: list[tuple[object, object]] = []
    if isinstance(given, dict):
        pairs = [(int(key) if key.lstrip("-").isdecimal() else key, value) for key, value in given.items()]
    else:
        for pair in given:
            if not isinstance(pair, list) or len(pair) != 2:
                raise refuse("logit_bias", pair, "pairs of a token and a number")
            pairs.append((pair[0], pair[1]))
    bias: dict[int, float] = {}
    for token, value in pairs:
        if value is False:
            number = float("-inf")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        else:
            raise refuse("a bias in logit_bias", value, "a number or false")
        if isinstance(token, str):
            ids = tokenizer.encode(token, parse_special=True)
        elif isinstance(token, int) and not isinstance(token, bool):
            ids = [token]
        else:
            raise refuse("a token in logit_bias", token, "an id or a text")
        for token_id in ids:
            bias[token_id] = number
    return bias
