"""pydflash inspect and convert."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.models import DRAFTERS, MODELS, upcast_folder

import pydflash
from pydflash import builtin
from pydflash.cli import run
from pydflash.draft_conversion import convert_draft
from pydflash.options import CacheType

FOLDERS = sorted(path.name for path in DRAFTERS.iterdir() if path.is_dir())


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, object]]:
    status = run(["inspect", *(str(argument) for argument in arguments), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return status, report


@pytest.mark.parametrize("k_type", ["f16", "q8_0"])
def test_the_memory_plan_is_that_of_the_cache(capsys: pytest.CaptureFixture[str], k_type: CacheType) -> None:
    status, report = inspect(
        capsys, builtin.target_path(), "--ctx-size", 3000, "--cache-type-k", k_type, "--draft", builtin.draft_path()
    )
    assert status == 0
    assert report["layers"] == 12
    assert report["layer_kinds"] == {"recurrent": 9, "attention": 3}
    assert report["capture_layers"] == [1, 3, 5, 7, 9]
    memory = report["memory_bytes"]
    assert isinstance(memory, dict)
    with (
        pydflash.TargetModel.open() as target,
        pydflash.DraftModel.open(None, target) as drafter,
        pydflash.DraftContext(drafter) as context,
    ):
        plan = pydflash.TargetCache.plan(
            target,
            3000,
            k_type,
            capture_layers=drafter.config.target_layer_ids,
        )
        assert memory["drafter_weights"] == drafter.config.weight_bytes
        assert memory["draft_context"] == context.state.memory_bytes
    for name in ("k", "v", "recurrent", "conv"):
        assert memory[name] == getattr(plan, f"{name}_bytes")
    assert memory["features"] == plan.feature_bytes
    assert memory.get("rotation", 0) == plan.rotation_bytes
    with pydflash.GgufFile.open(builtin.target_path()) as file:
        assert sum(report["tensor_bytes"].values()) == sum(tensor.n_bytes for tensor in file.tensors)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["micro", "micro-mtp", "moe", "hd256"])
def test_tiny_models(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, report = inspect(capsys, MODELS / f"{name}-bf16.gguf")
    assert status == 0
    assert report["refused"] == []
    with pydflash.TargetModel.open(MODELS / f"{name}-bf16.gguf") as target:
        assert report["layers"] == target.config.n_layer
        assert report["multi_token_prediction_blocks_skipped"] == target.config.n_layer_nextn
        assert (report["experts"] is not None) == target.config.is_moe
        assert report["stop_ids"] == sorted(target.stop_ids)


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(builtin.target_path()), "--ctx-size", "8192"]) == 0
    out = capsys.readouterr().out
    for words in ("qwen35", "(3 recurrent, 1 attention) x 3", "q8 0", "MiB", "trained for 4096 tokens"):
        assert words in out


def test_a_damaged_model_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = _without_tensor(MODELS / "nano-bf16.gguf", tmp_path / "holed.gguf", "blk.2.ffn_up.weight")
    status, report = inspect(capsys, path)
    assert status == 1
    assert report["architecture"] == "qwen35"
    assert "blk.2.ffn_up.weight is missing" in str(report["refused"])
    assert run(["inspect", str(path)]) == 1
    assert "refused:" in capsys.readouterr().out


def _without_tensor(source: Path, out: Path, name: str) -> Path:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "qwen35")
    for key, entry in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = entry.types[0]
            writer.add_key_value(
                key, entry.contents(), kind, entry.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            )
    for tensor in reader.tensors:
        if tensor.name != name:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_drafters(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = inspect(capsys, builtin.draft_path())
    assert (status, report["form"], report["block_size"]) == (0, "llama.cpp", 16)
    status, report = inspect(capsys, DRAFTERS / "swa", "--model", MODELS / "nano-bf16.gguf")
    assert (status, report["form"]) == (0, "huggingface")
    assert any(report["windows"])  # type: ignore[arg-type]
    status, report = inspect(capsys, DRAFTERS / "swa")
    assert status == 1
    assert "target" in str(report["refused"])


@pytest.mark.parametrize("name", FOLDERS)
def test_a_converted_drafter_is_the_same_drafter(
    f32_target: Callable[[str], pydflash.TargetModel], tmp_path: Path, name: str
) -> None:
    target = f32_target("nano")
    folder = upcast_folder(DRAFTERS / name, tmp_path / name)
    made = convert_draft(folder, tmp_path / "d.gguf", MODELS / "nano-bf16.gguf", "f32")
    features = np.random.default_rng(3).standard_normal((24, 0), np.float32)
    results = []
    for path in (folder, made.path):
        with pydflash.DraftModel.open(path, target) as drafter, pydflash.DraftContext(drafter, "f32", "f32") as context:
            config = drafter.config
            if features.size == 0:
                width = config.n_taps * target.config.n_embd
                features = np.random.default_rng(3).standard_normal((24, width), np.float32)
            context.append_host(features, 0)
            proposal = context.propose(5, logits=True)
            assert proposal.logits is not None
            fields = {field: getattr(config, field) for field in config.__dataclass_fields__}
            results.append((fields, proposal.logits))
    (wanted, their_logits), (got, our_logits) = results
    for field in ("form", "weight_bytes"):
        del wanted[field], got[field]
    for field, value in wanted.items():
        assert got[field] == (pytest.approx(value) if isinstance(value, float) else value), field
    np.testing.assert_allclose(our_logits, their_logits, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_converted_types(capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "drafter.gguf"
    arguments = ["convert", str(DRAFTERS / "full"), str(out), "--model", str(MODELS / "nano-bf16.gguf")]
    assert run([*arguments, "--outtype", dtype]) == 0
    assert f"{dtype}" in capsys.readouterr().out
    with pydflash.GgufFile.open(out) as file:
        kinds = {tensor.type for tensor in file.tensors if len(tensor.shape) == 2}
        assert kinds == {dtype}
        assert {tensor.type for tensor in file.tensors if len(tensor.shape) == 1} == {"f32"}
        with pydflash.GgufFile.open(MODELS / "nano-bf16.gguf") as target:
            for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template"):
                assert file.metadata[key] == target.metadata[key]
    assert not list(tmp_path.glob("*.partial"))
    assert run([*arguments, "--outtype", dtype]) == 2
    assert "does not exist yet" in capsys.readouterr().err


def test_a_folder_that_cannot_be_converted_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    config = json.loads((DRAFTERS / "full" / "config.json").read_text())
    weights = (DRAFTERS / "full" / "model.safetensors").read_bytes()
    cases: list[tuple[dict[str, object], bytes | None, str]] = [
        ({"architectures": ["Qwen3ForCausalLM"]}, weights, "DFlashDraftModel"),
        ({"hidden_act": "gelu"}, weights, "gelu"),
        ({"num_attention_heads": "four"}, weights, "num_attention_heads is 'four'"),
        ({}, weights[:1000], "safetensors"),
        ({}, None, r"no \.safetensors file"),
    ]
    for changes, data, words in cases:
        (folder / "config.json").write_text(json.dumps(config | changes))
        (folder / "model.safetensors").unlink(missing_ok=True)
        if data is not None:
            (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(pydflash.PydflashError, match=words):
            convert_draft(folder, tmp_path / "out.gguf", MODELS / "nano-bf16.gguf")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]


def test_a_value_beyond_f16_is_not_converted_to_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = upcast_folder(DRAFTERS / "dflash2", tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.mlp_conv.kernel_projection.weight"][0, 0] = 70000.0
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(pydflash.UnsupportedModelError, match=r"mlp_conv.* holds 70000, f16 ends at 65504"):
        convert_draft(folder, tmp_path / "out.gguf", MODELS / "nano-bf16.gguf", "f16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]
    convert_draft(folder, tmp_path / "out.gguf", MODELS / "nano-bf16.gguf", "bf16")
