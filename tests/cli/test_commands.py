"""Commands run in this process: what they print, and how they end."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import pydflash
from pydflash import builtin
from pydflash.cli import run

Cli = Callable[..., tuple[int, str, str]]
PROMPT = "def quicksort(items):"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """cli("generate", "text"): exit status, standard output, standard error."""
    for name in ("PYDFLASH_MODEL", "PYDFLASH_DRAFT", "PYDFLASH_DEVICE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        status = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_generate_prints_the_text(cli: Cli) -> None:
    status, out, err = cli("generate", PROMPT, "-n", 40, "-t", 1, "--stats")
    assert status == 0
    with pydflash.Engine.open(options=pydflash.EngineOptions(n_threads=1)) as engine:
        wanted = engine.generate(PROMPT, pydflash.SamplingOptions(max_tokens=40)).text
    assert out == wanted + "\n"
    assert "40 tokens at" in err
    assert "widths" in err
    assert err.count("\n") == 1


def test_generate_says_how_much_was_drafted(cli: Cli) -> None:
    _, _, err = cli("generate", PROMPT, "-n", 40, "-t", 1, "--stats", "--width", 16)
    assert "drafted" in err
    assert "tokens a step" in err
    _, _, err = cli("generate", PROMPT, "-n", 10, "-t", 1, "--stats", "--draft", "none")
    assert "drafter off" in err


def test_generate_json_has_the_fields_of_a_result(cli: Cli) -> None:
    arguments = ("generate", PROMPT, "-n", 12, "-t", 1, "--temp", 0.7, "--seed", 5, "--logprobs", 2, "--json")
    status, out, _ = cli(*arguments)
    assert status == 0
    result = json.loads(out)
    assert set(result) == {"text", "token_ids", "finish_reason", "stop_text", "seed", "logprobs", "stats"}
    assert result["seed"] == 5
    assert len(result["token_ids"]) == len(result["logprobs"]) == 12
    assert all(len(entry["top"]) == 2 for entry in result["logprobs"])
    assert {"steps", "proposed", "accepted", "mean_accepted_length", "verify_ms", "widths"} <= set(result["stats"])
    assert json.loads(cli(*arguments)[1])["token_ids"] == result["token_ids"]


def test_sampling_flags_reach_the_sampler(cli: Cli) -> None:
    base = ("generate", PROMPT, "-n", 16, "-t", 1, "--json")
    plain = json.loads(cli(*base)[1])["token_ids"]
    banned = [f"--logit-bias={token}=-inf" for token in set(plain)]
    other = json.loads(cli(*base, *banned)[1])["token_ids"]
    assert not set(plain) & set(other)
    stop = json.loads(cli(*base, "--stop", "return")[1])
    assert stop["stop_text"] == "return"
    assert "return" not in stop["text"]
    hot = [json.loads(cli(*base, "--temp", 3, "--seed", seed)[1])["token_ids"] for seed in (1, 2)]
    assert hot[0] != hot[1]
    narrow = json.loads(cli(*base, "--temp", 3, "--seed", 1, "--top-k", 1)[1])["token_ids"]
    assert narrow == plain


def test_generate_chat_uses_the_template(cli: Cli) -> None:
    status, out, _ = cli(
        "generate", "Write a function that adds.", "--chat", "--system", "Be short.", "-n", 8, "--json"
    )
    assert status == 0
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Write a function that adds."}]
    with pydflash.Engine.open() as engine:
        assert json.loads(out)["stats"]["prompt_tokens"] == len(engine.encode(messages))


def test_generate_reads_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.read", lambda: PROMPT, raising=False)
    assert cli("generate", "-", "-n", 5, "-t", 1, "--json")[1].count("token_ids") == 1


def test_the_environment_stands_in_for_flags(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYDFLASH_MODEL", str(tmp_path / "of-the-environment.gguf"))
    status, _, err = cli("generate", PROMPT)
    assert status == 2
    assert "of-the-environment.gguf" in err
    assert cli("generate", PROMPT, "-n", 1, "-t", 1, "--model", builtin.target_path())[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate",), "Missing argument"),
        (("generate", PROMPT, "--bogus"), "No such option: --bogus"),
        (("generate", PROMPT, "--model", "/no/such/file.gguf"), "/no/such/file.gguf"),
        (("generate", PROMPT, "--draft", "/no/such/drafter"), "/no/such/drafter"),
        (("generate", PROMPT, "--temperature", "-1"), "temperature is -1.0"),
        (("generate", PROMPT, "--max-tokens", "0"), "--max-tokens"),
        (("generate", PROMPT, "--cache-type-k", "q9"), "q9"),
        (("generate", PROMPT, "--device", "tpu"), "tpu"),
        (("generate", PROMPT, "--logit-bias", "x=1"), "ID=NUMBER"),
        (("generate", PROMPT, "--ctx-size", "4"), "context of 4"),
        (("generate", ""), "at least one token"),
        (("inspect", "/no/such/file.gguf"), "no such file"),
        (("convert", "/no/such/folder", "/tmp/out.gguf"), "/no/such/folder"),
        (("bench", "--prompts", "/no/such.json"), "/no/such.json"),
        (("bench", "--ctx-size", "100"), ">= 640"),
        (("nonsense",), "nonsense"),
    ],
)
def test_what_the_user_can_correct_is_one_line_and_status_2(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    status, out, err = cli(*arguments)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("pydflash: ")
    assert words in err


def test_a_file_that_is_no_model(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("notes")
    status, _, err = cli("generate", PROMPT, "--model", path)
    assert status == 2
    assert "notes.gguf" in err


def test_chat_keeps_the_conversation(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(
        ["Write a function that adds.\n", "\n", "/stats\n", "Shorter.\n", "/reset\n", "Hello.\n", "/what\n", ""]
    )
    seen: list[int] = []
    encode = pydflash.Engine.encode

    def spy(engine: pydflash.Engine, prompt: object) -> tuple[int, ...]:
        if isinstance(prompt, list):
            seen.append(len(prompt))
        return encode(engine, prompt)  # type: ignore[arg-type]

    monkeypatch.setattr(pydflash.Engine, "encode", spy)
    monkeypatch.setattr("sys.stdin.readline", lambda: next(lines), raising=False)
    status, out, err = cli("chat", "-n", 12, "-t", 1, "--system", "Be short.", "--stats")
    assert status == 0
    assert seen == [2, 4, 2]  # messages of each request
    assert out.strip()
    assert err.count("tok/s; prompt") == 4
    assert "/reset forgets" in err


def test_chat_goes_on_after_a_full_context(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["word " * 200 + "\n", "Hi.\n", "/exit\n"])
    monkeypatch.setattr("sys.stdin.readline", lambda: next(lines), raising=False)
    status, out, err = cli("chat", "-n", 4, "-t", 1, "--ctx-size", 128)
    assert status == 0
    assert "a context of 128 takes at most 127; /reset starts anew" in err
    assert out.strip()


def test_devices(cli: Cli) -> None:
    status, out, _ = cli("devices")
    assert status == 0
    assert "cpu" in out
    listed = json.loads(cli("devices", "--json")[1])
    assert [entry["kind"] for entry in listed].count("cpu") == 1


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version") == (0, f"pydflash {pydflash.__version__}\n", "")
    for command in ("generate", "chat", "inspect", "bench", "devices", "convert"):
        status, out, _ = cli(command, "--help")
        assert status == 0
        assert "Examples" in out
        assert f"pydflash {command}" in out


def test_verbose_shows_the_log(cli: Cli, f32_path: Callable[[str], Path]) -> None:
    arguments = ("generate", "a", "-n", 2, "-t", 1, "--model", f32_path("nano"))
    assert "no drafter was named" not in cli(*arguments)[2]
    assert "INFO: no drafter was named for nano.gguf" in cli("-v", *arguments)[2]
