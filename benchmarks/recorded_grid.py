"""Makes a recording of a scan's run folders, and says what its landscape looks like.

    autotune scan tests/data/recordings/cpu-grid.scan.yaml --model examples/tiny-llama … …alone on the machine
    python benchmarks/recorded_grid.py runs/<scan> [runs/<more> …] --write tests/data/recordings/cpu-grid.yaml
    python benchmarks/recorded_grid.py tests/data/recordings/cpu-grid.yaml [--plot docs/landscape.svg]
    python benchmarks/recorded_grid.py tests/data/recordings/cpu-grid.yaml --again runs/<scan of some again>

Truth of a configuration is the mean over its launches; `Noise` (core/noise.py) says what it is worth.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.core.launch import LaunchConfig
from autotune.core.noise import Noise
from autotune.core.stats import t_quantile
from autotune.observations import read_rows
from autotune.recordings import Recording, load_recording

#: Facts of a run that a figure depends on, and that are the same for all its launches.
_CONDITIONS = (
    "vllm", "vllm_kind", "torch", "model_config_sha256", "model_runner", "cpu", "cpu_count",
    "host_memory_bytes", "os", "kernel", "python",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One configuration that served: the rates of its launches, in the order of recording."""

    name: str
    config: LaunchConfig
    launches: tuple[float, ...]
    windows: int

    @property
    def tok_s(self) -> float:
        return statistics.fmean(self.launches)


def points_of(recording: Recording) -> list[Point]:
    """What served, fastest first."""
    found: dict[LaunchConfig, list[tuple[str, float, int]]] = defaultdict(list)
    for launch in recording.launches:
        if launch.tok_s is not None:
            found[launch.config].append((launch.name, launch.tok_s, len(launch.busiest())))
    points = [
        Point(rows[0][0], config, tuple(row[1] for row in rows), min(row[2] for row in rows))
        for config, rows in found.items()
    ]
    return sorted(points, key=lambda point: -point.tok_s)


def interval_of(point: Point, noise: Noise, launches: int | None = None) -> tuple[float, float]:
    """95 % of the mean over `launches` launches (its own number by default)."""
    half = t_quantile(0.975, noise.freedom) * noise.of_mean(point.windows, launches or len(point.launches))
    return point.tok_s * math.exp(-half), point.tok_s * math.exp(half)


def recording_text(folders: Sequence[Path], baseline: str) -> str:
    """The launches of several run folders as one recording with their conditions in its header.

    Raises:
        ValueError: the folders differ in what a figure depends on.
    """
    rows: list[dict[str, Any]] = []
    conditions: dict[str, Any] = {}
    loads: list[Any] = []
    times: list[str] = []
    for folder in folders:
        run = yaml.safe_load((folder / "run.yaml").read_text())
        # What a launch did not come far enough to say is no difference.
        stands = {n: v for n in _CONDITIONS if (v := run["fingerprint"].get(n, "unknown")) != "unknown"}
        differ = [name for name, value in stands.items() if conditions.setdefault(name, value) != value]
        if differ:
            raise ValueError(f"{folder} was recorded under other conditions: {', '.join(differ)}")
        loads.append(run["workload"])
        rows += yaml.safe_load((folder / "observations.yaml").read_text())
        times += [
            json.loads(line)["started_at"]
            for line in (folder / "trials.jsonl").read_text().splitlines()
            if json.loads(line)["charged"]
        ]
    names = {row["id"]: row["engine_args"] for row in rows}
    for row in rows:
        # One device, one model: their places on the recording machine say nothing.
        row["model"] = Path(row["model"]).name
        if row.get("bench"):
            row["bench"] = [
                {**rate, "seconds": round(rate["seconds"], 4), "output_tok_s": round(rate["output_tok_s"], 3)}
                for rate in row["bench"]
            ]
    document: dict[str, Any] = {
        "conditions": {**conditions, "first_launch": min(times), "last_launch": max(times)},
        # Standard deviations of the logarithm of a rate (core/noise.py).
        "noise": _noise_row(rows),
        "workload": next(load for load in loads if load),
        "baseline": names[baseline],
        "launches": rows,
    }
    return yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None)


def _noise_row(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    noise = read_rows("these launches", rows, {}).noise()
    if noise is None:
        return None
    return {
        "between_windows": round(noise.between_windows, 5),
        "between_launches": round(noise.between_launches, 5),
        "repeats": noise.freedom,
    }


def half_orders(points: Sequence[Point], count: int = 5) -> tuple[list[str], list[str]]:
    """The fastest by first launches alone, and by second launches alone."""
    first = sorted(points, key=lambda point: -point.launches[0])[:count]
    last = sorted(points, key=lambda point: -point.launches[-1])[:count]
    return [point.name for point in first], [point.name for point in last]


def effects(points: Sequence[Point]) -> Iterator[tuple[str, Any, Any, list[float]]]:
    """Option, a value, another value, and the ratios of pairs that differ in this option alone."""
    by_config = {point.config: point for point in points}
    options = sorted({name for point in points for name in point.config.params()})
    for option in options:
        values = sorted({point.config.params().get(option) for point in points}, key=str)
        for at, one in enumerate(values):
            for other in values[at + 1 :]:
                ratios = [
                    by_config[point.config.with_options(**{option: other})].tok_s / point.tok_s
                    for point in points
                    if point.config.params().get(option) == one
                    and point.config.with_options(**{option: other}) in by_config
                ]
                if ratios:
                    yield option, one, other, ratios


def describe(recording: Recording) -> Iterator[str]:
    """The landscape in lines a person reads."""
    points = points_of(recording)
    noise = recording.noise()
    outcomes: dict[str, set[LaunchConfig]] = defaultdict(set)
    for launch in recording.launches:
        outcomes[launch.outcome.value].add(launch.config)
    counted = ", ".join(f"{len(configs)} {name}" for name, configs in sorted(outcomes.items()))
    configurations = len({launch.config for launch in recording.launches})
    yield f"{configurations} configurations, {len(recording.launches)} launches: {counted}"
    if noise is None:
        yield "no configuration was launched twice: nothing is known of what launches differ by"
        return
    yield (
        f"noise: windows {noise.between_windows:.1%}, launches {noise.between_launches:.1%} "
        f"(from {noise.freedom} repeats); mean of 2 launches ± {interval_half(points[0], noise):.1%}"
    )
    yield f"fastest {points[0].tok_s:.1f}, slowest {points[-1].tok_s:.1f} tok/s"
    for point in points[:10]:
        low, high = interval_of(point, noise)
        each = " ".join(f"{rate:.1f}" for rate in point.launches)
        yield f"  {point.tok_s:7.2f} ({low:.1f} to {high:.1f}; {each})  {point.name}"
    first, last = half_orders(points)
    yield f"best 5 by first launches:  {', '.join(first)}"
    yield f"best 5 by second launches: {', '.join(last)}"
    yield "real differences among the best (beyond what launches differ by, 95 %):"
    told = list(_real_differences(points[:8], noise))
    yield from told or ["  none"]
    yield "options, all else equal (median ratio, range, pairs):"
    for option, one, other, ratios in effects(points):
        middle = statistics.median(ratios)
        span = f"{min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)}"
        yield f"  {option} {one} -> {other}: {middle:.2f} ({span})"


def interval_half(point: Point, noise: Noise) -> float:
    """Half of the 95 % interval of a mean, as a share of it."""
    return interval_of(point, noise)[1] / point.tok_s - 1


def _real_differences(points: Sequence[Point], noise: Noise) -> Iterator[str]:
    for at, one in enumerate(points):
        for other in points[at + 1 :]:
            error = math.hypot(*(noise.of_mean(p.windows, len(p.launches)) for p in (one, other)))
            distance = math.log(one.tok_s / other.tok_s)
            if distance > t_quantile(0.975, noise.freedom) * error:
                yield f"  {one.name} over {other.name}: {one.tok_s / other.tok_s:.2f}"


def compared(
    recording: Recording, again: Recording
) -> Iterator[tuple[str, float, tuple[float, float], bool]]:
    """Name, rate when recorded again, interval that the recording states for one launch, and inside it."""
    noise = recording.noise()
    known = {_pool_given(point.config): point for point in points_of(recording)}
    for point in points_of(again):
        old = known.get(_pool_given(point.config))
        if old is None or noise is None:
            continue
        error = math.hypot(
            noise.of_mean(old.windows, len(old.launches)), noise.of_mean(point.windows, len(point.launches))
        )
        half = t_quantile(0.975, noise.freedom) * error
        low, high = old.tok_s * math.exp(-half), old.tok_s * math.exp(half)
        yield old.name, point.tok_s, (low, high), low <= point.tok_s <= high


def _pool_given(config: LaunchConfig) -> LaunchConfig:
    """Without the share of memory where the pool is given in bytes: it is then a limit that nothing reaches,
    and autotune sets it by what is free on the day.
    """
    return config.with_options(gpu_memory_utilization=None) if config.kv_cache_memory_bytes else config


def plot(recording: Recording, path: Path) -> None:
    """Throughput against max_num_seqs, one panel per pool size, one line per block size and token budget."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "autotune"
    matplotlib.rcParams["svg.fonttype"] = "none"
    points, noise = points_of(recording), recording.noise()
    pools = sorted({point.config.kv_cache_memory_bytes or 0 for point in points})
    figure, axes = plt.subplots(1, len(pools), figsize=(10, 3.6), sharey=True, squeeze=False)
    colours = {32: "#0072b2", 64: "#009e73", 128: "#d55e00"}
    for axis, pool in zip(axes[0], pools, strict=True):
        lines: dict[Mapping[str, Any] | tuple[Any, ...], list[Point]] = defaultdict(list)
        for point in points:
            config = point.config
            if config.kv_cache_memory_bytes == pool:
                key = (
                    config.block_size,
                    config.max_num_batched_tokens,
                    config.max_model_len,
                    config.enforce_eager,
                )
                lines[key].append(point)
        for (block, tokens, length, eager), members in sorted(lines.items(), key=str):
            members.sort(key=lambda point: point.config.max_num_seqs or 0)
            label = f"block {block}"
            label += "" if tokens == 512 else f", {tokens} batched tokens"
            label += "" if length == 256 else f", length {length}"
            label += "" if eager else ", compiled"
            errors = [interval_half(point, noise) * point.tok_s if noise else 0 for point in members]
            axis.errorbar(
                [point.config.max_num_seqs or 0 for point in members],
                [point.tok_s for point in members],
                yerr=errors,
                label=label,
                color=colours.get(block),
                linestyle="-" if tokens == 512 and length == 256 and eager else ":",
                marker="o" if eager else "s",
                markersize=4,
                capsize=2,
                linewidth=1.2,
            )
        axis.set_title(f"pool {pool >> 20} MiB", fontsize=10)
        axis.set_xlabel("max_num_seqs")
        axis.set_xticks([2, 4, 8, 16])
        axis.legend(fontsize=6)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("output tokens per second")
    axes[0][0].set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    """Reads the command line and does what it asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, help="run folders of scans, or one recording")
    parser.add_argument("--write", type=Path, help="the recording to make of the run folders")
    parser.add_argument(
        "--baseline", default="s16-b128-big-t512-l256", help="name of the launch to compare with"
    )
    parser.add_argument("--plot", type=Path, help="SVG to write")
    parser.add_argument("--again", type=Path, help="run folder of a scan that launched some of them again")
    asked = parser.parse_args()
    source = asked.paths[0]
    if asked.write:
        asked.write.write_text(recording_text(asked.paths, asked.baseline))
        source = asked.write
    recording = load_recording(source / "observations.yaml" if source.is_dir() else source)
    print("\n".join(describe(recording)))
    if asked.plot:
        plot(recording, asked.plot)
    if asked.again:
        for name, rate, (low, high), inside in compared(
            recording, load_recording(asked.again / "observations.yaml")
        ):
            said = "inside" if inside else "OUTSIDE"
            print(f"again {name}: {rate:.1f}, stated {low:.1f} to {high:.1f}: {said}")


if __name__ == "__main__":
    main()
