"""Every kind of defect that data can have: how bad it is, what training does, what a fix does."""

from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "note"]


class Kind(NamedTuple):
    """severity: error: training stops or loses images; warning: something is put right or left
    out; note: handled, good to know.  training, fix: what they do about it."""

    severity: Severity
    meaning: str
    training: str
    fix: str


_STOPS = "stops with this message"
_REPLACED = "another image in its place, counted against data.bad_images_limit"
_BAD_BOX = "left out (data.bad_boxes)"
_LEFT_OUT = "left out"
_AS_IT_IS = "as it is"

KINDS: dict[str, Kind] = {
    # Annotation files.
    "annotation_missing": Kind("error", "a listed image has no annotation file", _STOPS, _LEFT_OUT),
    "annotation_unreadable": Kind(
        "error", "the annotation file of one image is malformed", _STOPS, "the image is left out"
    ),
    "annotation_line": Kind("error", "one line or object is malformed", _STOPS, _LEFT_OUT),
    "encoding": Kind("warning", "text is not UTF-8", "read as GBK", "written as UTF-8"),
    "line_ends": Kind("note", "lines end as on Windows", "read all the same", "written with \\n"),
    "class_unknown": Kind("error", "an object of a class that nobody declares", _STOPS, _LEFT_OUT),
    "class_ids_gap": Kind(
        "note", "category ids do not simply count up", "mapped to 0, 1, 2, ...", _AS_IT_IS
    ),
    "classes_differ": Kind(
        "error", "training and validation have other classes", _STOPS, "nothing is written"
    ),
    "class_unused": Kind("note", "a class without an object", "cannot be learned", _AS_IT_IS),
    "image_unknown": Kind("error", "an object of an image that is not listed", _STOPS, _LEFT_OUT),
    "image_id_duplicate": Kind("error", "two images with one id", _STOPS, "the first is kept"),
    "annotation_id_duplicate": Kind(
        "warning", "two objects with one id", "both are used", "numbered anew"
    ),
    "image_listed_twice": Kind(
        "warning", "an image listed more than once", "used as often", "once, with all its objects"
    ),
    "outline_malformed": Kind(
        "warning", "an outline that is no list of points", "its box alone is used", "its box alone"
    ),
    "area_invalid": Kind("warning", "an area that is no number", "that of the box", _LEFT_OUT),
    "label_without_image": Kind(
        "warning", "a label file of no image", "not used, and its objects neither", _LEFT_OUT
    ),
    "label_shared": Kind(
        "warning",
        "images that differ in their suffix alone have one label file",
        "both are used with its objects",
        "each gets its own",
    ),
    "size_invalid": Kind("error", "the annotated size is no size", _STOPS, _LEFT_OUT),
    "path_outside": Kind("error", "a file name leads out of its folder", _STOPS, _LEFT_OUT),
    # Boxes.
    "box_not_finite": Kind("warning", "a box with NaN or infinity", _BAD_BOX, _LEFT_OUT),
    "box_no_area": Kind("warning", "a box of no width or height", _BAD_BOX, _LEFT_OUT),
    "box_swapped": Kind(
        "warning", "corners the wrong way round", "put in order (data.bad_boxes)", "put in order"
    ),
    "box_outside": Kind("warning", "a box quite outside its image", _BAD_BOX, _LEFT_OUT),
    "box_sticking_out": Kind(
        "warning", "a box leaves its image by over a pixel", "cut (data.bad_boxes)", "cut"
    ),
    "box_duplicate": Kind("warning", "the same object twice", "both are used", "the first is kept"),
    # Images.
    "image_missing": Kind("error", "a listed image does not exist", _STOPS, _LEFT_OUT),
    "image_empty": Kind("error", "a file of no bytes", _REPLACED, _LEFT_OUT),
    "image_unreadable": Kind("error", "not an image, or damaged", _REPLACED, _LEFT_OUT),
    "image_truncated": Kind("error", "the end of the file is missing", _REPLACED, _LEFT_OUT),
    "image_crashes_decoder": Kind("error", "decoding it kills the process", _REPLACED, _LEFT_OUT),
    "image_hangs_decoder": Kind("error", "decoding it does not end", _REPLACED, _LEFT_OUT),
    "size_mismatch": Kind("error", "not as large as its annotation says", _REPLACED, _LEFT_OUT),
    "wrong_extension": Kind(
        "note", "a file named as another format", "read as what it is", _AS_IT_IS
    ),
    "exif_orientation": Kind(
        "note",
        "a camera's note says to turn it",
        "turned, unless its annotation has the size of the image not turned",
        _AS_IT_IS,
    ),
    "grey": Kind("note", "an image without colour", "three equal channels", _AS_IT_IS),
    "alpha": Kind("note", "an image with transparency", "transparency ignored", _AS_IT_IS),
    "sixteen_bit": Kind("note", "16 bits a channel", "the upper 8 bits", _AS_IT_IS),
    "cmyk": Kind("note", "an image for print (CMYK)", "turned into RGB", _AS_IT_IS),
    "image_duplicate": Kind(
        "warning", "two files of one split have the same content", "both are used", "once"
    ),
    "image_no_boxes": Kind("note", "an image without an object", "background", _AS_IT_IS),
    "image_unlisted": Kind("note", "an image on disk that no split lists", "not used", _LEFT_OUT),
    "leakage": Kind(
        "warning",
        "the same content in training and validation",
        "used in both: scores are too good",
        "left out of training",
    ),
}
