"""What the fake vLLM was told to do (part of the fake vLLM; see fake_vllm.py for the list)."""

from __future__ import annotations

import fcntl
import json
import os


def parse(text: str) -> dict[str, str]:
    items = filter(None, text.split(","))
    return {name: value for name, _, value in (item.partition("=") for item in items)}


#: One for the whole process; `apply_faults` adds to it.
DO = parse(os.environ.get("FAKE_VLLM", ""))


def number(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


def apply_faults(options: dict[str, object]) -> None:
    """Adds the behaviours that FAKE_FAULTS, a JSON file, gives to launches with these options.

    `[{"when": {"max_num_seqs": 3}, "do": "die=load", "first": 1}]`: "first" limits it to so many launches.
    """
    path = os.environ.get("FAKE_FAULTS")
    if not path:
        return
    with open(path, encoding="utf-8") as file:
        rules = json.load(file)
    for position, rule in enumerate(rules):
        if all(str(options.get(name)) == str(value) for name, value in rule.get("when", {}).items()):
            if "first" in rule and count(f"{path}.{position}") > rule["first"]:
                continue
            DO.update(parse(rule["do"]))


def count(path: str) -> int:
    """How often this was called for `path`, this time included, over all processes."""
    with open(path, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        seen = int(file.read() or 0) + 1
        file.truncate(0)
        file.write(str(seen))
    return seen
