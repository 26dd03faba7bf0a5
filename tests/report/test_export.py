"""Exports, each read back by the tool that would use it, with model paths that bite."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.errors import BadInput
from autotune.report.export import FORMATS, export
from autotune.report.pastrun import PastRun, read_run
from tests.report.compose_schema import COMPOSE
from tests.report.run_folder import BASE, BEST, make_run, trial

#: Paths with everything that a shell, YAML, Compose, Kubernetes or systemd takes for something else.
HOSTILE = [
    "/models/a b",
    '/models/it\'s "quoted"',
    "/models/$HOME ${HOME} $(id) `id` $$",
    "/models/100% %h %% \\back\\slash",
    "/models/a;b&c|d>e<f *?[x] #!~ {a,b}",
    "/models/colon: - yes, no: 'true'",
    "/models/ümlaut 模型 ✓",
    '/models/a,b="c"',
    "/models/@x -y --z=1",
]
LIMIT = '{"image": 2, "video": 0}'


def past_of(tmp_path: Path, **changes: Any) -> PastRun:
    return read_run(make_run(tmp_path, **changes))


def words_of_shell(script: str) -> list[str]:
    """The words that a shell would give to the command, by a shell; its program becomes a printer."""
    lines = [line for line in script.splitlines() if not line.startswith("#")]
    code = "import sys, json; print(json.dumps(sys.argv[1:]))"
    body = "\n".join(lines)
    program, rest = shlex.quote(sys.executable), ""
    for name in ("/opt/venv/bin/vllm", "docker", "vllm"):
        if body.startswith(name) or f" {name} " in body or f"\n  {name} " in body:
            head, _, rest = body.partition(name)
            body = f"{head}{program} -c {shlex.quote(code)} {rest}"
            break
    done = subprocess.run(
        ["bash", "-c", body],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/home/me"},
    )
    assert done.returncode == 0, done.stderr
    words: list[str] = json.loads(done.stdout)
    return words


@pytest.mark.parametrize("model", HOSTILE)
@pytest.mark.parametrize("wrap", [False, True])
def test_a_command_gives_a_shell_the_very_words(tmp_path: Path, model: str, wrap: bool) -> None:
    best = {**BEST, "limit_mm_per_prompt": LIMIT}
    script = export(past_of(tmp_path, model=model, best=best), "command", wrap=wrap)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    words = words_of_shell(script)
    assert words[:2] == ["serve", model]
    assert words[words.index("--limit-mm-per-prompt") + 1] == LIMIT
    assert (script.rstrip().count("\n  ") > 3) == wrap


@pytest.mark.parametrize("model", HOSTILE)
def test_docker_gets_the_folder_mounted_and_its_new_place(tmp_path: Path, model: str) -> None:
    script = export(past_of(tmp_path, model=model), "docker")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    words = words_of_shell(script)
    (mount,) = [words[at + 1] for at, word in enumerate(words) if word == "--mount"]
    # As Docker reads it: comma separated values with CSV's quotes.
    import csv

    (fields,) = csv.reader([mount])
    assert fields[:2] == ["type=bind", f"source={model}"]
    assert fields[3] == "readonly"
    inside = fields[2].removeprefix("target=")
    image = words.index("vllm/vllm-openai:v0.28.0")
    assert words[image + 1 : image + 3] == ["serve", inside]
    assert words[words.index("--entrypoint") + 1] == "vllm"
    assert words[words.index("--served-model-name") + 1] == inside.rsplit("/", 1)[1]


@pytest.mark.parametrize("model", HOSTILE)
def test_a_systemd_unit_starts_the_very_words(tmp_path: Path, model: str) -> None:
    environment = {"PLAIN": "x", "ODD": 'a "b" 100% \\ $HOME'}
    text = export(past_of(tmp_path, model=model, environment=environment), "systemd", user="me")
    words = unit_words(next(line for line in text.splitlines() if line.startswith("ExecStart="))[10:])
    assert words[:3] == ["/opt/venv/bin/vllm", "serve", model]
    variables = [unit_words(line[12:])[0] for line in text.splitlines() if line.startswith("Environment=")]
    # There is no `$` to expand in Environment=.
    assert variables == ['ODD=a "b" 100% \\ $HOME', "PLAIN=x"]


def unit_words(line: str) -> list[str]:
    """The words that systemd.service(5) and systemd.syntax(7) make of a line: quotes, \\, %%, $$."""
    found: list[str] = []
    word, quoted, position = None, False, 0
    while position < len(line):
        c = line[position]
        position += 1
        if c == " " and not quoted:
            if word is not None:
                found.append(word)
            word = None
            continue
        word = word or ""
        if c == '"':
            quoted = not quoted
        elif c == "\\":
            assert line[position] in '"\\', line
            word += line[position]
            position += 1
        elif c == "%":
            assert line[position] == "%", line
            word += "%"
            position += 1
        elif c == "$" and position < len(line) and line[position] == "$":
            word += "$"
            position += 1
        else:
            assert quoted or c not in "'$;", line
            word += c
    assert not quoted
    return [*found, word] if word is not None else found


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
@pytest.mark.parametrize("model", HOSTILE)
def test_systemd_itself_accepts_the_unit(tmp_path: Path, model: str) -> None:
    program = tmp_path / "venv" / "vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    environment = {"ODD": 'a "b" 100% \\ $HOME', "HF_TOKEN": None}
    past = past_of(tmp_path, model=model, prefix=(str(program), "serve"), environment=environment)
    unit = tmp_path / "vllm-test.service"
    unit.write_text(export(past, "systemd", user="root"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    own = [line for line in done.stderr.splitlines() if "vllm-test" in line]
    assert (done.returncode, own) == (0, []), done.stderr


def test_a_program_that_systemd_cannot_quote_goes_through_env(tmp_path: Path) -> None:
    past = past_of(tmp_path, prefix=("/opt/$my venv/vllm", "serve"))
    line = next(x for x in export(past, "systemd").splitlines() if x.startswith("ExecStart="))
    assert unit_words(line[10:])[:3] == ["/usr/bin/env", "/opt/$my venv/vllm", "serve"]
    by_name = past_of(tmp_path, name="b", prefix=("vllm", "serve"))
    text = export(by_name, "systemd")
    assert "ExecStart=/usr/bin/env vllm serve" in text
    assert "looked up in systemd's own PATH" in text


@pytest.mark.parametrize("model", HOSTILE)
def test_compose_reads_back_the_very_words(tmp_path: Path, model: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    environment = {"ODD": 'a "b" 100% \\ $HOME', "HF_TOKEN": None}
    text = export(past_of(tmp_path, model=model, environment=environment), "compose")
    document = yaml.safe_load(text)
    jsonschema.validate(document, COMPOSE)
    (service,) = document["services"].values()
    words = [compose_value(word) for word in service["command"]]
    assert words[0] == service["volumes"][0]["target"]
    assert compose_value(service["volumes"][0]["source"]) == model
    assert [compose_value(word) for word in service["environment"]] == ["HF_TOKEN", 'ODD=a "b" 100% \\ $HOME']
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == "all"


def compose_value(value: str) -> str:
    """What Compose makes of a value: `$$` is a dollar, any other `$` a variable."""
    import re

    assert not re.search(r"(?<!\$)\$(\$\$)*(?!\$)", value) or "$HOME" in value, value
    return value.replace("$$", "$")


def compose_program() -> list[str] | None:
    for words in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(words[0])
            and subprocess.run([*words, "version"], capture_output=True).returncode == 0
        ):
            return words
    return None


@pytest.mark.skipif(compose_program() is None, reason="no docker compose here")
@pytest.mark.parametrize("model", HOSTILE)
def test_compose_itself_accepts_the_file(tmp_path: Path, model: str) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(export(past_of(tmp_path, model=model), "compose"), encoding="utf-8")
    words = [*(compose_program() or []), "-f", str(file), "config", "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model", HOSTILE)
def test_kubernetes_reads_back_the_very_words(tmp_path: Path, model: str) -> None:
    environment = {"ODD": "a $(HOME) $$ b", "SECRET_KEY": None}
    text = export(past_of(tmp_path, model=model, environment=environment), "kubernetes")
    deployment, service = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in server["volumeMounts"]} == set(volumes)
    # Not a field with variables: the path stands as it is.
    assert volumes["model"]["hostPath"]["path"] == model
    assert kubernetes_value(server["args"][0]) == server["volumeMounts"][1]["mountPath"]
    assert kubernetes_value(server["env"][0]["value"]) == "a $(HOME) $$ b"
    assert server["env"][1]["valueFrom"]["secretKeyRef"]["key"] == "SECRET_KEY"
    assert server["resources"]["limits"] == server["resources"]["requests"] == {"nvidia.com/gpu": "1"}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels


def kubernetes_value(value: str) -> str:
    """Kubernetes' own expansion (third_party/forked/golang/expansion), with no variable known."""
    found, position = "", 0
    while position < len(value):
        c = value[position]
        following = value[position + 1 : position + 2]
        if c == "$" and following == "$":
            found, position = found + "$", position + 2
            continue
        assert not (c == "$" and following == "("), value
        found, position = found + c, position + 1
    return found


@pytest.mark.parametrize("changes", [{}, {"model": "Qwen/Qwen3-8B"}, {"model": HOSTILE[2]}])
def test_kubernetes_own_schema_accepts_both_documents(tmp_path: Path, changes: dict[str, Any]) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    text = export(past_of(tmp_path, **changes), "kubernetes")
    for document in yaml.safe_load_all(text):
        schemas.validate(document, schemas.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-8B", "vllm-qwen3-8b"),
        ("/m/模型", "vllm"),
        ("/m/" + "x" * 90, "vllm-" + "x" * 35),
        ("/m/-a-", "vllm-a"),
    ],
)
def test_names_of_services_are_dns_labels(tmp_path: Path, model: str, name: str) -> None:
    deployment, service = yaml.safe_load_all(export(past_of(tmp_path, model=model), "kubernetes"))
    assert deployment["metadata"]["name"] == service["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("seconds", "model", "most_s"),
    [(60.0, "/m/x", 600), (300.0, "/m/x", 960), (60.0, "Qwen/Qwen3-8B", 4200)],
)
def test_a_start_may_take_what_was_measured_three_times_over(
    tmp_path: Path, seconds: float, model: str, most_s: int
) -> None:
    rows = [trial(BEST, 0, seconds=seconds), trial(BEST, 1, seconds=seconds + 20)]
    text = export(past_of(tmp_path, model=model, trials=rows), "kubernetes")
    (deployment, _) = yaml.safe_load_all(text)
    probe = deployment["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == most_s
    assert f"{most_s} s" in text


@pytest.mark.parametrize("form", FORMATS)
def test_a_model_that_vllm_would_take_for_an_option_is_refused(tmp_path: Path, form: str) -> None:
    with pytest.raises(BadInput, match="begins with a dash"):
        export(past_of(tmp_path, model="--config=/etc/passwd"), form)


@pytest.mark.parametrize("model", ["/models/a\nb", "/models/a\x1bb", "/models/a\u2028b", "/models/a\x85b"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_path_that_no_file_can_carry_is_refused_in_one_line(tmp_path: Path, model: str, form: str) -> None:
    with pytest.raises(BadInput, match="no deployment file can carry") as raised:
        export(past_of(tmp_path, model=model), form)
    assert "\n" not in raised.value.message


def test_a_header_line_cannot_be_left_by_what_it_says(tmp_path: Path) -> None:
    device = {"name": "evil\nmodel: other\rx\u2028y", "kind": "cuda", "total_bytes": 1, "free_bytes": 1}
    past = past_of(
        tmp_path, run={"device": device, "autotune_version": "1\n2"}, result={"doubts": ["a\nhost: 0.0.0.0"]}
    )
    for form in FORMATS:
        text = export(past, form)
        if form == "json":
            assert json.loads(text)["about"]["doubts"] == ["a\nhost: 0.0.0.0"]
            continue
        comment = [line for line in text.split("\n") if "evil" in line or "host:" in line]
        assert comment
        assert all(line.startswith("# ") for line in comment)


def test_the_header_says_what_was_measured_when_and_on_what(tmp_path: Path) -> None:
    text = export(past_of(tmp_path), "yaml")
    for said in (
        "103.00 output tok/s (95 %: 101.00 to 105.00, 2 launches)",
        "1.03 times vLLM's default (95 %: 1.01 to 1.05)",
        "2026-01-02T03:04:09Z",
        "requests of 4096 tokens",
        "64 clients, 3072 + 1024 tokens",
        "NVIDIA GeForce RTX 4090, driver 560.1, CUDA 12.6, unknown: torch, platform, kernel",
        "valid for",
        "doubt: launch 2 (search): a doubt",
    ):
        assert said in text, text


@pytest.mark.parametrize(
    ("run", "result", "advised"),
    [
        ({}, {}, True),
        ({"engine": "sim"}, {"measured": False}, False),
        ({"engine": "replay"}, {}, False),
        ({"kind": "scan"}, {}, False),
    ],
)
def test_a_rerun_is_advised_where_there_is_one(
    tmp_path: Path, run: dict, result: dict, advised: bool
) -> None:
    text = export(past_of(tmp_path, run=run, result=result), "yaml", launch="1")
    assert ("autotune rerun" in text) is advised
    assert "and this device" in text


@pytest.mark.parametrize(
    ("run", "result", "said"),
    [
        ({"engine": "sim"}, {"measured": False}, "PREDICTED, not measured: 103.00"),
        ({"engine": "replay"}, {}, "recorded: 103.00"),
        ({}, {"interrupted": True}, "the best so far"),
        ({"dummy_weights": True}, {}, "RANDOM WEIGHTS"),
        ({"fingerprint": {}}, {}, "unknown: driver, CUDA, torch"),
    ],
)
def test_the_header_hides_nothing(tmp_path: Path, run: dict, result: dict, said: str) -> None:
    assert said in export(past_of(tmp_path, run=run, result=result), "command")


def test_only_options_that_differ_from_defaults_unless_all(tmp_path: Path) -> None:
    best = {**BEST, "gpu_memory_utilization": 0.92, "cpu_offload_gb": 0.0, "tensor_parallel_size": 1}
    rows = [trial(best, 0)]
    options = json.loads(export(past_of(tmp_path, best=best, trials=rows), "json"))["options"]
    assert options == {"max_model_len": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 2048}
    # What the person fixed stays, and so does what is not that version's default.
    fixed = past_of(
        tmp_path, name="b", best=best, trials=[trial(best, 0)], run={"fixed": {"cpu_offload_gb": 0.0}}
    )
    assert json.loads(export(fixed, "json"))["options"]["cpu_offload_gb"] == 0.0
    older = past_of(tmp_path, name="c", best=best, trials=[trial(best, 0)], run={"vllm_version": "0.17.0"})
    assert json.loads(export(older, "json"))["options"]["gpu_memory_utilization"] == 0.92
    unknown = past_of(tmp_path, name="d", best=best, trials=[trial(best, 0)], run={"vllm_version": "0.99"})
    assert json.loads(export(unknown, "json"))["options"]["gpu_memory_utilization"] == 0.92
    assert "left out" in export(fixed, "yaml")


TINY = str(Path(__file__).parents[2] / "examples" / "tiny-llama")
CPU = {
    "device": {"name": "EPYC, node 0", "kind": "cpu", "total_bytes": 24 << 30, "free_bytes": 20 << 30},
    "vllm_version": "0.32.0",
}


def tiny_run(tmp_path: Path, **changes: Any) -> PastRun:
    """examples/tiny-llama on the CPU backend in float32: 16384 bytes of KV a token, blocks of 128."""
    best = {"gpu_memory_utilization": 0.2, "max_model_len": 512, "max_num_seqs": 8, "dtype": "float32"}
    seen = {"num_gpu_blocks": 800, "kv_pool_bytes": 800 * 128 * 16384, "max_num_seqs": 8, "block_size": 128}
    rows = [trial(best, 0, observed=seen), trial(best, 1, observed={**seen, "num_gpu_blocks": 790})]
    rows[1]["observed"]["kv_pool_bytes"] = 790 * 128 * 16384 + 1000
    return past_of(
        tmp_path, model=TINY, best=best, trials=rows, run={**CPU, **changes.pop("run", {})}, **changes
    )


@pytest.mark.parametrize(
    ("engine", "how"), [("vllm", "measured"), ("sim", "simulated"), ("replay", "recorded")]
)
def test_pinned_says_where_its_blocks_are_from(tmp_path: Path, engine: str, how: str) -> None:
    past = tiny_run(tmp_path, run={"engine": engine}, result={"measured": engine != "sim"})
    text = export(past, "yaml", pin=True)
    assert f"(the fewest of 2 {how})" in text


def test_pinned_is_measured_blocks_times_bytes_per_block(tmp_path: Path) -> None:
    text = export(tiny_run(tmp_path), "yaml", pin=True)
    assert yaml.safe_load(text)["kv-cache-memory-bytes"] == 790 * 128 * 16384
    assert "790 KV blocks (the fewest of 2 measured) x 2097152 bytes per block" in text
    assert "why: gpu_memory_utilization means another pool" in text


@pytest.mark.parametrize(
    ("changes", "observed", "said"),
    [
        ({"vllm_version": "0.8.5"}, {}, "has no --kv-cache-memory-bytes"),
        ({}, {"num_gpu_blocks": None}, "said how many KV blocks"),
        ({}, {"kv_pool_bytes": 3 << 30}, "not understood"),
    ],
)
def test_pinned_guesses_nothing(tmp_path: Path, changes: dict, observed: dict, said: str) -> None:
    past = tiny_run(tmp_path, run=changes)
    for row in past.trials:
        row["observed"].update(observed)  # type: ignore[union-attr]
    with pytest.raises(BadInput, match=said):
        export(past, "yaml", pin=True)


def test_pinned_without_the_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="model's config cannot be read here"):
        export(past_of(tmp_path, model="/no/such/model"), "yaml", pin=True)


def test_pinned_takes_the_bytes_that_a_run_recorded(tmp_path: Path) -> None:
    rows = [trial(BEST, 0, kv={"bytes_per_block": 2097152})]
    past = past_of(tmp_path, model="/no/such/model", trials=rows)
    assert yaml.safe_load(export(past, "yaml", pin=True))["kv-cache-memory-bytes"] == 2000 * 2097152


def test_all_fixes_what_was_left_to_vllm(tmp_path: Path) -> None:
    options = json.loads(export(tiny_run(tmp_path), "json", everything=True))["options"]
    assert options["max_num_batched_tokens"] == 2048
    assert options["block_size"] == 128
    assert options["gpu_memory_utilization"] == 0.2
    # Without the model's config, what the server said of itself.
    past = past_of(tmp_path, name="b", model="/no/such/model", best=BASE, trials=[trial(BASE, 0)])
    options = json.loads(export(past, "json", everything=True))["options"]
    assert options["max_num_seqs"] == 256
    assert options["max_num_batched_tokens"] == 2048


@pytest.mark.parametrize(
    ("run", "image", "said"),
    [
        ({"vllm_version": "0.26.0+cu130"}, "vllm/vllm-openai:v0.26.0", ""),
        ({"vllm_version": "v0.11.2"}, "vllm/vllm-openai:v0.11.2", ""),
        (CPU, "vllm/vllm-openai-cpu:v0.32.0-x86_64", ""),
        ({**CPU, "fingerprint": {"machine": "aarch64"}}, "vllm/vllm-openai-cpu:v0.32.0-arm64", ""),
        ({"vllm_version": "0.1.dev1+g123"}, None, "no official image"),
        ({"vllm_version": "unknown"}, None, "no official image"),
        ({"vllm_version": "0.26.0\nimage: evil"}, None, "vLLM 0.26.0�image: evil has no official image"),
        ({**CPU, "vllm_version": "0.11.0"}, None, "no official CPU image"),
    ],
)
def test_the_image_is_that_of_the_version(tmp_path: Path, run: dict, image: str | None, said: str) -> None:
    past = past_of(tmp_path, run=run)
    if image is None:
        with pytest.raises(BadInput, match=said) as raised:
            export(past, "docker")
        assert "--image" in raised.value.hint
        image = "mine:1"
        assert f" {image} serve " in export(past, "docker", image=image)
        return
    assert f" {image} serve " in export(past, "docker")


@pytest.mark.parametrize(
    ("environment", "extra", "docker", "compose", "pods"),
    [
        ({}, (), "all", {"count": "all"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, (), "device=1", {"device_ids": ["1"]}, "1"),
        (
            {"CUDA_VISIBLE_DEVICES": "GPU-1234-ab,GPU-5678-cd,2"},
            ("--data-parallel-size", "2"),
            '"device=GPU-1234-ab,GPU-5678-cd"',
            {"device_ids": ["GPU-1234-ab", "GPU-5678-cd"]},
            "2",
        ),
    ],
)
def test_containers_see_the_gpus_that_were_measured(
    tmp_path: Path, environment: dict, extra: tuple[str, ...], docker: str, compose: dict, pods: str
) -> None:
    past = past_of(tmp_path, environment=environment, extra=extra)
    words = words_of_shell(export(past, "docker"))
    assert words[words.index("--gpus") + 1] == docker
    assert not [word for word in words if word.startswith("CUDA_VISIBLE_DEVICES")]
    (service,) = yaml.safe_load(export(past, "compose"))["services"].values()
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert compose.items() <= device.items()
    pod, _ = yaml.safe_load_all(export(past, "kubernetes"))
    assert pod["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": pods}


def test_a_hub_model_brings_its_cache_and_the_callers_token(tmp_path: Path) -> None:
    past = past_of(tmp_path, model="Qwen/Qwen3-8B")
    words = words_of_shell(export(past, "docker"))
    assert "/home/me/.cache/huggingface:/root/.cache/huggingface" in words
    assert words[words.index("--env") + 1] == "HF_TOKEN"
    assert "--served-model-name" not in words
    (service,) = yaml.safe_load(export(past, "compose"))["services"].values()
    assert service["volumes"][0]["source"] == "${HOME}/.cache/huggingface"


def test_a_secret_is_asked_for_and_never_written(tmp_path: Path) -> None:
    past = past_of(tmp_path, environment={"HF_TOKEN": None, "A": "b c"})
    command = export(past, "command")
    assert ': "${HF_TOKEN:?is needed}"' in command
    assert "\nA='b c' /opt/venv/bin/vllm serve " in command
    assert "EnvironmentFile=/etc/vllm-some-model.env" in export(past, "systemd")


def test_a_secret_that_was_taken_out_is_said(tmp_path: Path) -> None:
    past = past_of(tmp_path, extra=("--hf-token", "***"))
    assert "*** stands for a secret" in export(past, "yaml")
    assert "***" not in export(past_of(tmp_path, name="b"), "yaml")


def test_a_module_and_a_tokenizer_of_ours_are_carried(tmp_path: Path) -> None:
    prefix = ("/opt/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    row = trial(
        BEST, 0, argv=[*prefix, "--model", "/m/x", "--max-num-seqs", "32", "--tokenizer", "/runs/r/tok"]
    )
    past = past_of(tmp_path, model="/m/x", prefix=prefix, trials=[row])
    words = json.loads(export(past, "json"))["command"]
    assert words[:5] == [*prefix, "--model", "/m/x"]
    assert words[words.index("--tokenizer") + 1] == "/runs/r/tok"
    docker = words_of_shell(export(past, "docker"))
    assert docker[docker.index("--tokenizer") + 1] == "/models/tokenizer"
    assert "type=bind,source=/runs/r/tok,target=/models/tokenizer,readonly" in docker
    assert yaml.safe_load(export(past, "yaml"))["tokenizer"] == "/runs/r/tok"


def test_another_launch_is_exported_by_its_number(tmp_path: Path) -> None:
    past = past_of(tmp_path)
    assert json.loads(export(past, "json", launch="3"))["options"]["max_num_seqs"] == 8
    with pytest.raises(BadInput, match="no launch '7'") as raised:
        export(past, "json", launch="7")
    assert "1, 2, 3, 4" in raised.value.hint


def test_a_scan_needs_a_name(tmp_path: Path) -> None:
    rows = [trial(BEST, 0, name="fast"), trial(BASE, 1, name="dead", outcome="gate2_no_kv")]
    past = past_of(tmp_path, trials=rows, run={"kind": "scan"}, result={"best": None, "kind": "scan"})
    with pytest.raises(BadInput, match="is a scan") as raised:
        export(past, "yaml")
    assert raised.value.hint.endswith("--launch: fast")
    assert json.loads(export(past, "json", launch="fast"))["options"]["max_num_seqs"] == 32


def test_a_run_in_which_nothing_served_has_nothing_to_export(tmp_path: Path) -> None:
    past = past_of(
        tmp_path,
        result={"best": None, "status": "unreachable", "unreachable": {"reason": "gate 2 stands in the way"}},
    )
    with pytest.raises(BadInput, match="nothing served") as raised:
        export(past, "yaml")
    assert raised.value.hint == "gate 2 stands in the way"


@pytest.mark.parametrize(
    "best",
    [{"max_num_seqs": "many"}, {"no_such_option": 1}, {"gpu_memory_utilization": 7}, {"max_model_len": [1]}],
)
def test_options_that_no_vllm_can_have_been_given_are_refused(tmp_path: Path, best: dict) -> None:
    with pytest.raises(BadInput):
        export(past_of(tmp_path, best=best), "yaml")


def test_exports_do_not_depend_on_the_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past = past_of(tmp_path)
    before = {form: export(past, form) for form in FORMATS}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("COLUMNS", "20")
    assert {form: export(past, form) for form in FORMATS} == before
    assert os.environ["HOME"] == "/nowhere"


@pytest.mark.skipif(not shutil.which("docker"), reason="no docker here")
@pytest.mark.parametrize("model", [HOSTILE[2], HOSTILE[7], "Qwen/Qwen3-8B"])
@pytest.mark.parametrize("run", [{}, CPU])
def test_docker_s_own_command_line_takes_every_option(tmp_path: Path, model: str, run: dict) -> None:
    """Docker reads its options before it looks for its daemon, and there is none at this address."""
    past = past_of(tmp_path, model=model, run=run, environment={"CUDA_VISIBLE_DEVICES": "0,1", "A": "$b c"})
    done = subprocess.run(
        ["bash", "-c", export(past, "docker")],
        capture_output=True,
        text=True,
        env={**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"},
    )
    assert done.returncode == 125
    assert "annot connect to the Docker daemon" in done.stderr or "failed to connect" in done.stderr, (
        done.stderr
    )
