"""Engines over the tiny float32 pair, whose drafter is right now and then."""

from collections.abc import Callable, Iterator

import pytest
from support.goldens import step_golden

import pydflash
from pydflash import Engine, EngineOptions

EngineMaker = Callable[..., Engine]
# All float32, so that forwards of different widths agree.
EXACT = {"k_type": "f32", "v_type": "f32", "draft_k_type": "f32", "draft_v_type": "f32", "n_threads": 1}


@pytest.fixture
def make_engine(
    f32_target: Callable[[str], pydflash.TargetModel], f32_drafter: Callable[[str], pydflash.DraftModel]
) -> Iterator[EngineMaker]:
    """make_engine("d-part", n_ctx=512): an engine over the nano target, closed after the test. None: no drafter."""
    opened: list[Engine] = []

    def make(draft: str | None = "d-part", **options: object) -> Engine:
        chosen = EngineOptions(**{"n_ctx": 512, **EXACT, **options})  # type: ignore[arg-type]
        drafter = None if draft is None else f32_drafter(draft)
        opened.append(Engine.open(f32_target("nano"), drafter, chosen))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts on which d-part is accepted at every length."""
    return [case["prompt"] for case in step_golden("d-part")["cases"]]


@pytest.fixture(scope="session")
def greedy() -> list[list[int]]:
    """What another implementation answers to them."""
    return [case["greedy"] for case in step_golden("d-part")["cases"]]
