"""A launch inside vLLM's official image: what is mounted, what it is called there, which GPUs it sees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.errors import BadInput
from autotune.report.export.deployment import Deployment, container_environment, folder_path
from autotune.report.values import one_line, text

#: The port that vLLM's server listens on when none is given.
_PORT = 8000
#: Where the image's user keeps what was downloaded from the hub.
HUB_CACHE = "/root/.cache/huggingface"
#: First minor version with a CPU image beside the others (vLLM's installation pages; tags seen from v0.20).
_CPU_IMAGE_FROM = 20
#: vLLM's CPU pages run the image with 4 GB of shared memory.
_CPU_SHM = "4g"


@dataclass(frozen=True)
class Mount:
    """A folder of the host inside a container."""

    source: str
    target: str
    read_only: bool = True

    def docker(self) -> str:
        """For `docker run --mount`, which reads comma separated values with CSV's own quoting."""
        fields = ["type=bind", f"source={self.source}", f"target={self.target}"]
        fields += ["readonly"] if self.read_only else []
        return ",".join(
            f'"{f.replace(chr(34), chr(34) * 2)}"' if re.search(r'[",]', f) else f for f in fields
        )


@dataclass(frozen=True)
class Container:
    """A launch in a container.

    Attributes:
        entrypoint: given in full, since the image's own has changed between versions.
        arguments: vLLM's words after it.
        gpus_option: for `docker run --gpus`; empty on the CPU backend.
        gpu_ids: chosen GPUs; empty for the first ones.
        cache: the hub cache is needed: the model has no folder.
    """

    name: str
    image: str
    entrypoint: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str | None]
    mounts: tuple[Mount, ...]
    port: int
    cpu: bool
    gpus: int
    gpus_option: str
    gpu_ids: tuple[str, ...]
    served_name: str
    cache: bool
    shm_size: str = _CPU_SHM
    cpu_options: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def container(given: Deployment, *, image: str | None) -> Container:
    """`given` as it runs in a container of the measured version.

    Args:
        image: another one than the official image.

    Raises:
        BadInput: there is no official image of that version, or a chosen GPU that cannot be passed on.
    """
    mounts: list[Mount] = []
    model, served, notes = given.model, given.model, []
    tokenizer = given.tokenizer
    if given.is_folder:
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", given.past.model_label).strip("-.") or "model"
        mounts.append(Mount(folder_path(given.model), f"/models/{base}"))
        model, served = f"/models/{base}", base
        notes.append(f"requests name the model {base!r}")
    if tokenizer is not None and tokenizer.startswith(("/", ".", "~")):
        mounts.append(Mount(folder_path(tokenizer), "/models/tokenizer"))
        tokenizer = "/models/tokenizer"
    elsewhere = [word for word in given.extra if word.startswith(("/", "./", "../", "~/"))]
    elsewhere += [w.partition("=")[2] for w in given.extra if w.partition("=")[2].startswith(("/", "./"))]
    if elsewhere:
        notes.append(f"these paths are not mounted: {', '.join(elsewhere)}")
    environment = container_environment(given)
    if not given.is_folder:
        # A token of the caller's own, for models that ask for one.
        environment.setdefault("HF_TOKEN", None)
    named = "--served-model-name" in given.extra or not given.is_folder
    arguments = given.words(
        model=model,
        tokenizer=tokenizer,
        as_module=False,
        served_model_name=None if named else served,
    )
    ids = tuple(part.strip() for part in given.gpu.split(",") if part.strip())[: given.gpus]
    for gpu in ids:
        if not re.fullmatch(r"\d{1,3}|GPU-[0-9A-Fa-f-]{4,40}|MIG-[\w/-]{4,80}", gpu):
            raise BadInput(f"the run's GPU {gpu[:60]!r} is neither an index nor a UUID")
    option = ""
    if not given.cpu:
        # Docker reads this value as CSV too: quotes keep the comma between two devices.
        option = f'"device={",".join(ids)}"' if len(ids) > 1 else f"device={ids[0]}" if ids else "all"
    return Container(
        name=given.name,
        image=image or official_image(given),
        entrypoint=("vllm", "serve"),
        arguments=tuple(arguments),
        environment=environment,
        mounts=tuple(mounts),
        port=_PORT,
        cpu=given.cpu,
        gpus=given.gpus,
        gpus_option=option,
        gpu_ids=ids,
        served_name=served,
        cache=not given.is_folder,
        # vLLM binds memory to a NUMA node, which Docker's default profile forbids (its CPU pages).
        cpu_options=("--security-opt=seccomp=unconfined", "--cap-add=SYS_NICE") if given.cpu else (),
        notes=tuple(notes),
    )


def official_image(given: Deployment) -> str:
    """`vllm/vllm-openai:v0.28.0`, or the CPU one.

    Raises:
        BadInput: a version that was never released, or none that is known.
    """
    plain = given.version.partition("+")[0].removeprefix("v")
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?", plain)
    if match is None:
        raise BadInput(
            f"vLLM {one_line(given.version)} has no official image",
            hint="name one with --image REPOSITORY:TAG",
        )
    if not given.cpu:
        return f"vllm/vllm-openai:v{plain}"
    if (int(match[1]), int(match[2])) < (0, _CPU_IMAGE_FROM):
        raise BadInput(
            f"vLLM {plain} has no official CPU image that is known here",
            hint="name one with --image REPOSITORY:TAG",
        )
    machine = text(given.past.fingerprint.get("machine")).lower()
    return f"vllm/vllm-openai-cpu:v{plain}-{'arm64' if machine in ('aarch64', 'arm64') else 'x86_64'}"
