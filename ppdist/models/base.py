"""Base classes of all models and of detectors; freezing their parts.

ImageModel and Detector are the interface of a model that the trainer, evaluator and export rely on.
`freeze` and related functions implement `train.freeze`.
"""

import difflib
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import numpy as np
import paddle
from paddle import Tensor, nn

from ppdist.common.errors import ConfigError
from ppdist.config.section import Task
from ppdist.distributed import paddle_api

NECK, HEAD = "neck", "head"  # stages after those of the backbone


class Targets(NamedTuple):
    """Ground truth that a model gets in its forward pass of training.

    boxes_BM4, labels_BM, mask_BM, seeds_B: see `Batch`.
    """

    boxes_BM4: Tensor
    labels_BM: Tensor
    mask_BM: Tensor
    seeds_B: np.ndarray

    @classmethod
    def of(cls, batch: Any) -> "Targets":
        """Extracts from a `Batch` the fields that a model may learn from."""
        return cls(*(getattr(batch, name) for name in cls._fields))

    @classmethod
    def example(cls, images_B3HW: Tensor) -> "Targets":
        """Builds targets with one centred object of class 0 per image, for a trial forward pass."""
        batch, _, height, width = images_B3HW.shape
        box = [width / 4, height / 4, 3 * width / 4, 3 * height / 4]
        return cls(
            paddle.to_tensor([[box]] * batch, dtype="float32"),
            paddle.zeros([batch, 1], dtype="int64"),
            paddle.ones([batch, 1]),
            np.arange(batch),
        )


class KeyTable(NamedTuple):
    """Names of weights in one implementation: our key -> the corresponding entries of a file.

    names: several entries are concatenated along the output axis into one of ours, such as query,
        key and value of an attention layer whose projections are one matrix.
    torch: True if linear layers are stored as torch does, [out, in].
    """

    names: Mapping[str, str | tuple[str, ...]]
    torch: bool = True

    def sources(self, names: Container[str]) -> dict[str, tuple[str, ...]]:
        """Maps each of our keys whose entries are all among these names to those entries."""
        parts = {
            key: (entry,) if isinstance(entry, str) else entry for key, entry in self.names.items()
        }
        return {
            key: entries for key, entries in parts.items() if all(name in names for name in entries)
        }

    def of_backbone(self) -> "KeyTable":
        """Returns the table for a file that holds only the backbone."""
        start = "backbone."
        return KeyTable(
            {
                key: name.removeprefix(start)
                for key, name in self.names.items()
                if isinstance(name, str) and key.startswith(start) and name.startswith(start)
            },
            self.torch,
        )


class Backbone(nn.Layer):
    """Base of all backbones: their contract with the model and the optimizer.

    Attributes:
        finest: the finest level that the backbone offers.
        coarsest: the levels that may be the last one.
        strides: pixels per cell of each feature, fine to coarse.
        channels: number of channels of each feature, in the same order.
        stage_keys: for each stage, in the order in which an image passes them, the prefixes of its
            state-dict keys, whole names between dots.  Every key has one of them as its prefix.
            Freezing and layer-wise learning rates count these stages; the first prefix names the
            stage.
    """

    finest: ClassVar[int]
    coarsest: ClassVar[tuple[int, ...]]
    strides: tuple[int, ...]
    channels: tuple[int, ...]
    stage_keys: tuple[tuple[str, ...], ...]

    @classmethod
    def options_of(cls, variant: str) -> dict[str, Any]:
        """Returns additional constructor arguments for a `model.variant`."""
        return {}

    @property
    def first_convolution(self) -> nn.Conv2D:
        """Returns the convolution that takes the pixels: by default, the first one built.

        A subclass in which this is another convolution overrides the method.
        """
        return next(layer for layer in self.sublayers() if isinstance(layer, nn.Conv2D))

    def original_keys(self) -> dict[str, str]:
        """Maps our keys to those of its published weights."""
        return {}

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        """Computes features [B, channels, H / stride, W / stride], fine to coarse."""
        raise NotImplementedError


class ImageModel(nn.Layer):
    """Base of all models.

        outputs = model(model.normalize(images_B3HW))     # in eval mode as in train mode
        loss = criterion(outputs, ...)                    # training
        model.predict(images_B3HW)                        # inference: normalise, forward, decode

    Attributes:
        task: what it predicts: "detect" boxes with classes, "classify" whole images.
        takes_targets: a training forward is `model(images_B3HW, targets)`; see `training_inputs`.
        needs_nms: predictions of one object overlap, so non-maximum suppression is needed.
        needs_anchors: boxes are predicted as multiples of anchors, which fit a training set; then
            the model has the next three, `anchors_LA2` and `set_anchors`.
        anchor_threshold: an anchor is assigned to a box only if the ratio of their widths and that
            of their heights, larger to smaller, stay below this.
        given_anchors_LA2: anchors from the config, kept whatever a weight file contains; None: the
            config has none.
        fits_anchors: whether other anchors may be fitted to the training set.
        backbone: the layers applied to the image first.
        num_classes: C.
        size_multiple: height and width of the input are multiples of this, pixels.
        pixel_mean, pixel_std: RGB, in units of 0..255; see `normalize`.
        neck_keys: state-dict key prefixes of the neck; keys of neither the neck nor the backbone
            belong to the head.
        class_layers: state-dict key prefixes of the layers whose shape depends on C; if weights
            have another number of classes, exactly these layers keep their initial values.
        rows_before_classes: how many rows stand before the C rows of classes in each group of rows
            of a class layer; a group is an anchor.
        padded_keys: state-dict keys that torch implementations keep with one additional last row,
            which stands for no class.
        training_only: state-dict key prefixes of parts that only training uses; weights may lack
            them.
        init_from: pairs of state-dict key prefixes: a part, and the part from which it is copied if
            weights lack it. Training continues from this copy; predictions do not use it.
    """

    task: ClassVar[Task]
    takes_targets: bool = False
    needs_nms: bool = False
    needs_anchors: ClassVar[bool] = False
    anchor_threshold: ClassVar[float] = 4.0  # YOLOv5's in all its published recipes
    given_anchors_LA2: np.ndarray | None = None
    fits_anchors: bool = False
    backbone: Backbone
    neck_keys: tuple[str, ...] = ("neck.",)
    class_layers: tuple[str, ...] = ()
    rows_before_classes: ClassVar[int] = 0
    padded_keys: ClassVar[tuple[str, ...]] = ()
    training_only: tuple[str, ...] = ()
    init_from: tuple[tuple[str, str], ...] = ()

    def __init__(
        self,
        num_classes: int,
        size_multiple: int,
        pixel_mean: tuple[float, float, float],
        pixel_std: tuple[float, float, float],
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.size_multiple = size_multiple
        self.pixel_mean = list(pixel_mean)
        self.pixel_std = list(pixel_std)
        self._statistics: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def stages(self) -> dict[str, list[str]]:
        """Returns the state-dict keys by stage, in the order in which an image passes the stages.

            PP-YOLOE: backbone.stem, backbone.stages.0, ... neck, head
            YOLOv5:   backbone.stem, backbone.down2,    ... neck, head  (a classifier has no neck)

        The stages of the backbone are its `stage_keys`; the keys of the neck begin with
        `neck_keys`.
        """
        rows = {f"backbone.{row[0]}": row for row in self.backbone.stage_keys}
        begins = {f"backbone.{key}.": name for name, row in rows.items() for key in row}
        stages: dict[str, list[str]] = {name: [] for name in (*rows, NECK, HEAD)}
        for key in self.state_dict():
            if key.startswith("backbone."):
                owners = [name for begin, name in begins.items() if key.startswith(begin)]
                assert len(owners) == 1, f"{key} is in {len(owners)} stages of the backbone"
                stages[owners[0]].append(key)
            else:
                stages[NECK if key.startswith(self.neck_keys) else HEAD].append(key)
        return {name: keys for name, keys in stages.items() if keys}

    def official_keys(self) -> dict[str, str]:
        """Maps our state-dict keys to those of the original implementation.

        If the mapping changes nothing, our names are those of the original; otherwise the original
        is a torch model.
        """
        return {key: key for key in self.state_dict()}

    def key_tables(self) -> tuple[KeyTable, ...]:
        """Returns the names that further implementations use, beside `official_keys`."""
        return ()

    def normalize(self, images_B3HW: Tensor) -> Tensor:
        """Converts RGB images 0..255 to float32: (value - mean) / std."""
        images = images_B3HW
        if images.dtype != paddle.float32:
            images = images.astype("float32")
        # Models that only divide by 255 need a single product, which a graph can also fold.
        if not any(self.pixel_mean) and len(set(self.pixel_std)) == 1:
            scale = 1.0 / self.pixel_std[0]
            return images if scale == 1 else images * scale
        mean, std = self._pixel_statistics(images)
        return images - mean if set(self.pixel_std) == {1.0} else (images - mean) / std

    def _pixel_statistics(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation [1, 3, 1, 1] on the device of the images."""
        if not paddle.in_dynamic_mode():
            return _channels(self.pixel_mean), _channels(self.pixel_std)
        # Cached per device, which saves a copy from the host in every step.
        place = str(images.place)
        if place not in self._statistics:
            self._statistics[place] = _channels(self.pixel_mean), _channels(self.pixel_std)
        return self._statistics[place]

    @property
    def anchors_LA2(self) -> np.ndarray:
        """Returns the anchors' width and height in input pixels, levels fine to coarse."""
        raise NotImplementedError

    def set_anchors(self, pixels_LA2: np.ndarray) -> None:
        """Replaces the anchors in place."""
        raise NotImplementedError

    def forward(self, images_B3HW: Tensor) -> Any:
        """Computes raw outputs of normalised images; H and W are multiples of `size_multiple`."""
        raise NotImplementedError

    def training_inputs(self, images_B3HW: Tensor, targets: Targets) -> tuple[Any, ...]:
        """Returns the arguments of a training forward: `model(*model.training_inputs(...))`.

        With targets, a model that takes them returns outputs that depend on every parameter, also
        where no image has an object, in train and in eval mode (a blank image, a count of
        operations).  Without targets it returns what evaluation, export and a student need; the
        validation loss is computed from these outputs.

        Args: images_B3HW: normalised.
        """
        return (images_B3HW, targets) if self.takes_targets else (images_B3HW,)

    def decode(self, outputs: Any) -> Any:
        """Converts raw outputs to predictions: boxes with scores, or class probabilities."""
        raise NotImplementedError

    def predict(self, images_B3HW: Tensor) -> Any:
        """Predicts from RGB images 0..255."""
        return self.decode(self(self.normalize(images_B3HW)))

    def parameter_count(self) -> int:
        """Counts the weights, including frozen ones."""
        return sum(weight_sizes(self).values())

    def fuse(self) -> None:
        """Re-parameterises layers in place for deployment; eval outputs stay equal up to rounding.

        Layers that can be re-parameterised, such as `RepConv`, have a `fuse` of their own.
        """
        for layer in self.sublayers():
            if hasattr(layer, "fuse"):
                layer.fuse()
        self.eval()

    def fuse_conv_bn(self) -> None:
        """Fuses batch norms into convolutions in all layers that have both, in place."""
        for layer in self.sublayers():
            if hasattr(layer, "fuse_conv_bn"):
                layer.fuse_conv_bn()

    @paddle.no_grad()
    def fold_pixel_scale(self) -> None:
        """Moves the division by `pixel_std` into the first convolution, in place.

        The mean is still subtracted before: the convolution pads with zeros, and zero is the mean
        colour only after that subtraction.
        """
        first = self.backbone.first_convolution
        first.weight.set_value(first.weight / _channels(self.pixel_std))
        self.set_pixel_statistics(self.pixel_mean, [1.0, 1.0, 1.0])

    def set_pixel_statistics(self, mean: list[float], std: list[float]) -> None:
        """Sets the mean and deviation that `normalize` uses."""
        self.pixel_mean, self.pixel_std = mean, std
        self._statistics.clear()


class Detector(ImageModel):
    """Base of all detectors.

        scores_BNC, boxes_BN4 = model.predict(images_B3HW)

    Attributes:
        strides: pixels per cell of each output level, in the order of the outputs; (): outputs do
            not belong to cells, and their number is the same for any image.
        distillation: called with the neck's features, level by level in the order of the outputs;
            the tuple it returns becomes `outputs.features`. None: the features are not compared
            with a teacher's.
    """

    task = "detect"
    needs_nms = True

    def __init__(
        self,
        num_classes: int,
        strides: tuple[int, ...],
        pixel_mean: tuple[float, float, float],
        pixel_std: tuple[float, float, float],
        size_multiple: int | None = None,
    ) -> None:
        """Initialises the attributes that all detectors share.

        Args: size_multiple: None: the largest stride.
        """
        super().__init__(num_classes, size_multiple or max(strides), pixel_mean, pixel_std)
        self.strides = strides
        self.distillation: nn.Layer | None = None

    def decode(self, outputs: Any) -> tuple[Tensor, Tensor]:
        """Turns outputs into scores_BNC in 0..1 and boxes_BN4, xyxy in input pixels.

        Boxes are not clipped.  Properties of the input that decoding needs, such as the size, are
        part of the outputs.
        """
        raise NotImplementedError

    def become_teacher(self) -> None:
        """Drops heads whose outputs a student should not learn from; the base has none."""


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and dictionaries."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        yield from tensors_in(list(outputs.values()))
    elif isinstance(outputs, tuple | list):
        for part in outputs:
            yield from tensors_in(part)


def weight_sizes(model: nn.Layer) -> dict[str, int]:
    """Returns the number of weights of each parameter by key.

    Running statistics, which Paddle counts as parameters, are left out.
    """
    return {
        key: math.prod(value.shape)
        for key, value in model.named_parameters()
        if not key.endswith(("._mean", "._variance"))
    }


def _channels(values: list[float]) -> Tensor:
    """Returns one value per RGB channel as a tensor [1, 3, 1, 1]."""
    return paddle.to_tensor(values, dtype="float32").reshape([1, 3, 1, 1])


_NORMS = (nn.BatchNorm1D, nn.BatchNorm2D)
Freeze = int | Sequence[str] | None  # see `frozen_keys`


def freeze(model: ImageModel, parts: Freeze) -> frozenset[str]:
    """Freezes parts of a model, in place, before an optimizer is built.

    Every rank freezes the same parts.  Their weights get no gradient, hence neither updates nor
    decay; their batch norms normalise with the running statistics and do not update them, even in
    training mode.  The backward pass ends at the first weight that trains.

    Args: parts: see `frozen_keys`.
    Returns: state-dict keys of the frozen tensors.
    Raises: ConfigError: see `frozen_keys`.
    """
    keys = frozen_keys(model, parts)
    for key, parameter in model.named_parameters():
        if key in keys:
            parameter.stop_gradient = True
    for name, layer in model.named_sublayers():
        if isinstance(layer, _NORMS) and f"{name}._mean" in keys:
            paddle_api.normalise_by_running(layer)
    return keys


def frozen_keys(model: ImageModel, parts: Freeze) -> frozenset[str]:
    """Returns the state-dict keys that `train.freeze` selects.

    Args:
        parts: a number of stages of the backbone, counted from the image (the stem is the first;
            see `ImageModel.stages`), or patterns of keys (`matching_keys`), such as `backbone` or
            `neck.fpn_stages.0`.  None: nothing.
    Raises: ConfigError: the backbone has fewer stages, no weight has a matching key, or nothing is
        left to train.
    """
    if parts is None:
        return frozenset()
    keys = list(model.state_dict())
    if isinstance(parts, int):
        stages = model.stages
        backbone = [name for name in stages if name not in (NECK, HEAD)]
        if parts > len(backbone):
            raise ConfigError(
                f"{parts}: the backbone of this model has {len(backbone)} stages "
                f"({', '.join(backbone)})",
                code="freeze_too_many_stages",
                where="train.freeze",
                fix=(
                    "to freeze more than the backbone, give key prefixes, such as [backbone, "
                    f"{next(n for n in stages if n not in backbone)}]"
                ),
            )
        frozen = frozenset(key for name in backbone[:parts] for key in stages[name])
    else:
        frozen = frozenset(key for pattern in parts for key in _match_frozen_keys(pattern, keys))
    if all(
        key in frozen for key, parameter in model.named_parameters() if not parameter.stop_gradient
    ):
        raise ConfigError(
            "nothing is left to train",
            code="freeze_leaves_nothing",
            where="train.freeze",
            fix="freeze less",
        )
    return frozen


def matching_keys(pattern: str, keys: Iterable[str]) -> list[str]:
    """Returns the keys that begin with a pattern of names, in which * matches any text."""
    prefix = pattern.rstrip(".")
    return [
        key
        for key in keys
        if prefix and any(fnmatchcase(key, form) for form in (prefix, f"{prefix}.*"))
    ]


def expected_keys(pattern: str, keys: Sequence[str]) -> str:
    """Suggests keys that may have been intended by a pattern without a match."""
    if "*" in pattern:
        return f"the nearest are {', '.join(difflib.get_close_matches(pattern, keys, 3, 0.0))}"
    # Possible continuations of the valid part of the key.
    parts = pattern.rstrip(".").split(".")
    prefix, candidates = "", list(keys)
    while parts and (matches := [k for k in keys if k.startswith(f"{prefix}{parts[0]}.")]):
        prefix += f"{parts.pop(0)}."
        candidates = matches
    choices = ", ".join(dict.fromkeys(key.removeprefix(prefix).split(".")[0] for key in candidates))
    return f"expected {prefix}{{{choices}}}" if prefix else f"expected one of {choices}"


def _match_frozen_keys(pattern: str, keys: list[str]) -> list[str]:
    """Returns the keys that match one pattern of `train.freeze`.

    Raises: ConfigError: no key matches.
    """
    matches = matching_keys(pattern, keys)
    if not matches:
        raise ConfigError(
            f"no weight of this model has a key that begins with {pattern!r}; "
            f"{expected_keys(pattern, keys)}",
            code="freeze_unknown_key",
            where="train.freeze",
        )
    return matches


def freezing(model: ImageModel, parts: Freeze) -> list[str]:
    """Describes the frozen parts in one line for the log; returns [] if there are none.

    Raises: ConfigError: see `frozen_keys`.
    """
    keys = frozen_keys(model, parts)
    if not keys:
        return []
    sizes = weight_sizes(model)
    frozen = sum(size for key, size in sizes.items() if key in keys)
    complete_stages = [name for name, stage_keys in model.stages.items() if keys >= {*stage_keys}]
    names = f" ({', '.join(complete_stages)})" if complete_stages else ""
    return [
        f"frozen: {frozen} of {sum(sizes.values())} weights{names}; they and their running "
        f"statistics stay as they are"
    ]
