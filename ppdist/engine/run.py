"""Runs: one training, or one evaluation of weights, from its config."""

import json
import os
import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from ppdist.common import process
from ppdist.common.addresses import absolute, is_remote, work_folder
from ppdist.common.child import begin_in_child
from ppdist.common.errors import ConfigError, DataError
from ppdist.common.eta import PLOTTING
from ppdist.common.job import LAYOUT_NOTE, hosts_change, launched_rank, read_note, write_note
from ppdist.common.json_lines import choose_format
from ppdist.common.records import commands, extension, next_commands
from ppdist.common.run_log import RunLog
from ppdist.config.experiment import (
    ExperimentConfig,
    apply_overrides,
    default_output_dir,
    load_config,
)
from ppdist.config.parse import parse_config
from ppdist.config.plugins import TRUST_VARIABLE
from ppdist.config.section import Task
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.layout import Layout, find_layout
from ppdist.data.types import DetectionSet, Split
from ppdist.distributed import comm, heartbeat
from ppdist.engine.build import (
    Experiment,
    build_evaluator,
    build_model,
    build_training,
    speed_up_cpu,
)
from ppdist.engine.callbacks import Callback
from ppdist.engine.continuation import ANEW, AUTO, Continuation, config_of_run
from ppdist.engine.end_hook import EndHook
from ppdist.engine.evaluator import ClassificationEvaluator, Evaluator
from ppdist.engine.preflight import fetch_on_all_ranks
from ppdist.engine.recipe import (
    ASIDE,
    FILE,
    OPTION_KEYS,
    Recipe,
    TrainOptions,
    fit_recipe,
    load_config_with_data,
    read_task,
    write_recipe,
)
from ppdist.engine.suitability import findings_of
from ppdist.metrics.analysis import class_table
from ppdist.metrics.run import read_run
from ppdist.metrics.verdict import NOT_BY_EPOCHS, judge_run
from ppdist.models.base import ImageModel
from ppdist.models.model_card import names_for
from ppdist.models.weights import load_all_weights, require_there
from ppdist.models.zoo import is_name
from ppdist.viz.run_plots import EVALUATION, METRICS, draw_labels, draw_run

_DRAWING_SECONDS = 600.0  # usually about ten
_MOST_CLASSES = 12  # rows of the final table: the weakest classes


@dataclass(frozen=True)
class TrainingPlan:
    """The configuration of a training run, and the checkpoint it starts from.

    recipe: the recipe that the configuration comes from, written beside the run; None if it has
    another source.
    """

    config: ExperimentConfig
    resume: Continuation
    recipe: Recipe | None = None


def plan_training(
    *,
    data: str | Path | None,
    config: str | Path | ExperimentConfig | None,
    options: TrainOptions,
    overrides: Sequence[str],
    resume: Continuation = ANEW,
) -> TrainingPlan:
    """Plans a training run from data, a configuration, or the run to resume.

    Every rank derives the same plan from the same files.
    Args:
        options: they override the keys of a configuration or of the run to resume.
        overrides: -o items, which take precedence.
    Raises: ConfigError: conflicting options, or invalid keys.
    """
    if data is None and config is None:
        assert resume.source is not None
        url, run = locate_run(resume.source)
        # A length may be an extension ("+50"), so it is not an -o item.
        names = [name for name in OPTION_KEYS if name not in ("epochs", "steps")]
        option_items = options.items(*names)
        epochs, steps = (
            None if length is None else f"{length}" for length in (options.epochs, options.steps)
        )
        if url:
            from ppdist.engine.mirror import description_of

            with description_of(url) as copy:
                items = [f"output_dir={json.dumps(url)}", *option_items, *overrides]
                longer, extends = config_of_run(copy, epochs, items, steps)
        else:
            longer, extends = config_of_run(run, epochs, [*option_items, *overrides], steps)
        longer = _without_stored_hook(longer, overrides)
        return TrainingPlan(longer, replace(resume, extends=extends))
    if isinstance(options.epochs, str) or isinstance(options.steps, str):
        name = "epochs" if isinstance(options.epochs, str) else "steps"
        raise ConfigError(
            f"+N {name} need a run to extend",
            code="options_conflict",
            where=f"{name} {options.epochs or options.steps}",
            fix='`ppdist train --resume RUN --epochs +50`, or train(resume=RUN, epochs="+50"); '
            "RUN is the output_dir of a training; steps likewise",
        )
    if data is not None:
        layout = _layout_of_job(str(data), read_task(options), options.weights)
        recipe = fit_recipe(layout, options, overrides, comm.world_size())
        return TrainingPlan(recipe.config, resume, recipe)
    option_items = [*options.items(), *overrides]
    if isinstance(config, ExperimentConfig):
        return TrainingPlan(apply_overrides(config, option_items), resume)
    loaded = _first_data(str(config), option_items) if comm.was_restarted() else None
    return TrainingPlan(loaded or load_config_with_data(str(config), option_items), resume)


def _first_data(path: str, items: Sequence[str]) -> ExperimentConfig | None:
    """Loads a configuration with the `data` section that this job began with; None: none is stored.

    The layout of data.root is not searched again: its images may be away, which ended the attempt.
    """
    config = load_config(path, items)
    _, folder = locate_run(config.output_dir or default_output_dir(path))
    file = folder / "config.yml"
    if not file.is_file():
        return None
    stored = parse_config(file, (), ExperimentConfig)
    if stored.data.root != config.data.root:
        return None
    model = config.model.model_copy(update={"num_classes": stored.model.num_classes})
    return config.model_copy(update={"data": stored.data, "model": model})


def _layout_of_job(source: str, task: Task, weights: str | None) -> Layout:
    """Returns the layout of data, in a restart as an earlier attempt found it on this host.

    As for `_first_data`: images may be away then, so that other files would be taken for the set.
    """
    begun = [source, os.path.abspath(source), task]
    note = read_note(LAYOUT_NOTE) if comm.was_restarted() else None
    if note is not None and note["of"] == begun:
        return TypeAdapter(Layout).validate_python(note["layout"])
    if weights is not None and not is_name(weights):
        require_there(Path(weights))  # before all labels are read
    layout = find_layout(source, task)
    with suppress(OSError):  # a restart then looks again
        content = TypeAdapter(Layout).dump_python(layout, mode="json")
        write_note(LAYOUT_NOTE, {"of": begun, "layout": content})
    return layout


def _without_stored_hook(config: ExperimentConfig, overrides: Sequence[str]) -> ExperimentConfig:
    """Drops `log.on_end` from a stored configuration, maybe a stranger's, unless it is trusted."""
    typed = any(item.startswith("log.on_end=") for item in overrides)
    if config.log.on_end is None or typed or os.environ.get(TRUST_VARIABLE) == "1":
        return config
    if launched_rank() == 0:
        process.warn(
            "log.on_end of the stored configuration is not called; if you trust it, add "
            "--trust-plugins, or type it: -o log.on_end=..."
        )
    log = config.log.model_copy(update={"on_end": None})
    return config.model_copy(update={"log": log})


def run_training(
    plan: TrainingPlan,
    output_dir: Path,
    *,
    evaluate: bool,
    command: list[str],
    callbacks: Sequence[Callback] = (),
) -> int:
    """Trains and plots the run; returns the exit code.  Collective.

    For the arguments see `build_training`; `output_dir` may be in an object store.

    Raises: UserError: invalid data, weights, checkpoint or configuration.
    """
    plan = localise(plan, output_dir)
    choose_format(plan.config.log.format)
    url, output_dir = locate_run(output_dir)
    if (place := output_dir.resolve()) != output_dir.absolute():
        output_dir = place  # the link may be changed while the run writes
    with EndHook(plan.config.log.on_end, output_dir, command) as hook:
        train = partial(_train, hook=hook, evaluate=evaluate, command=command, callbacks=callbacks)
        comm.init(plan.config.device, plan.config.distributed)
        if url:
            hook.status = _train_into_store(train, plan, output_dir, url)
        else:
            hook.status = train(plan, output_dir)
    return hook.status


def _train_into_store(train: Callable[..., int], plan: TrainingPlan, folder: Path, url: str) -> int:
    """Trains in a work folder, and uploads it in parallel with the steps.  Collective."""
    from ppdist.engine.mirror import Mirror, upload_rest

    mirror = Mirror(url, folder)
    source = plan.resume.source
    is_own = source == AUTO or (source and Path(source).resolve().is_relative_to(folder.resolve()))
    resumes = bool(is_own) or comm.was_restarted()
    comm.run_on_main(lambda: mirror.begin(resumes))
    try:
        status = train(plan, folder, url=url)
    except BaseException:
        with suppress(ConfigError):  # another run has the folder: that error is raised already
            mirror.finish(briefly=True)
        raise
    if comm.is_main():  # others may end before, as while plots are drawn
        upload_rest(mirror, status)
    return status


def locate_run(run: str | Path) -> tuple[str, Path]:
    """Returns the URL of a run in a store, "" for one on a disk; and its folder on a local disk.

    Raises: ConfigError: a run cannot be in that store.
    """
    if not is_remote(run):
        return "", Path(run)
    from ppdist.storage.stores import place_of_run

    url = place_of_run(run)
    return url, work_folder(url)


def localise(plan: TrainingPlan, output_dir: Path) -> TrainingPlan:
    """Returns a plan whose checkpoint to resume from is on a local disk.

    The checkpoint of a run in a store is in the run's work folder, once `Mirror.begin` has
    downloaded it.

    Raises: ConfigError: the checkpoint is in a store and belongs to a different run.
    """
    source = plan.resume.source
    if source is None or not is_remote(source):
        return plan
    if absolute(source).rstrip("/") != absolute(output_dir).rstrip("/"):
        raise ConfigError(
            "from a store, only the run in its own output_dir can be resumed",
            code="options_conflict",
            where=f"--resume {absolute(source)}",
            fix=f"set output_dir={absolute(source)}; or copy that folder to a disk first",
        )
    return replace(plan, resume=replace(plan.resume, source=work_folder(source)))


def _train(
    plan: TrainingPlan,
    output_dir: Path,
    *,
    hook: EndHook,
    evaluate: bool,
    command: list[str],
    callbacks: Sequence[Callback],
    url: str = "",
) -> int:
    """Trains in a folder on a local disk, after `comm.init`; returns the exit code.  Collective.

    Args: url: where the folder is uploaded to; "" if it is not uploaded.
    """
    config, recipe = plan.config, plan.recipe
    heartbeat.tell_run(output_dir)
    earlier_runs = {*output_dir.glob(ASIDE)}
    try:
        experiment = build_training(
            config,
            output_dir=output_dir,
            evaluate=evaluate,
            command=command,
            resume=plan.resume,
            callbacks=callbacks,
        )
    except DataError:
        # The user may read and edit the decisions; those of an earlier run are not overwritten.
        if recipe is not None and comm.is_main() and not (output_dir / FILE).exists():
            write_recipe(recipe, output_dir, earlier_runs, evaluate)
            process.say(f"ppdist: wrote {output_dir / FILE}, the configuration of this run")
        raise
    hook.has_results = True
    with experiment.log:
        if url:
            experiment.log.headline("upload", f"{url}, beside the steps")
        if recipe is not None:
            _log_recipe(recipe, experiment.log, output_dir, earlier_runs, evaluate)
        status = experiment.trainer.fit()
        wait_for_plots = None
        if comm.is_main() and status == 0:  # a stopped run may be killed if it is slow to end
            wait_for_plots = _begin_plots(output_dir, experiment, config)
        try:
            ends = comm.is_main() and not hosts_change()
            try:
                summary = _summarise(experiment, config, evaluate, url) if ends else None
            finally:  # the plots were being drawn meanwhile
                if wait_for_plots is not None:
                    wait_for_plots()
            if summary is not None:
                experiment.log.run_summary(*summary)
        except Exception as error:  # a table must not fail the run
            experiment.log.warn_once("the summary", error)
        return status


def _summarise(
    experiment: Experiment, config: ExperimentConfig, evaluate: bool, url: str
) -> tuple[list[str], list[tuple[str, str]]]:
    """Builds the summary of a training run for `RunLog.run_summary`.

    Args: url: see `_train`.
    Returns: lines of the per-class table and the verdict; possible next steps as (purpose, command)
        pairs.
    """
    experiment.log.flush()  # the run is read from its files
    output_dir, run, lines = experiment.output_dir, read_run(experiment.output_dir), list[str]()
    if run.evaluation and len(run.evaluation["per_class"]) > 1:
        lines = class_table(run.evaluation, max_classes=_MOST_CLASSES).splitlines()
    findings = judge_run(run)
    lines += [finding.text for finding in findings]
    todo = list[tuple[str, str]]()
    place = url or output_dir
    if experiment.trainer.has_steps_left:
        todo.append(("continue", build_resume_command(place, evaluate)))
    elif _needs_epochs({finding.code for finding in findings}, config):
        more = extension(config.train.epochs, config.train.steps)
        todo.append(("longer", build_resume_command(place, evaluate, more)))
    image = experiment.sets.get("val", experiment.sets["train"]).first_readable
    weights = f"-w {shlex.quote(str(output_dir))}"
    todo += next_commands(weights, image, test=config.data.test is not None)
    return lines, todo


def _needs_epochs(codes: Collection[str], config: ExperimentConfig) -> bool:
    """Returns True if more epochs would help, according to the codes of the verdict."""
    if config.train.max_steps is not None or {*codes} & {*NOT_BY_EPOCHS}:
        return False
    return "still_rising" in codes or ("not_learned" in codes and not config.model.pretrained)


def build_resume_command(output_dir: Path | str, evaluate: bool, length: Sequence[str] = ()) -> str:
    """Builds the command that continues a run from its newest checkpoint.

    Args: length: `--epochs +10` extends the run, as two words; none if it has steps left.
    """
    words = ["ppdist", "train", "--resume", str(output_dir), *([] if evaluate else ["--no-eval"])]
    words += length
    if comm.world_size() == 1:
        return shlex.join(words)
    if comm.world_size() > comm.local_size():
        return f"{shlex.join(words)}, by the same fleetrun as before on every host"
    return shlex.join(["fleetrun", "--nproc_per_node", f"{comm.world_size()}", *words])


def _log_recipe(
    recipe: Recipe, log: RunLog, output_dir: Path, earlier_runs: set[Path], evaluate: bool
) -> None:
    """Logs the choices of a recipe with their reasons, and its training command.  Collective.

    Args: earlier_runs: see `write_recipe`.
    """
    command = comm.run_on_main(lambda: write_recipe(recipe, output_dir, earlier_runs, evaluate))
    log.headline("again", command)
    log.table("decided", recipe.rows)
    for note in recipe.notes:
        log.note(note)


def _begin_plots(
    output_dir: Path, experiment: Experiment, config: ExperimentConfig
) -> Callable[[], None]:
    """Starts drawing the plots of a run in child processes.

    Returns: a function that waits until they are drawn, and warns of a failure."""
    log = experiment.log
    log.info(f"drawing {output_dir / 'plots'}")
    log.flush()  # plots are drawn from its files
    with suppress(Exception):  # a broken matplotlib costs the plots alone, with a warning
        from ppdist.viz import plots  # noqa: F401  imported once for both processes
    waits = [  # one process each
        begin_in_child(partial(_draw, output_dir, experiment, config, file), _DRAWING_SECONDS)
        for file in (METRICS, EVALUATION)
    ]

    def wait_for_plots() -> None:
        with log.spending(PLOTTING, experiment.trainer.state.step):
            failed = ", ".join(dict.fromkeys(filter(None, [wait() for wait in waits])))
        if failed:
            log.warning(
                f"the training has completed, but drawing {output_dir / 'plots'} failed "
                f"({failed}); to draw them: {commands(output_dir)[0][1]}"
            )

    return wait_for_plots


def _draw(output_dir: Path, experiment: Experiment, config: ExperimentConfig, file: str) -> None:
    """Plots one file of the run, or its data sets together with the evaluation.

    It runs in a child process, because an image may crash a decoder.
    """
    import cv2

    cv2.setNumThreads(0)  # its threads do not survive a fork
    if file == METRICS:
        draw_run(output_dir, files=(METRICS,))
        return
    log = experiment.log  # its progress bar is free: the parent shows nothing meanwhile
    draw_run(
        output_dir,
        tell=lambda done, total: log.busy(f"plots {done}/{total}", done, total),
        files=(EVALUATION,),
    )
    draw_labels(output_dir, experiment.sets, config.data, config.model.image_size)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of weights on a split, ready to run.

    To run it: `evaluator.measure(evaluator.predict(model))`."""

    model: ImageModel
    dataset: DetectionSet
    evaluator: Evaluator | ClassificationEvaluator
    notes: tuple[str, ...]  # for the user


def prepare_evaluation(
    config: ExperimentConfig,
    weights: Path,
    *,
    split: Split = "val",
    annotated: bool = True,
    prepare: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Prepares the evaluation of weights, after `comm.init`.  Collective.

    Args:
        split: the split to evaluate; its classes are matched to those of the weights by name.
        annotated: whether the set must have objects.
        prepare: called on every rank before weights and data are read; may raise.
    Raises: UserError: invalid weights or data.
    """
    model = build_model(config)

    def load() -> tuple[DetectionSet, str]:
        prepare()
        dataset = read_split(config.data, split, config.model.num_classes, annotated=annotated)
        return dataset, load_all_weights(model, weights, names_for(weights, dataset.class_names))

    fetch_on_all_ranks(weights)
    dataset, message = comm.run_on_all_ranks(load)
    evaluator = build_evaluator(config, dataset, model)
    slow = speed_up_cpu(config, [model])
    warnings = [finding.text for finding in findings_of(config, None, dataset)]
    notes = tuple(note for note in (dataset.limited, message, *warnings, slow) if note)
    return Evaluation(model, dataset, evaluator, notes)
