"""Takes secrets out of everything that is written down or shown: values known by name, and known shapes.

    redact.remember({"HF_TOKEN": "hf_..."})     values whose name says that they are secret
    redact.clean("... hf_... ...")              "... *** ..."

What autotune was given stays in the memory of this process and goes to the server by its environment;
files, messages and command lines on record get `***`.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

#: Stands where a secret stood.
MARK = "***"

# Last parts of a name's words by which its value is a secret. `TOKENIZERS_PARALLELISM` and
# `max-num-batched-tokens` are none, so words are looked at from their ends.
_SECRET_WORD = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEYS?|(?:ACCESS|PRIVATE|AUTH)KEY|\A(?:KEY|PAT))\Z",
    re.IGNORECASE,
)
# In free text and as keys of documents: `eos_token='</s>'` and `model_key: ...` are no secrets there.
_CERTAIN = re.compile(
    r"(?:^|_)(?:api_?key|hf_token|(?:access|auth|bearer|refresh)_token|secret|secret(?:_access)?_key|password"
    r"|passwd|passphrase)\Z"
)
#: Shorter values are redacted beside their name only: "1" or "true" stand everywhere.
_SHORTEST = 8
#: What a secret looks like wherever it stands.
_SHAPES = (
    # Hugging Face access tokens ("hf_" and 34 letters today), and their older form.
    re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}"),
    # OpenAI and compatible servers, GitHub, GitLab, Slack, AWS key ids.
    re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,})"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}")
# scheme://user:password@host
_URL_PASSWORD = re.compile(r"(://[^\s/:@\"']*:)[^\s/@\"']+(?=@)")
# --api-key VALUE, --api-key=VALUE, 'api_key': ['VALUE'], "HF_TOKEN": "VALUE", MY_SECRET=VALUE
_NAMED = re.compile(
    r"(?P<name>(?i:api[_-]?key|hf[_-]token|(?:access|auth|bearer|refresh)[_-]token"
    r"|secret(?:[_-](?:access[_-])?key)?|password|passwd|passphrase)"
    r"|(?<![A-Za-z0-9_])[A-Z][A-Z0-9_]*(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT))"
    r"(?P<sign>['\"]?(?:\s?=\s?|:\s?)[\[(]?|\s)(?P<quote>['\"]?)(?P<value>[^\s'\",;)\]}]+)"
)

#: In lower case; one of them is in every text that an expression above can match.
_HINTS = (
    "hf_", "api_org_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "akia",
    "asia", "bearer ", "@", "api_key", "api-key", "apikey", "token", "secret", "passw", "passphrase", "key",
    "credential", "pat=", "pat:", "pat\"", "pat'",
)  # fmt: skip

_known: set[str] = set()
_pattern: re.Pattern[str] | None = None


def is_secret_name(name: str) -> bool:
    """True when the value of an environment variable of this name is a secret."""
    return any(_SECRET_WORD.search(word) for word in name.split("_") if word)


def _is_certain(name: str) -> bool:
    """True when what stands beside this name in a text, or under it in a document, is a secret."""
    plain = name.lstrip("-").replace("-", "_")
    return bool(_CERTAIN.search(plain.lower())) or (plain.isupper() and is_secret_name(plain))


def remember(variables: Mapping[str, str]) -> None:
    """Takes note of the values of those `variables` whose names say that they are secret."""
    add(value for name, value in variables.items() if is_secret_name(name))


def add(values: Iterable[str]) -> None:
    """Takes note of secret values; too short ones are left out."""
    global _pattern
    before = len(_known)
    _known.update(value for value in values if len(value.strip()) >= _SHORTEST)
    if len(_known) != before:
        # The longest first: one secret may begin with another.
        ordered = sorted(_known, key=len, reverse=True)
        _pattern = re.compile("|".join(re.escape(value) for value in ordered))


def forget() -> None:
    """Forgets every value (for tests)."""
    global _pattern
    _known.clear()
    _pattern = None


def clean(text: str) -> str:
    """`text` without secrets; unchanged when it holds none."""
    if _pattern is not None:
        text = _pattern.sub(MARK, text)
    if "\n" not in text:
        return _clean_line(text)
    return "\n".join(map(_clean_line, text.split("\n")))


def _clean_line(text: str) -> str:
    plain = text.lower()
    if not any(hint in plain for hint in _HINTS):
        return text  # nearly all lines of a log: 20 times faster than asking each expression
    for shape in _SHAPES:
        text = shape.sub(MARK, text)
    text = _BEARER.sub(rf"\g<1>{MARK}", text)
    text = _URL_PASSWORD.sub(rf"\g<1>{MARK}", text)
    return _NAMED.sub(_without_value, text)


def _without_value(match: re.Match[str]) -> str:
    name, sign, value = match["name"], match["sign"], match["value"]
    if name.isupper() and not is_secret_name(name):
        return match[0]  # MONKEY=...
    begin = match.string[max(0, match.start() - 40) : match.start()]
    option = bool(re.search(r"(?:^|\s)--[\w-]*\Z", begin))
    if value in (MARK, "None", "null", "True", "False", "true", "false") or value.startswith(("$", "--")):
        return match[0]  # none, or filled in later: ${HF_TOKEN:?is needed}
    if (sign.isspace() and not option) or (":" in sign and not match["quote"]):
        return match[0]  # prose: "the password is wrong", "API key: see ..."
    return f"{name}{sign}{match['quote']}{MARK}"


def clean_tree(value: Any) -> Any:
    """A document (dicts, lists, texts, numbers) without secrets, also where a key names one."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {
            key: MARK
            if isinstance(key, str) and isinstance(inner, str) and inner and _is_certain(key)
            else clean_tree(inner)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return (
            clean_words(value) if all(isinstance(item, str) for item in value) else [*map(clean_tree, value)]
        )
    return value


def clean_words(words: Iterable[str]) -> list[str]:
    """A command's words without secrets: also the word after `--api-key`."""
    found: list[str] = []
    hide = False
    for word in words:
        found.append(MARK if hide and not word.startswith("--") else clean(word))
        hide = word.startswith("--") and "=" not in word and _is_certain(word)
    return found


def clean_file(path: Path, *, block_bytes: int = 1 << 20) -> bool:
    """Takes secrets out of a text file of any size; True when there were any.

    The file is replaced whole, with its mode kept; one without secrets is not touched. Never raises: a log
    that cannot be rewritten stays readable by its owner only.
    """
    try:
        if not path.is_file() or path.is_symlink() or not _holds_secrets(path, block_bytes):
            return False
        mode = path.stat().st_mode & 0o777
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:60]}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as out:
                for line in _lines(path, block_bytes):
                    out.write(clean(line))
            os.chmod(temporary, mode)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        return False
    return True


def _holds_secrets(path: Path, block_bytes: int) -> bool:
    return any(clean(line) != line for line in _lines(path, block_bytes))


def _lines(path: Path, most: int) -> Iterable[str]:
    """Lines, the longest in pieces, byte for byte."""
    with path.open("r", encoding="utf-8", errors="surrogateescape", newline="") as file:
        while line := file.readline(most):
            yield line
