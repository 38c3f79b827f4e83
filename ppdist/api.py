"""ppdist in Python: Detector, train, evaluate, export.

    from ppdist import Detector

    detector = Detector("output/my_run")            # or weights, or an export
    detections = detector("bus.jpg")                # Detections: "4 person, 1 bus"
    for detections in detector("photos/"): ...      # folders, globs, videos: one after the other
    better = detector.train(data="data.yml", epochs=20)
    better.evaluate()["mAP"], better.export("exported")

The names of `ppdist.__all__` with their documented behaviour, and the keys of configurations, are
stable; everything below may move.  docs/python.md is generated from these docstrings.
"""

import inspect
import json
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np
from PIL import Image

from ppdist.common.addresses import work_folder
from ppdist.common.errors import ConfigError, DataError, UserError
from ppdist.common.process import STOP_SIGNALS, require_paddle
from ppdist.config.experiment import ExperimentConfig, apply_overrides
from ppdist.config.export import ExportOptions
from ppdist.config.migration import answering, refuse_name
from ppdist.config.parse import Overrides, override_items, parse_plain
from ppdist.predict.detections import Detections
from ppdist.predict.sources import (
    Frame,
    Source,
    as_image,
    expand,
    frames_of,
    is_many,
    is_picture,
    is_video,
    read_source,
    readable_frames,
)

if TYPE_CHECKING:
    from ppdist.engine.callbacks import Callback
    from ppdist.predict.model import LoadedModel, Predict, Wanted

if TYPE_CHECKING:
    _Path = Path
else:  # before Python 3.12 a class can only derive from Path's concrete type
    _Path = type(Path())

Picture: TypeAlias = np.ndarray | Image.Image  # uint8 RGB [H, W, 3], or Pillow's
Place: TypeAlias = str | Path
Config: TypeAlias = Place | ExperimentConfig
Augment: TypeAlias = bool | Sequence[float]  # or scales of the input
Classes: TypeAlias = Sequence[str | int] | str | int | None  # by name or by number from 0


class Detector:
    """A detector with its weights, ready for images, training and export.

    Several threads may call one detector: each gets the boxes of its own images.  Calls in Paddle
    Inference and OpenVINO wait for each other; ONNX Runtime computes several at once.

    Args:
        weights: a checkpoint, a run's output_dir (its best), an export's folder, its ONNX file,
            a .pt of YOLOv5, .pth, .pdparams, .safetensors or .npz, or the name of published
            weights (docs/model_zoo.md), which are downloaded.
        config: the configuration of the weights, a file or the name of a shipped one, if they do
            not record their model (.pdparams).
        device: auto (an accelerator if Paddle has one), cpu, gpu, ...; also for training and
            evaluation.
        backend: the runtime of an export: paddle, onnx or openvino; None: on the CPU the fastest
            that is installed and that the export was checked in (docs/deploy.md), on a card Paddle
            Inference.
        threads: CPU threads of an export (1); for weights OMP_NUM_THREADS decides.
        precision: for an export in OpenVINO: bfloat16 is faster and less exact, on processors that
            compute in it.
    Raises: UserError: the weights do not exist, are damaged, or of another model.

    Attributes:
        names: names of class 0, 1, ...
    """

    def __init__(
        self,
        weights: Place,
        *,
        config: Config | None = None,
        device: str = "auto",
        backend: Literal["paddle", "onnx", "openvino"] | None = None,
        threads: int | None = None,
        precision: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        require_paddle()
        from ppdist.predict.model import export_folder, load_export, require_task

        self.weights = _weights_file(weights)
        self._given, self._device = config, device
        self._config: ExperimentConfig | None = None
        self._folder = export_folder(self.weights) if config is None else None
        self._model: LoadedModel
        if self._folder is not None:
            self._model = load_export(self.weights, backend, threads or 1, precision, device)
        else:
            if backend is not None or threads is not None or precision != "float32":
                raise ConfigError(
                    "backend, threads and precision are for exports; these are weights",
                    code="options_conflict",
                    where=str(weights),
                    fix="leave them out; for weights, OMP_NUM_THREADS sets the threads",
                )
            self._model = self._load()
        require_task(self._model.spec, "detect", str(weights))
        self.names: tuple[str, ...] = self._model.spec.class_names

    def __repr__(self) -> str:
        height, width = self._model.spec.input.size
        return f"<Detector {self.weights}: {len(self.names)} classes, {height}x{width}>"

    @overload
    def __call__(
        self, source: Picture | bytes, *, threshold: float | None = ..., classes: Classes = ...,
        iou: float | None = ..., batch: int = ..., slice: int | None = ..., overlap: float = ...,
        track: bool = ..., agnostic: bool = ..., augment: Augment = ...,
    ) -> Detections: ...  # fmt: skip

    @overload
    def __call__(
        self, source: list[Any] | tuple[Any, ...], *, threshold: float | None = ...,
        classes: Classes = ..., iou: float | None = ..., batch: int = ..., slice: int | None = ...,
        overlap: float = ..., track: bool = ..., agnostic: bool = ..., augment: Augment = ...,
    ) -> list[Detections]: ...  # fmt: skip

    @overload
    def __call__(
        self, source: Iterator[Any] | int, *, threshold: float | None = ...,
        classes: Classes = ..., iou: float | None = ..., batch: int = ..., slice: int | None = ...,
        overlap: float = ..., track: bool = ..., agnostic: bool = ..., augment: Augment = ...,
    ) -> Iterator[Detections]: ...  # fmt: skip

    @overload
    def __call__(
        self, source: Place, *, threshold: float | None = ..., classes: Classes = ...,
        iou: float | None = ..., batch: int = ..., slice: int | None = ..., overlap: float = ...,
        track: bool = ..., agnostic: bool = ..., augment: Augment = ...,
    ) -> Any: ...  # fmt: skip

    @answering("predict")
    def __call__(
        self,
        source: Picture | bytes | Place | int | Iterable[Any],
        *,
        threshold: float | None = None,
        classes: Classes = None,
        iou: float | None = None,
        batch: int = 8,
        slice: int | None = None,
        overlap: float = 0.2,
        track: bool = False,
        agnostic: bool = False,
        augment: Augment = False,
    ) -> Any:
        """Detects objects in images, videos or streams.

        Args:
            source: one image gives Detections: uint8 RGB [H, W, 3] (not OpenCV's BGR), a picture of
                Pillow, a file, its bytes, or an http(s) address.  A list or tuple of these gives a
                list.  What may hold many gives an iterator, which works as it is read: a folder
                (searched recursively), a pattern (`photos/*.jpg`), a .txt with a path or an
                address a line, a video, an rtsp address, the number of a camera, or an iterator of
                images.
            threshold: lowest score of a box, 0..1; None: the one of the best F1 in the last
                evaluation, if the weights record it, else 0.25.
            classes: only boxes of these classes, by name or by number from 0; None: of all.
            iou: of two boxes of a class that overlap more, only the better stays; None: as trained.
                For an export whose graph suppresses boxes it can only be lowered.
            batch: images at once; for a camera or a stream it is one.
            slice: also detect in overlapping squares with sides of so many pixels, for small
                objects.
            overlap: of neighbouring squares, as a part of their side.
            track: follow objects through the frames of each video, by `Detections.track_ids`
                (ByteTrack, needs ppdist[track]); the images of an iterator are frames of one.
            agnostic: boxes suppress those of other classes, too (nms.class_agnostic).
            augment: True: look at the mirrored image, too, and fuse the boxes (`ppdist ensemble
                fuse`); scales such as (0.83, 1, 1.2): at inputs of these sizes, as well.
        Raises: DataError: an image, video or stream cannot be read, the last two when the iterator
            is read.  Such files of a folder or pattern are skipped with a warning, and so are
            damaged frames of a video; the other frames keep their numbers.
        """
        from ppdist.predict.model import wanted

        choice = wanted(self._model.spec, threshold, classes, _warn)
        predict = self._predict(iou, slice, overlap, batch, agnostic, augment)
        if isinstance(source, str | Path | int):
            if is_many(source):
                sources = expand([source])
                live = any(source.is_live for source in sources)
                frames = _frames(sources, skip=len(sources) > 1 or not is_video(source))
                return self._detect(predict, frames, choice, 1 if live else batch, track)
            frames = iter([Frame(str(source), None, read_source(source))])
        elif is_picture(source) or not isinstance(source, Iterable):
            frames = iter([Frame("", None, as_image(source))])
        else:
            items: Iterable[Any] = source
            frames = (_frame(image, index) for index, image in enumerate(items))
            if not isinstance(source, Iterator):
                return list(self._detect(predict, frames, choice, batch, track))
            if track:
                numbered = enumerate(frames)
                frames = (replace(frame, name="frames", index=index) for index, frame in numbered)
            return self._detect(predict, frames, choice, batch, track)
        return next(self._detect(predict, frames, choice, 1, track))

    predict = __call__  # the name in other libraries

    if not TYPE_CHECKING:  # a type checker reports such a name itself

        def __getattr__(self, name: str) -> Any:
            refuse_name("Detector", name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @answering("train")
    def train(
        self,
        data: Config | Mapping[str, Any] | None = None,
        *,
        epochs: float | None = None,
        batch: int | None = None,
        output_dir: Place | None = None,
        overrides: Overrides = (),
        evaluate: bool = True,
        callbacks: Sequence["Callback"] = (),
    ) -> "Detector":
        """Fine-tunes these weights in this process; the detector stays unchanged.

        Classes whose names agree keep their trained outputs.  The settings are those of the
        weights' own training; `ppdist.train(data, model=RECIPE, weights=...)` takes a recipe's,
        fitted to the data.  On several cards use `fleetrun`.

        Args:
            data: a data.yaml (ultralytics, Roboflow) or a folder with COCO's JSON, Pascal VOC's XML
                or YOLO's labels; a configuration, or its `data` section; None: the data of the
                weights' own training.
            batch: images on this card.
            output_dir: folder of the run; None: `output/<name of the data>`, or the first of
                `...-2`, `...-3` that is free.
            overrides: more keys of the configuration: "optimizer.lr=0.001", or a mapping.
            evaluate: evaluate on the validation split, and keep the best checkpoint.
            callbacks: see `ppdist.Callback`.
        Returns: the detector with the best weights of the run.
        Raises: UserError: data or configuration are wrong, or the run was stopped.
        """
        items = override_items(overrides)
        config = self._fine_tuning(data, epochs, batch, output_dir, items)
        run = train(config, evaluate=evaluate, callbacks=callbacks)
        return Detector(run, device=self._device)

    @answering("eval")
    def evaluate(self, data: Config | Mapping[str, Any] | None = None) -> dict[str, float]:
        """Measures the weights on the validation split: mAP, mAP50, ...

        Args: data: see `train`.
        Raises: ConfigError: an export, whose accuracy is in infer.yml.  DataError: data are wrong.
        """
        return evaluate(self.weights, config=self._with_data(data, same_classes=True))

    @answering("export", ExportOptions.model_fields)
    def export(
        self,
        out: Place,
        *,
        formats: Sequence[Literal["paddle", "onnx", "openvino"]] = ("paddle",),
        **options: Any,
    ) -> Path:
        """Writes the model for deployment; see `ppdist.export`."""
        return export(self.weights, out, config=self._own_config(), formats=formats, **options)

    def _load(self) -> "LoadedModel":
        from ppdist.distributed import device
        from ppdist.predict.model import load_weights

        self._config = config_for(self.weights, self._given)
        if self._device != "auto":  # for training and evaluation, too
            self._config = apply_overrides(self._config, [override_item("device", self._device)])
        device.choose(self._config.device)
        has_no_config = self._given is None
        return load_weights(self._config, self.weights, _warn, names_alone=has_no_config)

    def _own_config(self) -> ExperimentConfig:
        if self._config is None:
            raise ConfigError(
                "an export cannot be trained, evaluated or exported again",
                code="export_not_weights",
                where=str(self.weights),
                fix="open the weights it was exported from",
            )
        return self._config

    def _with_data(
        self, data: Config | Mapping[str, Any] | None, *, same_classes: bool = False
    ) -> ExperimentConfig:
        from ppdist.engine.recipe import with_data

        config = self._own_config()
        return config if data is None else with_data(config, data, same_classes=same_classes)

    def _fine_tuning(
        self,
        data: Config | Mapping[str, Any] | None,
        epochs: float | None,
        batch: int | None,
        output_dir: Place | None,
        overrides: Sequence[str],
    ) -> ExperimentConfig:
        config = self._with_data(data)
        out = output_dir or _free_folder(f"output/{Path(config.data.root).resolve().name}")
        items = [
            override_item("model.pretrained", str(self.weights)),
            override_item("output_dir", str(out)),
        ]
        items += [] if epochs is None else [f"train.epochs={epochs:g}"]
        items += [] if batch is None else [f"train.batch_size_per_card={batch}"]
        return apply_overrides(config, [*items, *overrides])

    def _predict(
        self,
        iou: float | None,
        slice: int | None,
        overlap: float,
        batch: int,
        agnostic: bool,
        augment: Augment,
    ) -> "Predict":
        from ppdist.lab.ensemble.views import SCALES, with_views
        from ppdist.predict.model import with_suppression
        from ppdist.predict.slicing import with_slices

        for name, value, minimum in (("batch", batch, 1), ("slice", slice, 32)):
            if value is not None and value < minimum:
                raise ConfigError(
                    f"expected {minimum} or more", code="option_invalid", where=f"{name}={value}"
                )
        if not 0 <= overlap < 1:
            raise ConfigError(
                "expected 0 to below 1", code="option_invalid", where=f"overlap={overlap:g}"
            )
        scales = SCALES if augment is True else augment or ()
        if not all(0.1 <= scale <= 10 for scale in scales):
            raise ConfigError(
                "expected scales of the input from 0.1 to 10",
                code="option_invalid",
                where=f"augment={augment}",
            )
        nms = self._model.spec.nms
        assert nms is not None  # set for every detector
        predict: Predict
        if scales:
            predict = with_views(self._model, scales, iou=iou, agnostic=agnostic)
        else:
            predict = with_suppression(self._model, iou, agnostic)
        if not slice:
            return predict
        return with_slices(predict, slice, overlap, batch, agnostic or nms.class_agnostic)

    def _detect(
        self,
        predict: "Predict",
        frames: Iterator[Frame],
        choice: "Wanted",
        batch: int,
        track: bool,
    ) -> Iterator[Detections]:
        from ppdist.predict.model import detections
        from ppdist.predict.sources import predictions
        from ppdist.predict.tracking import make_follower

        follow = make_follower(choice.threshold) if track else lambda frame, detected: detected
        for frame, rows_R6 in predictions(predict, frames, batch):
            detected = detections(frame, choice.of(rows_R6), self._model.spec)
            yield follow(frame, detected)


def _frames(sources: Sequence[Source], skip: bool) -> Iterator[Frame]:
    """Yields the frames of sources, with warnings about damaged frames.

    Args: skip: a source that cannot be read is skipped with a warning, not an error.
    """
    read = frames_of if skip else readable_frames
    for given_source in sources:
        # Messages show a path that users can open.
        source = Source(given_source.place, str(given_source.place))
        yield from read(source, lambda reason: _warn(f"{reason}; skipped"))


def _frame(image: Any, position: int) -> Frame:
    if isinstance(image, str | Path):
        if is_many(image):
            raise DataError(
                "an item of a list is one image",
                code="source_of_many",
                where=str(image),
                fix="give the folder, pattern or video by itself, not in a list",
            )
        return Frame(str(image), None, read_source(image))
    return Frame(f"{position}", None, as_image(image))


class Run(_Path):
    """The output_dir of a training run: a path with the numbers of its epochs.

    `Run("output/my_run")` opens any run, even one that still trains.

        table = pandas.DataFrame(Run("output/my_run").history())
        table.plot(x="epoch", y=["mAP", "mAP50"])
    """

    def history(self) -> list[dict[str, Any]]:
        """Returns one row for each epoch, ready for `pandas.DataFrame`.

        `ppdist report RUN --csv epochs.csv` writes them to a file.

        A row has `epoch`, `step` (its last), the means of `loss` and its parts, `lr`,
        `images_per_second`, `seconds`, and of an evaluation at its end `mAP`, `mAP50`, `val_loss`
        and the like.  An evaluation amid an epoch (`evaluate.every_steps`) has a row of its own.
        Raises: UserError: it is not the folder of a run.
        """
        from ppdist.metrics.run import history

        return history(Path(self))


@answering("train")
def train(
    config: Config | None = None,
    overrides: Overrides = (),
    *,
    data: Place | None = None,
    model: str | None = None,
    epochs: float | str | None = None,
    batch: int | Literal["auto"] | None = None,
    weights: Place | None = None,
    image_size: int | tuple[int, int] | None = None,
    output_dir: Place | None = None,
    steps: int | str | None = None,
    classes: Sequence[str | int] | None = None,
    single_class: bool | None = None,
    fraction: float | None = None,
    evaluate: bool = True,
    resume: Place | Literal["auto"] | None = None,
    callbacks: Sequence["Callback"] = (),
) -> Run:
    """Trains in this process, as `ppdist train` does.

        train("data.yaml", model="yolov5n", epochs=10)
        train("ppyoloe_plus_s", {"data.root": "datasets/mine"}, epochs=50)
        train(resume="output/my_run", epochs="+50")

    On several cards write a program that calls it, and start it with `fleetrun`.

    Args:
        config: a file, the name of a shipped one, or the result of `load_config`; together with
            `model` it is the data, as `data`.
        overrides: `key.path=value`, as after -o, or a mapping of values by key, nested or not.
        data: a data.yaml (ultralytics, Roboflow) or a folder with COCO's JSON, Pascal VOC's XML or
            YOLO's labels, for a classifier with a folder of images for each class; everything else
            is decided from them.
        model: the shipped recipe for `data`: "yolov5n", "ppyoloe_plus_s", "yolov5s_cls", ...
        epochs: passes over the training images; "+50" extends the `resume` run by 50.
        batch: images on this card, or "auto".
        weights: a name or a file to start from, as model.pretrained.
        image_size: pixels; one number is a square, two are height and width.
        output_dir: where the run writes; None: that of the configuration, else
            `output/<data>_<model>` or `output/<name of the file>`; for a configuration without a
            file output/run, or the first of output/run-2, output/run-3 that is free.
        steps: length of the run in optimizer steps instead of epochs; "+500" extends a run.
        classes: train on these alone, names or numbers, as data.classes.
        single_class: all objects are of one class, as data.single_class.
        fraction: share of the training images to train on, as data.fraction.
        evaluate: evaluate on the validation split during training, and keep the best checkpoint.
        resume: an output_dir or a checkpoint to continue from; without configuration and data,
            with its own settings. "auto": the newest checkpoint of this run, if there is one.
        callbacks: called in this order at the moments of the training.
    Returns: the run's output_dir, a Path; `Detector(run)` opens its best weights, `run.history()`
        is its table of epochs.
    Raises: UserError: data, weights or configuration are wrong, or a signal has stopped the run
        after a checkpoint (code `training_stopped`).
    """
    require_paddle()
    _require_callbacks(callbacks)
    source = config if data is None else data
    with _restored_signals():
        from ppdist.data.datasets.layout import is_layout
        from ppdist.engine.continuation import AUTO, Continuation
        from ppdist.engine.recipe import TrainOptions
        from ppdist.engine.run import plan_training, run_training

        # With `model`, a missing path counts as data, too, so that the message is about the data.
        is_data = isinstance(source, str | Path) and (
            is_layout(source) or (model is not None and not Path(source).exists())
        )
        goes_on = source is None and resume not in (None, AUTO)
        if not goes_on and (source is None or is_data != (model is not None)):
            missing = "model" if is_data else "data"
            raise ConfigError(
                f"{missing} is missing",
                code="option_missing",
                where="train()" if source is None else f"train({str(source)!r})",
                fix='train("data.yaml", model="yolov5n"), train("cfg.yml") or train(resume=RUN)',
            )
        plan = plan_training(
            data=source if is_data and isinstance(source, str | Path) else None,
            config=None if is_data else source,
            options=TrainOptions(
                model=model,
                epochs=epochs,
                batch=batch,
                weights=None if weights is None else str(weights),
                image_size=(image_size, image_size) if isinstance(image_size, int) else image_size,
                output_dir=None if output_dir is None else str(output_dir),
                steps=steps,
                classes=classes,
                single_class=single_class,
                fraction=fraction,
            ),
            overrides=override_items(overrides),
            resume=Continuation(resume),
        )
        # A new run must not overwrite an earlier one; a resumed run must find its own folder.
        free = _free_folder if resume is None else str
        folder = Path(plan.config.output_dir or free("output/run"))
        status = run_training(
            plan, folder, evaluate=evaluate, command=sys.argv, callbacks=callbacks
        )
    if status:
        raise UserError(
            "the training was stopped by a signal, after a checkpoint",
            code="training_stopped",
            where=str(folder),
            fix="train(config, resume=output_dir) continues from there",
        )
    return Run(work_folder(folder))


@answering("eval")
def evaluate(
    weights: Place, *, config: Config | None = None, overrides: Overrides = ()
) -> dict[str, float]:
    """Evaluates weights on the validation split, as `ppdist eval` does.

    Args:
        weights: see `Detector`.
        config: see `train`; None: the one in the weights.
        overrides: see `train`.
    Raises: UserError: weights, data or configuration are wrong.
    """
    require_paddle()
    file = _weights_file(weights)
    resolved = config_for(file, config, override_items(overrides), needs_data=True)
    from ppdist.distributed import comm
    from ppdist.engine.run import prepare_evaluation

    with _restored_signals():
        comm.init(resolved.device, resolved.distributed)
        ready = prepare_evaluation(resolved, file)
        for note in ready.notes:
            _warn(note)
        predictions: Any = ready.evaluator.predict(ready.model)
        return comm.run_on_main(lambda: ready.evaluator.measure(predictions))


@answering("export", ExportOptions.model_fields)
def export(
    weights: Place,
    out: Place,
    *,
    config: Config | None = None,
    formats: Sequence[Literal["paddle", "onnx", "openvino"]] = ("paddle",),
    **options: Any,
) -> Path:
    """Exports weights for deployment, as `ppdist export` does.

    Args:
        weights: see `Detector`.
        out: a folder, new or of an earlier export.
        config: see `evaluate`.
        formats: paddle (Paddle Inference), onnx, openvino (the ONNX model, which must compute the
            same in OpenVINO).
        options: nms=False (end with scores and boxes of all predictions), fixed_batch, fixed_size,
            normalised_input, int8, int8_loss, calibration (number of images).
    Returns: the folder; `Detector(out)` opens it.
    Raises: ExportError: the model cannot be exported, or a file does not compute what it does.
    """
    require_paddle()
    file = _weights_file(weights)
    resolved = config_for(file, config)
    export_options = parse_plain(
        {**options, "formats": list(formats)}, "export()", (), ExportOptions
    )
    from ppdist.distributed import device
    from ppdist.engine.build import build_model
    from ppdist.export.run import export_weights

    with device.on_cpu():  # same files, and checked without TF32 of a GPU
        model = build_model(resolved)
        return export_weights(resolved, model, file, Path(out), export_options, _warn).directory


# --- configurations -------------------------------------------------------------------------------


def _require_callbacks(callbacks: Sequence[object]) -> None:
    if not callbacks:
        return
    from ppdist.engine.callbacks import Callback

    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                "no callback", code="callback_unknown", where=f"callbacks: {callback!r}",
                fix="derive its class from ppdist.Callback, and give an instance of it",
            )  # fmt: skip


def _resolve_config(config: Config, overrides: Sequence[str]) -> ExperimentConfig:
    if isinstance(config, ExperimentConfig):
        return apply_overrides(config, overrides)
    from ppdist.engine.recipe import load_config_with_data

    return load_config_with_data(config, overrides)


def config_for(
    weights: Path,
    config: Config | None,
    overrides: Sequence[str] = (),
    needs_data: bool = False,
) -> ExperimentConfig:
    """Returns `config`, or if None the configuration in the weights, with `overrides` applied."""
    if config is None:
        from ppdist.engine.recipe import fit_to_root
        from ppdist.models.model_card import config_of_weights

        config = config_of_weights(weights, overrides, needs_data=needs_data)
        return fit_to_root(config, overrides) if needs_data else config
    return _resolve_config(config, overrides)


def override_item(key: str, value: str) -> str:
    """Formats an item of -o so that its value is taken literally (`a #b`, `2024`)."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _free_folder(name: str) -> str:
    """Returns the folder, or the first unused one of `name-2`, ...  Collective.

    A job restarted by fleetrun continues in its earlier folder.
    """
    from ppdist.distributed import comm

    def find() -> str:
        last_used, candidate, number = name, name, 1
        while Path(candidate).exists():
            number += 1
            last_used, candidate = candidate, f"{name}-{number}"
        return last_used if comm.was_restarted() else candidate

    folder: str = comm.run_on_main(find)
    return folder


def _weights_file(weights: Place) -> Path:
    """Returns the file of the weights; names of weights are resolved only here."""
    from ppdist.models.weights import checkpoint_of

    return checkpoint_of(Path(weights))


# --- this process ---------------------------------------------------------------------------------


@contextmanager
def _restored_signals() -> Iterator[None]:
    """Restores the caller's signal handlers after training or evaluation.

    Raises: ConfigError: this is not the main thread, the only one in which Python can set signal
        handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "training and evaluation handle signals, so they need the main thread",
            code="not_main_thread",
            fix="call it from the main thread, or start a process",
        )
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set by Python
                signal.signal(number, handler)


def _warn(text: str) -> None:
    """Issues a warning that points to the line of the user's code.

    In a notebook it prints to stdout instead, because notebooks show stderr in red.
    """
    if "ipykernel" in sys.modules:
        print(f"ppdist: warning: {text}")
        return
    frame, level = inspect.currentframe(), 1
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith("ppdist."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
