"""Knowledge distillation: learning from a larger detector, the teacher.

    teacher's outputs <- the same uint8 images, no gradient, weights and statistics frozen
    student's features -> adapters (1x1, where widths differ) -> compared with the teacher's

The adapters learn, so they are part of the student, its sublayer `distillation`: optimizer,
gradient sync, EMA, replica checks and recovery treat them like every other weight.  The teacher is
part of nothing.  Checkpoints keep the adapters in a file of their own, which evaluation and export
do not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle
from paddle import Tensor, nn

from ppdist.common.errors import ConfigError
from ppdist.config.distill import BoxesConfig, DistillConfig, FeaturesConfig, LogitsConfig, Trained
from ppdist.config.parse import parse_config
from ppdist.cpu.switch import is_on_onednn, self_check, use_onednn
from ppdist.distributed import comm
from ppdist.losses.base import Loss, LossOutput, Teaching, Term
from ppdist.models.base import Detector
from ppdist.models.build import build_model
from ppdist.models.model_card import require_classes_of
from ppdist.models.weights import checkpoint_of, load_weights

# Sources: class scores use none (arXiv:2006.04388); features: arXiv:2011.13256; boxes:
# arXiv:2102.12252, table 1.
_LOGITS_TEMPERATURE, _FEATURES_TEMPERATURE, _BOXES_TEMPERATURE = 1.0, 4.0, 10.0


@dataclass(frozen=True)
class Distillation:
    """A teacher, and the terms of the loss that compare the student with it.

    Attributes:
        teacher: frozen, in eval mode.
        source: the teacher's checkpoint, for messages.
        about: a line for the log.
    """

    teacher: Detector
    teaching: Teaching
    source: Path
    about: str


class DistilledLoss(Loss):
    """A loss with the terms of a teacher added.  Local: nothing here communicates.

    The teacher runs before the student's forward pass, so that its memory peak does not add to the
    activations that the student keeps for the backward pass.
    """

    def __init__(self, loss: Loss, distillation: Distillation) -> None:
        super().__init__()
        self._loss = loss
        self.distillation = distillation
        self.separate_keys = loss.separate_keys
        self._taught: Any = None  # the teacher's outputs for the micro-batch

    @property
    def without_teacher(self) -> Loss:
        return self._loss

    def prepare(self, model: Any, step: int) -> None:
        self._loss.prepare(model, step)

    def begin(self) -> None:
        """Checks that the outputs of teacher and student are comparable.

        Raises: ConfigError, on every rank: they are not comparable.
        """
        if problem := self._loss.teacher_mismatch(self.distillation.teacher):
            raise ConfigError(
                problem,
                code="teacher_unsuitable",
                where=f"distill.teacher: {self.distillation.source}",
            )

    @paddle.no_grad()
    def before_forward(self, images_B3HW: Tensor) -> None:
        """Runs the teacher, which applies its own image normalisation."""
        teacher = self.distillation.teacher
        self._taught = teacher(teacher.normalize(images_B3HW))

    def local_normalizers(
        self, boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor, size: tuple[int, int]
    ) -> Tensor | None:
        return self._loss.local_normalizers(boxes_BM4, labels_BM, mask_BM, size)

    def forward(
        self,
        outputs: Any,
        boxes_BM4: Tensor,
        labels_BM: Tensor,
        mask_BM: Tensor,
        step: int,
        global_normalizers: Tensor | None = None,
    ) -> LossOutput:
        """Computes the loss of a micro-batch with the teacher's terms; see `Loss.distil`."""
        output = self._loss(outputs, boxes_BM4, labels_BM, mask_BM, step, global_normalizers)
        taught, self._taught = self._taught, None
        teaching = self.distillation.teaching
        return self._loss.distil(output, outputs, taught, teaching, global_normalizers)


class Adapters(nn.Layer):
    """1x1 convolutions that map the student's features to the teacher's channel counts.

    They are the student's sublayer `distillation`.
    """

    def __init__(self, compared: list[int], widths: list[int], targets: list[int]) -> None:
        """
        Args:
            compared: levels of the student, by index.
            widths, targets: channel counts of student and teacher at these levels.
        """
        super().__init__()
        self.compared = compared
        self.levels = nn.LayerList(
            [
                # No bias: the loss takes a softmax over the cells of each channel, which cancels a
                # bias.
                nn.Identity() if width == target else nn.Conv2D(width, target, 1, bias_attr=False)
                for width, target in zip(widths, targets, strict=True)
            ]
        )

    def forward(self, features: list[Tensor]) -> tuple[Tensor, ...]:
        pairs = zip(self.levels, self.compared, strict=True)
        return tuple(level(features[index]) for level, index in pairs)


class Unchanged(nn.Layer):
    """Passes on the teacher's features unchanged."""

    def __init__(self, compared: list[int] | None = None) -> None:
        """Args: compared: indices of the levels that are passed on; None: all."""
        super().__init__()
        self.compared = compared

    def forward(self, features: list[Tensor]) -> tuple[Tensor, ...]:
        indices = range(len(features)) if self.compared is None else self.compared
        return tuple(features[index] for index in indices)


def build_distillation(
    config: DistillConfig,
    section: Any,
    student: Detector,
    seed: int,
    class_names: Sequence[str] = (),
) -> Distillation:
    """Reads the teacher and gives the student its adapters, in place.  Collective.

    Called before the optimizer and EMA are built and before the student is wrapped.
    Args:
        config, section: the sections `distill` and `model` of the run's configuration.
        seed: seed of the adapters' initial weights.
        class_names: class names of the student; (): the teacher numbers its classes in the same
            way.
    Raises: ConfigError on the rank that finds it, UserError on the others: there is no such
        checkpoint, or its model is of another family, has other classes or strides, or returns no
        features to compare.
    """
    source, teacher = comm.run_on_all_ranks(
        lambda: read_teacher(Path(config.teacher), section, student, class_names)
    )
    teaching = _build_teaching(config)
    size, ratio = teacher.parameter_count(), teacher.parameter_count() / student.parameter_count()
    terms = ", ".join(name for name, term in teaching._asdict().items() if term)
    about = (
        f"teacher: {source}, {size / 1e6:.2f} M parameters ({ratio:.1f} times the student's), for "
        f"{terms}"
    )
    # The teacher is frozen, so its layers may take the faster forms of deployment.
    teacher.fuse()
    fast = is_on_onednn(student)
    if fast and self_check(teacher, 2 * teacher.size_multiple) is None:
        use_onednn(teacher)  # each rank decides alone: values agree to rounding
    teacher.eval()
    for parameter in teacher.parameters():
        parameter.stop_gradient = True
    if teaching.features:
        student_cells, teacher_cells = _measure_features(student), _measure_features(teacher)
        # Not necessarily every level: D-FINE n lacks the finest one.
        cells = [cell for cell in student_cells if cell in teacher_cells]
        if not cells:
            raise _make_features_error("student and teacher have no features of the same stride")
        teacher.distillation = Unchanged([[*teacher_cells].index(cell) for cell in cells])
        paddle.seed(seed)  # equal adapters on all ranks
        student.distillation = Adapters(
            [[*student_cells].index(cell) for cell in cells],
            *([channels[cell] for cell in cells] for channels in (student_cells, teacher_cells)),
        )
        if fast:
            use_onednn(student.distillation)
    return Distillation(teacher, teaching, source, about)


def read_teacher(
    path: Path, section: Any, student: Detector, class_names: Sequence[str] = ()
) -> tuple[Path, Detector]:
    """Finds the checkpoint at a path, and builds its detector with EMA weights.

    The teacher's classes are reordered by name to match the student's.

    Args: section: the student's `model`.  class_names: see `build_distillation`.
    Raises: ConfigError: see `build_distillation`.  WeightsError: the checkpoint is damaged.
    """
    source = checkpoint_of(path)
    if not (source / "manifest.json").is_file():
        raise ConfigError(
            "no checkpoint there",
            code="teacher_not_found",
            where=f"distill.teacher: {path}",
            fix=(
                "expected a checkpoint folder of a run of this project (checkpoints/best), or its "
                "output_dir"
            ),
        )
    teacher_config = parse_config(source / "config.yml", (), Trained).model

    def refuse(what: str, of_teacher: Any, of_student: Any) -> ConfigError:
        return ConfigError(
            f"{what} {of_teacher}, the student has {of_student}",
            code="teacher_unsuitable",
            where=f"distill.teacher: {source}",
            fix="give a teacher trained with the same",
        )

    if teacher_config.name != section.name:
        raise refuse("its model.name is", teacher_config.name, section.name)
    if teacher_config.num_classes != section.num_classes:
        raise refuse("its model.num_classes is", teacher_config.num_classes, section.num_classes)
    teacher = build_model(teacher_config)
    assert isinstance(teacher, Detector), "the configuration refuses classifiers"
    if teacher.strides != student.strides:
        raise refuse("its levels have the strides", teacher.strides, student.strides)
    fix = "give a teacher of the same classes; their order does not matter"
    names = require_classes_of(source, class_names, "the training set", fix)
    load_weights(teacher, source, names)
    teacher.become_teacher()
    return source, teacher


def _build_teaching(config: DistillConfig) -> Teaching:
    """Builds the terms of the distillation loss, for `Loss.distil`."""

    def term(
        config: LogitsConfig | FeaturesConfig | BoxesConfig | None, temperature: float
    ) -> Term | None:
        return None if config is None else Term(config.weight, temperature)

    return Teaching(
        term(config.logits, _LOGITS_TEMPERATURE),
        term(config.features, _FEATURES_TEMPERATURE),
        term(config.boxes, _BOXES_TEMPERATURE),
    )


@paddle.no_grad()
def _measure_features(model: Detector) -> dict[tuple[int, int], int]:
    """Measures the channel counts of the neck's levels, by (height, width) in cells.

    Runs a black image through the model.

    Raises: ConfigError: the model's outputs contain no features.
    """
    original, model.distillation, training = model.distillation, Unchanged(), model.training
    model.eval()
    size = model.size_multiple
    features = getattr(model(paddle.zeros([1, 3, size, size])), "features", ())
    model.distillation = original
    if training:
        model.train()
    if not features:
        raise _make_features_error("this detector gives no features to compare")
    return {(level.shape[2], level.shape[3]): level.shape[1] for level in features}


def _make_features_error(what: str) -> ConfigError:
    return ConfigError(
        what, code="teacher_unsuitable", where="distill.features", fix="set it to null"
    )
