"""Results of a study: trials.jsonl and the table of settings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from ppdist.common.errors import ConfigError
from ppdist.common.files import replace_file, text_of, writing

if TYPE_CHECKING:
    from ppdist.lab.tune.store import Store

Row = Mapping[str, Any]
_NEEDED = (
    "study", "metric", "lower_is_better", "trial", "state", "setting", "variant_overrides",
    "params", "minutes", "epochs", "final", "best",
)  # fmt: skip


def rows(store: "Store") -> list[dict[str, Any]]:
    """Returns a row for each finished trial: its settings and result."""
    study, ended = store.config, []
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
            of_trial = {"trial": trial.number, "state": trial.state.name.lower()}
            of_trial |= {"setting": cell.setting}
            ended.append(of_study | of_trial | cell.record() | result)
    return ended


def export(store: "Store") -> None:
    """Rewrites trials.jsonl; any process may call this after any trial."""
    with store.lock:  # else an older list could overwrite that of another process
        file = store.folder / "trials.jsonl"
        with writing(file):
            replace_file(file, "".join(json.dumps(row) + "\n" for row in rows(store)).encode())


# From folders and files to a table, without Optuna.


def read_rows(source: Path) -> list[dict[str, Any]]:
    """Reads the rows of a study's folder or of an exported file.

    Raises: ConfigError: the folder or file does not exist, or is not from a study.
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
    ended = []
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
        ended.append(row)
    return ended


@dataclass(frozen=True)
class Setting:
    """A setting and its trials, which differ in their seeds.

    Attributes: counted: the complete trials; if there are none, all trials with a measurement.
    """

    name: str
    trials: Sequence[Row]
    counted: Sequence[Row]

    @property
    def is_complete(self) -> bool:
        return any(row["state"] == "complete" for row in self.trials)

    @property
    def overrides(self) -> list[str]:
        """Returns the keys that the setting changes, as `-o` takes them."""
        overrides = [
            f"{key}={json.dumps(value)}" for key, value in self.trials[0]["params"].items()
        ]
        return [*self.trials[0]["variant_overrides"], *overrides]

    def values(self, evaluation: str) -> list[float]:
        """Lists the metric of the counted trials in their `final` or `best` evaluation."""
        return [row[evaluation][row["metric"]] for row in self.counted]

    def cells(self) -> list[str]:
        """Returns the setting's row of the table; numbers are means, the last value's
        is followed by its standard deviation.
        """
        states = [row["state"] for row in self.trials]
        reasons = dict.fromkeys(row["why"] for row in self.trials if row.get("why"))
        state = ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(states))
        cells = [self.name, " ".join(f"{row['trial']:03d}" for row in self.trials)]
        cells.append(": ".join([state, *reasons]))
        if not self.counted:
            return [*cells, "", "", "", ""]
        final_values = self.values("final")
        spread = f" ± {stdev(final_values):.4f}" if len(final_values) > 1 else ""
        epochs, minutes = (
            mean(row[name] for row in self.counted) for name in ("epochs", "minutes")
        )
        cells += [f"{epochs:.4g}", f"{minutes:.1f}"]
        return [*cells, f"{mean(final_values):.4f}{spread}", f"{mean(self.values('best')):.4f}"]


def rank_settings(rows: Sequence[Row]) -> list[Setting]:
    """Ranks settings by the mean of their last values, best first; those without any go last."""
    trials: dict[str, list[Row]] = {}
    for row in rows:
        trials.setdefault(row["setting"], []).append(row)
    settings = []
    for name, of_setting in trials.items():
        measured = [row for row in of_setting if row["metric"] in row["final"]]
        complete = [row for row in measured if row["state"] == "complete"]
        # A trial that was pruned or failed counts only if no trial of the setting is complete.
        settings.append(Setting(name, of_setting, complete or measured))

    def order(setting: Setting) -> tuple[bool, bool, float]:
        sign = 1 if setting.trials[0]["lower_is_better"] else -1
        value = sign * mean(setting.values("final")) if setting.counted else 0.0
        return not setting.counted, not setting.is_complete, value

    return sorted(settings, key=order)
