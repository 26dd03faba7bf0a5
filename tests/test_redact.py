"""Secrets in texts, documents, commands and logs; and everything that only looks like one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import redact

TOKEN = "hf_" + "aBcD1234" * 4


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    redact.forget()
    yield
    redact.forget()


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("HUGGING_FACE_HUB_TOKEN", True),
        ("VLLM_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("DB_PASSWORD", True),
        ("MYTOKEN", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("MAX_TOKENS", False),
        ("MONKEY", False),
        ("KEYBOARD", False),
        ("PATH", False),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert redact.is_secret_name(name) is secret


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (f"loading with {TOKEN}.", "loading with ***."),
        (
            "non-default args: {'api_key': ['abc'], 'port': 1}",
            "non-default args: {'api_key': ['***'], 'port': 1}",
        ),
        ("vllm serve m --api-key abc --port 3", "vllm serve m --api-key *** --port 3"),
        ("--hf-token=abc", "--hf-token=***"),
        ("HF_TOKEN=abc vllm serve", "HF_TOKEN=*** vllm serve"),
        ('{"HF_TOKEN": "abc"}', '{"HF_TOKEN": "***"}'),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer ***"),
        ("postgresql://me:pass@host/db", "postgresql://me:***@host/db"),
        ("key sk-abcdefghijklmnopqrst", "key ***"),
        ("a\nHF_TOKEN=abc\nb", "a\nHF_TOKEN=***\nb"),
    ],
)
def test_known_shapes_are_taken_out(text: str, cleaned: str) -> None:
    assert redact.clean(text) == cleaned
    assert redact.clean(cleaned) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens=2048, eos_token='</s>', unk_token: '<unk>'",
        "KeyError: 'foo'",
        "the password is wrong, the API key: see the manual",
        ': "${HF_TOKEN:?is needed}"',
        "model_key: qwen3|28|1024",
        "cached_token: 3, num_prompt_tokens 5",
        "http://127.0.0.1:8000/v1/completions",
        "huggingface.co/org/model@main",
        "api_key=None hf_token=True",
        "export MONKEY=banana",
        "ask-abcdefghijklmnopqrstuv",
    ],
)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    assert redact.clean(text) == text


def test_recorded_logs_and_cases_hold_none() -> None:
    """Redaction must not eat what the classifier reads."""
    data = Path(__file__).parent / "data"
    for path in [*(data / "logs").iterdir(), data / "public-launch-cases.yaml"]:
        text = path.read_text()
        assert redact.clean(text) == text


def test_values_given_by_name_are_known_everywhere() -> None:
    redact.remember({"MY_TOKEN": "plain-value-1", "HF_HOME": "/home/me", "A_KEY": "short"})
    assert redact.clean("x plain-value-1 y /home/me short") == "x *** y /home/me short"
    # One secret may begin with another.
    redact.add(["plain-value-1-and-more"])
    assert redact.clean("plain-value-1-and-more") == "***"


def test_documents_and_commands() -> None:
    redact.add(["known-secret"])
    document = {
        "argv": ["vllm", "serve", "--api-key", "abc", "--hf-token=abc", "--port", "1"],
        "env": {"HF_TOKEN": "abc", "HF_HOME": "/h"},
        "model_key": "a|b",
        "nested": [{"text": "say known-secret"}, 3, None, 1.5, True],
    }
    assert redact.clean_tree(document) == {
        "argv": ["vllm", "serve", "--api-key", "***", "--hf-token=***", "--port", "1"],
        "env": {"HF_TOKEN": "***", "HF_HOME": "/h"},
        "model_key": "a|b",
        "nested": [{"text": "say ***"}, 3, None, 1.5, True],
    }


def test_a_log_is_rewritten_with_its_mode_and_only_where_needed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = b"\xff\xfe binary\r\nline\n" * 1000
    log.write_bytes(body + f"token {TOKEN}\n".encode() + body)
    log.chmod(0o600)
    assert redact.clean_file(log, block_bytes=4096)
    assert log.read_bytes() == body + b"token ***\n" + body
    assert log.stat().st_mode & 0o777 == 0o600
    inode = log.stat().st_ino
    assert not redact.clean_file(log)
    assert log.stat().st_ino == inode
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text(TOKEN)
    (tmp_path / "log").symlink_to(target)
    assert not redact.clean_file(tmp_path / "log")
    assert not redact.clean_file(tmp_path / "none")
    assert target.read_text() == TOKEN


@given(st.text(max_size=200), st.text("abcXYZ019-_", min_size=8, max_size=30), st.text(max_size=200))
def test_a_known_value_never_gets_through(before: str, secret: str, after: str) -> None:
    redact.forget()
    redact.add([secret])
    assert secret not in redact.clean(before + secret + after)
