"""`autotune export`."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.errors import BadInput

# Everything heavier is imported inside the function: `autotune export --help` needs none of it.

_FORMATS = ("yaml", "command", "docker", "compose", "kubernetes", "systemd", "json")


@click.command("export")
@click.argument("run", metavar="RUN")
@click.option("--format", "form", type=click.Choice(_FORMATS), default="yaml", show_default=True)
@click.option(
    "--launch", metavar="N|NAME", help="Another launch than the best, by its number; in a scan by its name."
)
@click.option("--all", "everything", is_flag=True, help="Also options that were left to vLLM.")
@click.option("--pinned", is_flag=True, help="The KV pool in bytes: the same in every version.")
@click.option("--wrap", is_flag=True, help="command, docker: one option a line.")
@click.option("--port", type=click.IntRange(1, 65535), help="Where the server is reached  [8000]")
@click.option(
    "--image", metavar="NAME:TAG", help="Containers: another image than vLLM's own of that version."
)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="A file instead of stdout.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(
    run: str,
    form: str,
    launch: str | None,
    everything: bool,
    pinned: bool,
    wrap: bool,
    port: int | None,
    image: str | None,
    output: Path | None,
    runs_dir: Path,
) -> int:
    """Write the best configuration of RUN in the form a deployment needs.

    RUN is a run folder, its name under --runs-dir, or `latest`. What was measured, when and on what stands in
    a comment above it.
    """
    import getpass

    from autotune.report.export import export
    from autotune.report.pastrun import find_run
    from autotune.report.textfile import write_text

    if image is not None and (not image.isprintable() or not image or " " in image or image.startswith("-")):
        # `docker run` would take what follows a dash for an option; no image's name has blanks.
        raise BadInput(f"--image {image[:60]!r} is not of the form NAME:TAG")
    past = find_run(run, runs_dir)
    for problem in past.problems:
        click.echo(f"{past.path}: {problem}", err=True)
    user = ""
    if form == "systemd":
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = ""
    text = export(
        past,
        form,
        launch=launch,
        everything=everything,
        pin=pinned,
        wrap=wrap,
        image=image,
        port=port,
        user="" if user == "root" else user,
    )
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)
        click.echo(f"{form} of {past.run_id}: {output}", err=True)
    return 0
