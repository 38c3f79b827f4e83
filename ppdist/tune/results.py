"""Results of a study: trials.jsonl, plots, VisualDL's pages, tables."""

import json
import math
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from ppdist.common.errors import ConfigError
from ppdist.common.files import (
    make_folder,
    replace_file,
    require_no_link,
    text_of,
    write_text,
    writing,
)
from ppdist.common.writers import VisualDLWriter
from ppdist.tune.trial import Cell, baseline

if TYPE_CHECKING:
    from ppdist.tune.store import Store

BEGIN, END = "<!-- ablations -->", "<!-- end of the ablations -->"
Row = Mapping[str, Any]
_FEWEST_PAIRS = 3  # of a verdict
# Two-sided 95 % of Student's t, by degrees of freedom; of more see _quantile.
_T95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
_NORMAL95 = 1.95996
# Rows that differ in one of these were not measured alike: they stand in tables of their own.
_CONDITIONS = (
    "study", "config", "overrides", "metric", "workers", "processes",
)  # fmt: skip
_EQUAL_TIME = "minutes_per_trial"  # in rows of earlier versions
_NEEDED = (
    *_CONDITIONS, "lower_is_better", "trial", "state", "setting", "base", "seed",
    "variant_overrides", "params", "minutes", "epochs", "best", "curve",
)  # fmt: skip
_FEWEST_FOR_IMPORTANCE = 20  # PED-ANOVA looks at the best tenth, and needs two there


# From the store of a study into its folder.


def rows(store: "Store") -> list[dict[str, Any]]:
    """A row per ended trial: its settings and result.

    Each row holds what of the study makes rows of several sessions comparable.
    """
    study, found = store.config, []
    of_study = {
        "study": study.name,
        "config": study.config,
        "overrides": list(study.overrides),
        "metric": study.metric,
        "lower_is_better": study.lower_is_better,
    }
    for trial in store.trials():
        cell, result = store.cell_of(trial), trial.user_attrs.get("result")
        if cell is not None and result is not None and trial.state.is_finished():
            own = {"trial": trial.number, "state": trial.state.name.lower()}
            own |= {"setting": cell.setting, "base": baseline(study, cell)}
            found.append(of_study | own | cell.record() | result)
    return found


def export(store: "Store") -> None:
    """Rewrites trials.jsonl and adds missing VisualDL curves.

    Any process may call it after any trial.
    """
    with store.lock:  # what another has just written must not be replaced by less
        found = rows(store)
        file = store.folder / "trials.jsonl"
        with writing(file):
            replace_file(file, "".join(json.dumps(row) + "\n" for row in found).encode())
        for row in found:
            if not (store.folder / "vdl" / f"{row['trial']:03d}").exists():
                _write_curves(store.folder / "vdl", row)


def _write_curves(folder: Path, row: dict[str, Any]) -> None:
    """Writes a trial as a VisualDL hyper-parameter row with its curve.

    Only what a trial varies is written: that page takes few columns.
    """
    name = f"{row['trial']:03d}"
    cell = Cell.of(row)
    told: dict[str, Any] = {"variant": cell.variant} if cell.variant else {}
    told |= {
        key: value if isinstance(value, int | float | str) else json.dumps(value)
        for key, value in cell.params.items()
    }
    told |= {} if cell.seed is None else {"seed": cell.seed}
    tag = f"eval/{row['metric']}"
    draft = folder / f"{name}.draft"  # a killed process must not leave half of it
    with writing(folder / name):
        shutil.rmtree(draft, ignore_errors=True)
        file = VisualDLWriter(draft, f"{name} {cell.label}", None)
        file.describe(told | {"state": row["state"]}, [tag], {})
        for epoch, value in row["curve"]:
            file.add_scalars(round(epoch), {tag: value})
        file.close()
        draft.replace(folder / name)


def importances(store: "Store") -> dict[str, float]:
    """Importance of each key for the value; they sum to 1.

    Empty if there are too few complete trials.

    Source: PED-ANOVA, Watanabe et al. 2023, arXiv:2304.10255; fANOVA would need scikit-learn.
    """
    import optuna  # here alone: tables need none

    complete = [each for each in store.trials() if each.state.name == "COMPLETE"]
    if len(store.config.space) < 2 or len(complete) < _FEWEST_FOR_IMPORTANCE:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        found = optuna.importance.get_param_importances(store.study, evaluator=evaluator)
    except (ValueError, RuntimeError):  # all alike
        return {}
    return dict(found)


def draw(store: "Store") -> list[Path]:
    """Writes plots/curves.png and, of a search, plots/importance.png; returns what was drawn."""
    from ppdist.viz import plots  # slow, and not for a table

    folder = store.folder / "plots"
    require_no_link(folder)
    make_folder(folder)
    found = rows(store)
    figures = {
        "curves.png": plots.curves(found),
        "importance.png": plots.importance(importances(store)),
    }
    drawn = {folder / name: figure for name, figure in figures.items() if figure is not None}
    for path, figure in drawn.items():
        plots.save(path, figure)
    return [*drawn]


# From folders and files to tables; without Optuna.


def read_rows(source: Path) -> list[dict[str, Any]]:
    """The rows of a study's folder or of an exported file.

    Raises: ConfigError: there is none, or it is not one.
    """
    file = source / "trials.jsonl" if source.is_dir() else source
    try:
        lines = text_of(file, "replace").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{error.strerror}; expected the folder of a study in which a trial has ended, or "
            "its trials.jsonl",
            code="study_not_found",
            where=str(file),
        ) from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row = {**row, "final": dict(row["final"]), "study": str(row["study"])}
            if absent := [key for key in _NEEDED if key not in row]:
                raise ValueError(f"{', '.join(absent)} is not in it")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"not a row of ppdist tune: {error}",
                code="not_a_study_row",
                where=f"{file}:{number}",
            ) from error
        found.append(row)
    return found


def ablations(rows: Sequence[Row]) -> str:
    """Markdown tables, one per study, comparing each setting with its baseline.

    Trials of one study from several sessions share a table where all was alike; of two with the
    same seed the later counts.  Failed and pruned trials do not count.
    """
    studies: dict[str, list[Row]] = {}
    for row in rows:
        alike = json.dumps([row.get(key) for key in (*_CONDITIONS, _EQUAL_TIME)])
        studies.setdefault(alike, []).append(row)
    return "\n\n".join(_study(found) for found in studies.values())


def _study(rows: Sequence[Row]) -> str:
    first, metric = rows[0], rows[0]["metric"]
    settings: dict[str, dict[Any, Row]] = {}
    for row in rows:
        if row["state"] == "complete" and metric in row["final"]:
            settings.setdefault(row["setting"], {})[row["seed"]] = row
    about = f"**{first['study']}**: `{first['config']}`"
    if first["overrides"]:
        about += " with `" + " ".join(first["overrides"]) + "`"
    if first.get(_EQUAL_TIME):
        about += f", {first[_EQUAL_TIME]:g} minutes a trial"
    about += f", {first['processes']} process(es) a trial, {first['workers']} trial(s) at a time."
    lines = [
        about,
        "",
        f"| variant | changed | seeds | epochs | minutes | {metric}, last | best | "
        f"difference | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(name, settings, metric) for name in settings]
    failed = [row for row in rows if row["state"] == "fail" and row["setting"] not in settings]
    for name in dict.fromkeys(row["setting"] for row in failed):
        lines.append(f"| {name} | | 0 | | | failed | | | |")
    return "\n".join(lines)


def _line(name: str, settings: Mapping[str, Mapping[Any, Row]], metric: str) -> str:
    found = settings[name]
    rows = list(found.values())
    last = [row["final"][metric] for row in rows]
    best = [row["best"][metric] for row in rows]
    changed = " ".join(f"`{item}`" for item in rows[0]["variant_overrides"])
    against, verdict = "", ""
    base_name = rows[-1]["base"]
    if base_name not in ("", name):
        base = settings.get(base_name, {})
        sign = -1 if rows[0]["lower_is_better"] else 1
        both = [seed for seed in found if seed in base]
        differences = [found[seed]["final"][metric] - base[seed]["final"][metric] for seed in both]
        against, verdict = _compared(differences, sign)
        against += f" against {base_name}"
    low, high = (extreme(row["epochs"] for row in rows) for extreme in (min, max))
    epochs = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    minutes = f"{mean(row['minutes'] for row in rows):.1f}"
    return (
        f"| {name} | {changed} | {len(rows)} | {epochs} | {minutes} | {_spread(last)} | "
        f"{mean(best):.4f} | {against} | {verdict} |"
    )


def _compared(differences: Sequence[float], sign: int) -> tuple[str, str]:
    """Mean paired difference with half its 95 % interval, and its meaning.

    Pairs have the same seed.
    """
    if not differences:
        return "no seed in common", ""
    middle = mean(differences)
    if len(differences) < 2:
        return f"{middle:+.4f}", "one seed shows nothing"
    degrees = len(differences) - 1
    half = _quantile(degrees) * stdev(differences) / math.sqrt(len(differences))
    text = f"{middle:+.4f} ± {half:.4f}"
    if len(differences) < _FEWEST_PAIRS:
        return text, "too few seeds"
    way = "better" if sign * middle > 0 else "worse"
    if abs(middle) > half:
        return text, way
    if all(middle * each > 0 for each in differences):
        return text, f"{way} with every seed, but not surely"
    return text, "no difference shown"


def _quantile(degrees: int) -> float:
    """Quantile of Student's t.

    Beyond the table it uses the first terms of its expansion about the normal quantile (Fisher and
    Cornish 1960), which are right to 0.001 there.
    """
    if degrees < len(_T95):
        return _T95[degrees]
    z = _NORMAL95
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.4f}"
    return f"{mean(values):.4f} ± {stdev(values):.4f}"


def ranking(rows: Sequence[Row]) -> str:
    """Terminal text: all trials, best first, and the best settings."""
    if not rows:
        return "no trial has ended yet"
    metric, sign = rows[0]["metric"], 1 if rows[0]["lower_is_better"] else -1

    def order(row: Row) -> tuple[bool, bool, float]:
        value = row["final"].get(metric)
        return value is None, row["state"] != "complete", sign * (value or 0.0)

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    states = [row["state"] for row in rows]
    counts = ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(states))
    lines = [f"{rows[0]['study']}: {counts}", ""]
    lines.append(f"trial  state     {metric:>10}       best  epochs  minutes  setting")
    ordered = sorted(rows, key=order)
    for row in ordered:
        last, best = (number(row[name].get(metric)) for name in ("final", "best"))
        seed = "" if row["seed"] is None else f", seed {row['seed']}"
        why = f"  ({row['why']})" if row.get("why") else ""
        lines.append(
            f"{row['trial']:>5}  {row['state']:<8}  {last:>10} {best:>10}  {row['epochs']:>6g}  "
            f"{row['minutes']:>7.1f}  {row['setting']}{seed}{why}"
        )
    first = ordered[0]
    if first["state"] == "complete":
        items = [f"{key}={json.dumps(value)}" for key, value in first["params"].items()]
        chosen = " ".join([*first["variant_overrides"], *items])
        lines += ["", f"best: trial {first['trial']:03d}" + (f": -o {chosen}" if chosen else "")]
    return "\n".join(lines)


def write_into(document: Path, text: str) -> None:
    """Replaces the text between the markers of a document.

    Raises: ConfigError: it has no markers.
    """
    try:
        before = text_of(document)
    except OSError as error:
        raise ConfigError(
            str(error.strerror), code="file_unreadable", where=f"--document {document}"
        ) from error
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ConfigError(
            f"expected the lines {BEGIN} and {END} in it",
            code="document_marks_missing",
            where=f"--document {document}",
        )
    write_text(document, f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")
