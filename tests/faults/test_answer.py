"""Ctrl-C between the last launch and the answer: every launch is made, so the answer is kept."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import main
from autotune.search import result, scan_result

ROOT = Path(__file__).parents[2]
ASKED = ("--model", str(ROOT / "examples/tiny-llama"), "--engine", "sim", "--device", "4090")


@pytest.mark.parametrize(
    ("words", "module", "makes"),
    [
        (("search", "--target-len", "256", "--max-launches", "3"), result, "result_of"),
        (("scan", "scan-seqs"), scan_result, "scan_result"),
    ],
)
def test_ctrl_c_while_the_answer_is_made_does_not_cost_it(
    words: tuple[str, ...], module: Any, makes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(module, makes)

    def pressed(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(module, makes, pressed)
    with pytest.raises(SystemExit) as end:
        main([*words, *ASKED, "--runs-dir", str(tmp_path)])
    assert end.value.code == 130
    (run,) = tmp_path.iterdir()
    answer = json.loads((run / "result.json").read_text())
    launches = sum(json.loads(line)["charged"] for line in (run / "trials.jsonl").read_text().splitlines())
    assert answer["launches"] == launches > 0
    assert not answer.get("interrupted")
