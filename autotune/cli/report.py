"""`autotune report`."""

from __future__ import annotations

from pathlib import Path

import click

# Everything heavier (matplotlib above all) is imported inside the function.


@click.command("report")
@click.argument("run", metavar="RUN")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Another file than report.html in the run's folder.",
)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str, output: Path | None, runs_dir: Path) -> int:
    """Write RUN as one HTML page: default against best, what was pruned, memory, every launch with its log.

    RUN is a run folder, its name under --runs-dir, or `latest`. The page needs no network and no other file;
    unreachable, interrupted and running ones have a page too.
    """
    from autotune.report.html import report_html, write_report
    from autotune.report.pastrun import find_run
    from autotune.report.textfile import write_text
    from autotune.report.values import visible

    past = find_run(run, runs_dir)
    for problem in past.problems:
        click.echo(visible(f"{past.path}: {problem}"), err=True)
    if output is None:
        output = write_report(past.path)
    else:
        write_text(output, report_html(past))
    click.echo(str(output))
    return 0
