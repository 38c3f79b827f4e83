"""What the page shows of several runs: settings and scores.

Runs that differ in nothing but the seed are one group; its numbers are means, with the standard
deviation over its runs as their spread.
"""

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from ppdist.common.logging import duration
from ppdist.report.charts import Chart
from ppdist.report.evaluation import Table
from ppdist.report.one_run import Drawn, seconds_of, speed_of, status_of, training_charts
from ppdist.report.run import Run, written

# Keys that make no other experiment: where files lie, what is said, and chance.
_SAME_EXPERIMENT = ("seed", "output_dir", "log.")
_NOT_COMPARED = ("output_dir", "log.")
_DERIVED = ("ranks", "total_batch", "lr", "steps", "steps_per_epoch", "warmup_steps")
_SOFTWARE = ("paddle", "ppdist", "code", "python", "cpus", "cards_on_this_host", "platform")
_BETWEEN = " | "  # several values of one group
_COLOURS = 8
_MOST_CLASSES = 100
_SEED_AT_END = re.compile(r"[-_. ]*(?:s|seed)?[-_. ]*$", re.IGNORECASE)


@dataclass(frozen=True)
class Group:
    """Runs of one experiment; `colour` as in style.css, beyond the eighth dashed."""

    name: str
    runs: list[Run]
    colour: int
    dashed: bool


@dataclass(frozen=True)
class SeveralRuns:
    """The page of several runs."""

    groups: list[Group]
    summary: Table
    each: Table | None  # run by run, where a group has several
    differing: Table | None
    charts: list[Chart]
    classes: Table | None
    note: str


def compare(runs: Sequence[Run]) -> SeveralRuns:
    """Works out everything the page of several runs shows; the first run is the measure of speed.

    Gives each run a name that the others do not have.
    """
    for run, name in zip(runs, distinct([run.folder for run in runs])):
        run.name = name
    groups = grouped(runs)
    lines: list[Drawn] = [
        (run, run.name, group.name, group.colour, group.dashed)
        for group in groups
        for run in group.runs
    ]
    several = any(len(group.runs) > 1 for group in groups)
    note = "± is the standard deviation over the runs of a group." if several else ""
    one_each = [Group(run.name, [run], 0, False) for group in groups for run in group.runs]
    return SeveralRuns(
        groups=groups,
        summary=_summary(groups),
        each=_summary(one_each) if several else None,
        differing=_differing(groups),
        charts=training_charts(lines),
        classes=_classes(groups),
        note=note,
    )


def distinct(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    longest = max(map(len, parts))
    names = [part[-1] for part in parts]
    for length in range(2, longest + 1):
        common = {name for name, count in Counter(names).items() if count > 1}
        names = [
            str(Path(*part[-length:])) if name in common else name
            for name, part in zip(names, parts)
        ]
    return names


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs of one configuration but for the seed, in the order in which they were given."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        settings = {
            key: value for key, value in run.config.items() if not key.startswith(_SAME_EXPERIMENT)
        }
        derived = [run.derived_value(key) for key in _DERIVED]
        # A run without a configuration is like no other.
        own = "" if run.config else f"{run.folder.resolve()}"
        key = json.dumps([settings, derived, own], sort_keys=True, default=str)
        found.setdefault(key, []).append(run)
    return [
        Group(name, members, place % _COLOURS, place >= _COLOURS)
        for place, (name, members) in enumerate(zip(_names(list(found.values())), found.values()))
    ]


def _names(groups: Sequence[Sequence[Run]]) -> list[str]:
    names = []
    for runs in groups:
        letters = takewhile(lambda each: len(set(each)) == 1, zip(*(run.name for run in runs)))
        common = "".join(each[0] for each in letters)
        stripped = _SEED_AT_END.sub("", common) if len(runs) > 1 else common
        names.append(stripped or runs[0].name)
    repeated = {name for name, count in Counter(names).items() if count > 1}
    return [
        f"{name} ({place + 1})" if name in repeated else name for place, name in enumerate(names)
    ]


def _spread(values: Sequence[float | None], places: int = 4) -> str | None:
    """`0.561`, or `0.561 ± 0.004` of several."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = f"{statistics.fmean(known):.{places}f}"
    return f"{mean} ± {statistics.stdev(known):.{places}f}" if len(known) > 1 else mean


def _of_best(key: str) -> Callable[[Run], float | None]:
    return lambda run: run.best.get(key) if run.best else None


def _summary(groups: Sequence[Group]) -> Table:
    """A row for each group; columns in which no run has a value are left out."""
    metrics = {run.metric for group in groups for run in group.runs if run.metric}
    metric = next(iter(metrics)) if len(metrics) == 1 else "own metric"
    columns: list[tuple[str, Callable[[Group], object]]] = [
        ("runs", lambda group: len(group.runs)),
        ("state", lambda group: ", ".join(sorted({status_of(run)[0] for run in group.runs}))),
        (f"best {metric}", _of_group(lambda run: run.best[run.metric] if run.best else None)),
        (f"last {metric}", _of_group(lambda run: run.last[run.metric] if run.last else None)),
    ]
    for key in ("mAP", "mAP50", "mAP75", "f1", "val_loss", "top5"):
        if key != metric:
            columns.append((key, _of_group(_of_best(key))))
    first = _mean_speed(groups[0])
    columns += [
        ("steps", lambda group: ", ".join(map(str, sorted({run.steps for run in group.runs})))),
        ("images a second", lambda group: _spread([speed_of(run) for run in group.runs], 1)),
        ("speed", lambda group: _ratio(_mean_speed(group), first)),
        ("time", _mean_time),
    ]
    cells = {name: [value_of(group) for group in groups] for name, value_of in columns}
    shown = [name for name, values in cells.items() if any(value is not None for value in values)]
    if all(len(group.runs) == 1 for group in groups):
        shown.remove("runs")
    rows = [
        [group.name, *(cells[name][place] for name in shown)] for place, group in enumerate(groups)
    ]
    best = f"Other scores are those of the evaluation with the best {metric}." if metrics else ""
    speed = f"Speed: images a second against {groups[0].name}." if first else ""
    return Table(["", *shown], rows, note=f"{best} {speed}".strip())


def _of_group(value_of: Callable[[Run], float | None]) -> Callable[[Group], object]:
    return lambda group: _spread([value_of(run) for run in group.runs])


def _mean_speed(group: Group) -> float | None:
    speeds = [speed for run in group.runs if (speed := speed_of(run))]
    return statistics.fmean(speeds) if speeds else None


def _ratio(speed: float | None, first: float | None) -> str | None:
    return f"{speed / first:.2f}x" if speed and first else None


def _mean_time(group: Group) -> str | None:
    times = [seconds for run in group.runs if (seconds := seconds_of(run)) is not None]
    return duration(statistics.fmean(times)) if times else None


def _differing(groups: Sequence[Group]) -> Table | None:
    """Keys of configuration, derived numbers and software that are not the same everywhere."""
    configured = dict.fromkeys(key for group in groups for run in group.runs for key in run.config)
    facts: dict[str, Callable[[Run], str | None]] = {
        key: partial(_setting, key=key) for key in configured if not key.startswith(_NOT_COMPARED)
    }
    facts |= {f"{key} (derived)": partial(Run.derived_value, key=key) for key in _DERIVED}
    facts |= {f"{key} (environment)": partial(_software, key=key) for key in _SOFTWARE}
    rows = [[name, *_values(groups, value_of)] for name, value_of in facts.items()]
    rows = [row for row in rows if len(set(row[1:])) > 1 or _BETWEEN in row[1]]
    return Table(["key", *(group.name for group in groups)], rows) if rows else None


def _values(groups: Sequence[Group], value_of: Callable[[Run], str | None]) -> list[str]:
    """One for each group, or all that its runs have."""
    return [
        _BETWEEN.join(dict.fromkeys(value_of(run) or "–" for run in group.runs)) for group in groups
    ]


def _setting(run: Run, key: str) -> str | None:
    return written(run.config[key]) if key in run.config else None


def _software(run: Run, key: str) -> str | None:
    value = run.environment.get(key)
    return None if value is None else written(value)


def _classes(groups: Sequence[Group]) -> Table | None:
    """AP of each class at the best evaluation."""
    names = dict.fromkeys(
        key
        for group in groups
        for run in group.runs
        for key in (run.best or {})
        if key.startswith("AP/")
    )
    if not names or len(names) > _MOST_CLASSES:
        return None
    rows = [
        [key.removeprefix("AP/"), *(_of_group(_of_best(key))(group) for group in groups)]
        for key in names
    ]
    return Table(["class", *(group.name for group in groups)], rows)
