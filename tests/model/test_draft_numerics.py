"""The drafter network against the PyPI package `dflash`, in three file forms, and its context against recomputing."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.goldens import block_golden
from support.models import DRAFTERS, MODELS, quantize_gguf, upcast_gguf

import pydflash

Target = Callable[[str], pydflash.TargetModel]
Drafter = Callable[[str], pydflash.DraftModel]
BLOCKS = ["full", "full-causal", "swa", "swa-causal", "swa-bidirectional", "yarn"]


def features_of(model: pydflash.TargetModel, drafter: pydflash.DraftModel, ids: np.ndarray) -> np.ndarray:
    with pydflash.TargetCache(
        model, capacity=512, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
    ) as cache:
        cache.forward(ids, logits="none")
        return cache.features(0, len(ids))


def context_of(drafter: pydflash.DraftModel, **options: object) -> pydflash.DraftContext:
    return pydflash.DraftContext(drafter, k_type="f32", v_type="f32", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BLOCKS)
def test_draft_logits_equal_the_reference(f32_target: Target, tmp_path: Path, name: str) -> None:
    """Contexts shorter than, equal to and longer than the window; the file is the Hugging Face form."""
    golden = block_golden(name)
    target = f32_target("nano")
    with pydflash.DraftModel.open(upcast_folder(DRAFTERS / name, tmp_path / name), target) as drafter:
        assert drafter.config.form == "huggingface"
        features = features_of(target, drafter, golden.ids)
        if golden.features is not None:
            np.testing.assert_allclose(features[: len(golden.features)], golden.features, atol=2e-3)
        worst = 0.0
        with context_of(drafter) as context:
            for i, n in enumerate(golden.contexts):
                context.reset()
                context.append_host(features[:n], 0)
                logits = context.propose(int(golden.anchors[i]), logits=True).logits
                assert logits is not None
                worst = max(worst, compare_rows(golden, i, logits))
        assert worst <= 1e-3


def compare_rows(golden: object, i: int, logits: np.ndarray) -> float:
    """Worst difference of the proposal rows; row 0 of the golden is the anchor's, which proposes nothing."""
    found = golden.logits  # type: ignore[attr-defined]
    top = np.take_along_axis(logits, found.top_ids[i][1:], axis=-1)
    return max(
        float(np.abs(top - found.top_logits[i][1:]).max()),
        float(np.abs(logits[:, found.columns] - found.column_logits[i][1:]).max()),
    )


def upcast_folder(source: Path, out: Path) -> Path:
    """The folder with its weights as float32, so that ggml does not round activations."""
    from safetensors.numpy import load_file, save_file

    out.mkdir()
    shutil.copy(source / "config.json", out)
    try:
        tensors = load_file(source / "model.safetensors")
    except (KeyError, TypeError, AttributeError):
        tensors = load_bf16(source / "model.safetensors")
    save_file(
        {name: np.ascontiguousarray(t, dtype=np.float32) for name, t in tensors.items()}, out / "model.safetensors"
    )
    return out


def load_bf16(path: Path) -> dict[str, np.ndarray]:
    import json

    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    out = {}
    for name, info in json.loads(raw[8 : 8 + n]).items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        data = raw[8 + n + begin : 8 + n + end]
        if info["dtype"] == "BF16":
            values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, {"F32": np.float32, "F16": np.float16}[info["dtype"]]).astype(np.float32)
        out[name] = values.reshape(info["shape"])
    return out


def lucebox_files() -> list[Path]:
    return sorted(DRAFTERS.glob("*-lucebox-f16.gguf"))


def test_three_file_forms_are_one_drafter(f32_target: Target, tmp_path: Path) -> None:
    target = f32_target("nano")
    ids = block_golden("full").ids
    assert lucebox_files()
    for lucebox in lucebox_files():
        name = lucebox.name.removesuffix("-lucebox-f16.gguf")
        forms = {
            "huggingface": upcast_folder(DRAFTERS / name, tmp_path / f"{name}-hf"),
            "llama.cpp": upcast_gguf(DRAFTERS / f"{name}-bf16.gguf", tmp_path / f"{name}.gguf"),
            "lucebox": upcast_gguf(lucebox, tmp_path / f"{name}-lucebox.gguf"),
        }
        logits, configs = [], []
        for form, path in forms.items():
            with pydflash.DraftModel.open(path, target) as drafter, context_of(drafter) as context:
                assert drafter.config.form == form
                context.append_host(features_of(target, drafter, ids)[:40], 0)
                got = context.propose(5, logits=True).logits
                assert got is not None
                logits.append(got)
                configs.append(drafter.config)
        for got, config in zip(logits[1:], configs[1:], strict=True):
            np.testing.assert_allclose(got, logits[0], atol=1e-5)
            for field in (
                "target_layer_ids",
                "windows",
                "block_size",
                "mask_token_id",
                "n_layer",
                "head_dim",
                "n_head_kv",
            ):
                assert getattr(config, field) == getattr(configs[0], field), field


@pytest.mark.parametrize("quant", ["f16", "bf16", "q8_0", "q4_0"])
def test_weight_types(f32_target: Target, tmp_path: Path, quant: str) -> None:
    target = f32_target("nano")
    path = quantize_gguf(MODELS / "d-part-bf16.gguf", tmp_path / "draft.gguf", quant)  # type: ignore[arg-type]
    with pydflash.DraftModel.open(path, target) as drafter, context_of(drafter) as context:
        context.append_host(features_of(target, drafter, block_golden("full").ids)[:40], 0)
        got = context.propose(7, logits=True)
        assert got.logits is not None
        assert np.isfinite(got.logits).all()


@pytest.mark.parametrize("weights", ["f32", "f16", "bf16", "q8_0"])
def test_weights_stored_as_another_type(f32_target: Target, tmp_path: Path, weights: str) -> None:
    """Converting while loading gives the logits of a file that is stored so."""
    target = f32_target("nano")
    stored = quantize_gguf(MODELS / "d-part-bf16.gguf", tmp_path / "stored.gguf", weights)  # type: ignore[arg-type]
    logits = []
    for path, kind in ((stored, "file"), (MODELS / "d-part-bf16.gguf", weights)):
        with (
            pydflash.DraftModel.open(path, target, weights=kind) as drafter,  # type: ignore[arg-type]
            context_of(drafter) as context,
        ):
            context.append_host(features_of(target, drafter, block_golden("full").ids)[:40], 0)
            got = context.propose(7, logits=True).logits
            assert got is not None
            logits.append(got)
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-3 if weights == "q8_0" else 1e-5)


@pytest.mark.parametrize("name", ["d-part", "d-swa"])
def test_incremental_context_equals_recomputing(f32_target: Target, f32_drafter: Drafter, name: str) -> None:
    """Random commit lengths, over every wrap of small rings, with rewinds between them."""
    target, drafter = f32_target("nano"), f32_drafter(name)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 300, 700)
    with pydflash.TargetCache(
        target, capacity=1024, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
    ) as cache:
        cache.forward(ids, logits="none")
        features = cache.features(0, len(ids))
    with context_of(drafter, full_rows=64, slack=8) as moving, context_of(drafter, full_rows=64, slack=8) as fresh:
        position = 0
        while position < 680:
            n = int(rng.integers(1, drafter.config.block_size + 1))
            back = int(rng.integers(0, 3)) if position > 8 else 0
            base = position - back  # rows behind the cursor are written again
            if rng.random() < 0.2 and position > 40:
                moving.rewind(position - 4)
                base = position - 4
            end = max(base + n, position)  # rows that a ring lost by writing ahead do not come back by a rewind
            moving.append_host(features[base:end], base)
            position = end
            if rng.random() < 0.25:
                fresh.reset(max(0, position - 600))
                fresh.append_host(features[fresh.cursor : position], fresh.cursor)
                a = moving.propose(int(ids[position]), logits=True).logits
                b = fresh.propose(int(ids[position]), logits=True).logits
                assert a is not None
                assert b is not None
                np.testing.assert_allclose(a, b, atol=2e-4)


def test_cursor_rules(f32_target: Target, f32_drafter: Drafter) -> None:
    drafter = f32_drafter("d-part")
    width = len(drafter.config.target_layer_ids) * drafter.config.n_embd
    rows = np.random.default_rng(0).normal(size=(40, width)).astype(np.float32)
    with context_of(drafter) as context:
        context.append_host(rows[:20], 0)
        kept = context.read(0, "k", 0, 20)
        with pytest.raises(pydflash.InvalidArgumentError, match="leave a gap"):
            context.append_host(rows[:5], 21)
        with pytest.raises(pydflash.InvalidArgumentError, match="move the cursor backward"):
            context.append_host(rows[:5], 10)
        with pytest.raises(pydflash.InvalidArgumentError):
            context.append_host(rows[:5], -1)
        np.testing.assert_array_equal(context.read(0, "k", 0, 20), kept)
        assert context.cursor == 20
        context.append_host(rows[:0], 20)
        assert context.cursor == 20
        context.append_host(rows[15:30], 15)
        assert (context.begin, context.cursor) == (0, 30)
        context.rewind(12)
        assert context.cursor == 12
        with pytest.raises(pydflash.InvalidArgumentError, match="want 0 to 12"):
            context.rewind(13)
        context.append_host(rows[12:20], 12)
        np.testing.assert_allclose(context.read(0, "k", 0, 20), kept, atol=1e-5)
        context.reset(7)
        assert (context.begin, context.cursor) == (7, 7)


def test_proposing_leaves_no_trace(f32_target: Target, f32_drafter: Drafter) -> None:
    """Rows made from mask tokens never stay in the context."""
    target, drafter = f32_target("nano"), f32_drafter("d-part")
    features = features_of(target, drafter, block_golden("full").ids)
    with context_of(drafter) as context:
        context.append_host(features[:30], 0)
        before = [context.read(layer, what, 0, 30) for layer in range(drafter.config.n_layer) for what in ("k", "v")]
        first = context.propose(3, logits=True).logits
        again = context.propose(3, logits=True).logits
        assert first is not None
        assert again is not None
        np.testing.assert_array_equal(first, again)
        after = [context.read(layer, what, 0, 30) for layer in range(drafter.config.n_layer) for what in ("k", "v")]
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("k_type", "v_type"), [("f16", "f16"), ("q8_0", "q8_0"), ("f32", "q8_0")])
def test_context_types(f32_target: Target, f32_drafter: Drafter, k_type: str, v_type: str) -> None:
    target, drafter = f32_target("nano"), f32_drafter("d-part")
    if "q8_0" in (k_type, v_type) and drafter.config.head_dim % 32:
        with pytest.raises(pydflash.UnsupportedModelError, match="blocks of 32"):
            pydflash.DraftContext(drafter, k_type=k_type, v_type=v_type)  # type: ignore[arg-type]
        return
    features = features_of(target, drafter, block_golden("full").ids)
    with context_of(drafter) as exact, pydflash.DraftContext(drafter, k_type=k_type, v_type=v_type) as other:  # type: ignore[arg-type]
        exact.append_host(features[:40], 0)
        other.append_host(features[:40], 0)
        a = exact.propose(3, logits=True).logits
        b = other.propose(3, logits=True).logits
        assert a is not None
        assert b is not None
        assert np.abs(a - b).max() < 0.2


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_mirror_and_direct_features_draft_alike(f32_target: Target, f32_drafter: Drafter, dtype: str) -> None:
    target, drafter = f32_target("nano"), f32_drafter("d-part")
    ids = block_golden("full").ids
    with (
        pydflash.TargetCache(
            target, capacity=512, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
        ) as cache,
        pydflash.DraftFeatureMirror(drafter, capacity=128, dtype=dtype) as mirror,  # type: ignore[arg-type]
        context_of(drafter) as direct,
        context_of(drafter) as mirrored,
    ):
        cache.forward(ids[:90], logits="none")
        assert mirror.sync_tail(cache) == 90
        assert mirror.valid_range == (0, 90)
        direct.append(cache, 0, 90)
        mirrored.append_mirror(mirror, 0, 90)
        a = direct.propose(3, logits=True).logits
        b = mirrored.propose(3, logits=True).logits
        assert a is not None
        assert b is not None
        tolerance = {"f32": 1e-5, "f16": 0.05, "bf16": 0.3, "q8_0": 0.5, "q4_0": 8.0}[dtype]
        assert np.abs(a - b).max() <= tolerance
        if dtype == "f32":
            np.testing.assert_allclose(mirror.rows(10, 90), cache.features(10, 90), atol=0)


def test_rope_of_the_context_at_far_positions(f32_target: Target, f32_drafter: Drafter) -> None:
    """K rows of one feature row at positions 1, 4,095 and 40,000 against the formula in float64."""
    drafter = f32_drafter("d-part")
    config = drafter.config
    width = len(config.target_layer_ids) * config.n_embd
    row = np.random.default_rng(1).normal(size=(1, width)).astype(np.float32)
    heads = {}
    for position in (0, 1, 4095, 40000):
        with context_of(drafter) as context:
            context.reset(position)
            context.append_host(row, position)
            heads[position] = context.read(0, "k", position, position + 1).reshape(config.n_head_kv, config.head_dim)
    half = config.head_dim // 2
    theta = float(config.rope_theta) if hasattr(config, "rope_theta") else 1e7
    frequency = theta ** (-2.0 * np.arange(half) / config.head_dim)
    at_zero = heads[0].astype(np.float64)
    for position in (1, 4095, 40000):
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        left, right = at_zero[:, :half], at_zero[:, half:]
        wanted = np.concatenate([left * cos - right * sin, left * sin + right * cos], axis=1)
        np.testing.assert_allclose(heads[position], wanted, atol=2e-3)
