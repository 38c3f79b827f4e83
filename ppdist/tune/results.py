"""Results of a study: trials.jsonl, plots, VisualDL's pages."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from ppdist.common.files import make_folder, replace_file, writing
from ppdist.common.writers import VisualDLWriter
from ppdist.tune.cells import Cell, baseline
from ppdist.tune.store import Store

_FEWEST_FOR_IMPORTANCE = 20  # PED-ANOVA looks at the best tenth, and needs two there


def rows(store: Store) -> list[dict[str, Any]]:
    """A row for each trial that has ended: what it was and what came out, with what of the study
    makes rows of several sessions comparable."""
    return [row for trial in store.trials() if (row := _row(store, trial))]


def _row(store: Store, trial: FrozenTrial) -> dict[str, Any] | None:
    cell, study = store.cell_of(trial), store.config
    result = trial.user_attrs.get("result")
    if cell is None or result is None or not trial.state.is_finished():
        return None
    return {
        "study": study.name,
        "config": study.config,
        "overrides": list(study.overrides),
        "metric": study.metric,
        "lower_is_better": study.lower_is_better,
        "minutes_per_trial": study.minutes_per_trial,
        "trial": trial.number,
        "state": trial.state.name.lower(),
        "setting": cell.setting,
        "base": baseline(study, cell),
        **cell.record(),
        **result,
    }


def export(store: Store) -> None:
    """Writes trials.jsonl anew, and the curves for VisualDL that are not there; any process does,
    after any trial."""
    with store.lock:  # what another has just written must not be replaced by less
        found = rows(store)
        file = store.folder / "trials.jsonl"
        with writing(file):
            replace_file(file, "".join(json.dumps(row) + "\n" for row in found).encode())
        for row in found:
            if not (store.folder / "vdl" / f"{row['trial']:03d}").exists():
                _write_curves(store.folder / "vdl", row)


def _write_curves(folder: Path, row: dict[str, Any]) -> None:
    """A trial as a row of VisualDL's page of hyper-parameters, and its curve.

    What a trial does not vary is left out: that page takes few columns.
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


def importances(store: Store) -> dict[str, float]:
    """How much each key of the space decides about the value, their sum 1; empty where there are
    too few complete trials to say.

    Source: PED-ANOVA, Watanabe et al. 2023, arXiv:2304.10255; fANOVA would need scikit-learn.
    """
    complete = [each for each in store.trials() if each.state == TrialState.COMPLETE]
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


def draw(store: Store) -> list[Path]:
    """Writes plots/curves.png and, of a search, plots/importance.png; returns what was drawn."""
    from ppdist.viz import plots
    from ppdist.viz.plots import save

    folder = store.folder / "plots"
    make_folder(folder)
    found = rows(store)
    figures = {
        "curves.png": plots.curves(found),
        "importance.png": plots.importance(importances(store)),
    }
    return [folder / name for name, figure in figures.items() if save(figure, folder / name)]
