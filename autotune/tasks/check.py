"""One configuration, checked: from the options as typed to the answer."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune.tasks.check_speed import LoadAsked
from autotune.tasks.options import parse_environment, parse_passthrough

if TYPE_CHECKING:
    from autotune.core.calibration import Calibration
    from autotune.core.device import Device
    from autotune.core.launch import LaunchConfig
    from autotune.report.ledger import Checked
    from autotune.vllm.predict import Predictor

# Everything heavier is imported inside the functions: `autotune check --help` needs none of it.


def checked(
    *,
    model: str,
    device_text: str,
    vllm_version: str | None,
    usage: str,
    observations: tuple[str, ...],
    no_cache: bool,
    vllm_env: tuple[str, ...],
    trust_remote_code: bool,
    others: tuple[str, ...],
    as_json: bool = False,
    **options: Any,
) -> Checked:
    """The question that the command's options ask, answered. Prints nothing.

    Args:
        as_json: of no meaning here.
        options: those of a load, and vLLM's, as typed.

    Raises:
        BadInput: anything wrong with the options, the files or the model.
        EngineUnavailable: this machine's own device was asked about, and there is none.
    """
    from autotune.core.launch import check_option

    load = LoadAsked.taken_from(options)
    given = {name: check_option(name, value) for name, value in options.items() if value is not None}
    passed = parse_passthrough(others, trusted=given, searching=False)
    answer = _check(
        model,
        device_text,
        vllm_version,
        usage,
        observations,
        cached=not no_cache,
        environment={**os.environ, **parse_environment(vllm_env)},
        trust="--trust-remote-code" in passed.rest or trust_remote_code,
        given={**given, **passed.options},
        rest=[word for word in passed.rest if word.startswith("-") and word != "--trust-remote-code"],
        load=load,
    )
    return replace(answer, notes=[*passed.doubts, *answer.notes])


def _check(
    model: str,
    device_text: str,
    vllm_version: str | None,
    usage: str,
    observations: tuple[str, ...],
    *,
    cached: bool,
    environment: dict[str, str],
    trust: bool,
    given: dict[str, Any],
    rest: list[str],
    load: LoadAsked,
) -> Checked:
    """The question answered; the cheap checks first."""
    from autotune.core.launch import AUTO_LENGTH, LaunchConfig
    from autotune.devices import find_device
    from autotune.known import learn_from
    from autotune.models import load_model
    from autotune.report.ledger import Checked
    from autotune.report.values import one_line
    from autotune.tasks.check_speed import predicted
    from autotune.vllm.advice import advise
    from autotune.vllm.predict import Predictor
    from autotune.vllm.versions import heeded

    config = LaunchConfig.from_params(given)
    loaded = load_model(model, trust_remote_code=trust)
    version, python, backend, notes = _vllm(vllm_version, device_text)
    named = find_device(device_text, python=python, backend=backend)
    device = named.device
    notes.append(named.source)
    variables = heeded(environment)
    predictor = Predictor(loaded.spec, version, usage=usage, environment=variables)
    learnt = learn_from(
        predictor, device, observations, version=version, cached=cached, model_names=loaded.other_names
    )
    device = learnt.device
    notes += learnt.notes
    if variables:
        notes.append(f"environment: {', '.join(f'{name}={value}' for name, value in variables.items())}")
    if rest:
        notes.append(f"not looked at: {' '.join(map(one_line, rest))}")
    if config.max_model_len == AUTO_LENGTH:
        notes.append(_longest(predictor, config, device, learnt.calibration))
    verdict = predictor.verdict(config, device, learnt.calibration)
    return Checked(
        verdict=verdict,
        advice=advise(predictor, config, device, learnt.calibration),
        device=device,
        model=loaded.name,
        version=version,
        usage=usage,
        given=config.params(),
        window=predictor.gmu_window(config, device, learnt.calibration),
        notes=notes,
        launches=learnt.used,
        not_looked_at=rest,
        predicted=predicted(load, verdict, loaded.spec, device, observations=observations, version=version),
    )


def _vllm(asked: str | None, device_text: str) -> tuple[str, str | None, str | None, list[str]]:
    """Version, interpreter and backend of the vLLM in question, and where the version comes from."""
    from autotune.engines.find import find_vllm
    from autotune.errors import EngineUnavailable
    from autotune.vllm.versions import check_version, rules_for

    asked = check_version(asked) if asked is not None else None
    if asked is not None and device_text != "auto":
        return asked, None, None, []
    try:
        found = find_vllm(None)
    except EngineUnavailable:
        if asked is not None:
            return asked, None, None, []
        # What the rules of an unknown version are taken from.
        version = rules_for("unknown").column
        return version, None, None, [f"vLLM {version}: none is installed, so the newest known"]
    if asked is not None:
        return asked, found.python, found.kind, []
    return found.version, found.python, found.kind, [f"vLLM {found.version}: the installed one"]


def _longest(predictor: Predictor, config: LaunchConfig, device: Device, calibration: Calibration) -> str:
    config = config.with_options(max_model_len=None)
    most = predictor.longest_length(config, device, calibration)
    if most is None:
        return "--max-model-len auto: not even one token fits"
    least = predictor.longest_length(config, device, calibration, surely=True) or 0
    fits = f"{most:,}" if least == most else f"between {least:,} and {most:,}"
    return f"--max-model-len auto: {fits} tokens fit (the model allows {predictor.longest:,})"
