"""A few images of a split instead of all: the same ones in every run and on every rank."""

from dataclasses import replace

import numpy as np

from ppdist.data.records import Records
from ppdist.data.sample import DetectionSet, keyed_generator

_SEED = 0  # not the run's: runs with other seeds are compared on the same images


def limited(dataset: DetectionSet, limit: int | None, key: str) -> DetectionSet:
    """The first `limit` images of an order that depends on the annotations alone; see `draw_order`.

    The images keep their order in the files, and the set its classes, also those without an object.
    Of a set of as many images or fewer all are taken.  Whoever reads the set for a user says its
    `limited`, which tells what was done.

    Args:
        limit: images; None: all.
        key: of the configuration, for that line.
    """
    count = len(dataset.records)
    if limit is None:
        return dataset
    if limit >= count:
        note = f"{key}: {limit}, and there are {count} images: all of them are used"
        return replace(dataset, limited=note)
    records = Records.of(dataset.records)
    chosen = sorted(draw_order(records, len(dataset.class_names))[:limit].tolist())
    few = Records(records[index] for index in chosen)
    before, after = (set(each.labels_O[~each.crowd_O].tolist()) for each in (records, few))
    note = f"{key}: {limit} of {count} images"
    absent = [dataset.class_names[label] for label in sorted(before - after)]
    if absent:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        note += f", without any object of {', '.join(absent[:5])}{more}"
    return replace(dataset, records=few, limited=note)


def limits(*sets: DetectionSet | None) -> list[str]:
    """What there is to say about the limits of some sets."""
    return [dataset.limited for dataset in sets if dataset is not None and dataset.limited]


def draw_order(records: Records, num_classes: int) -> np.ndarray:
    """An order of the images in which few suffice to see every class.

    A random order drawn from a fixed seed, in which those images come first that show every class:
    again and again the one with the most classes not seen so far (the earliest of equals).  That
    greedy choice needs at most 1 + ln C times the fewest possible (Johnson 1974, Approximation
    algorithms for combinatorial problems, theorem 4).  A smaller limit takes images of a larger
    one, so curves over the number of images add images and take none away.

    Returns: [N] positions in records.
    """
    count = len(records)
    order_N = keyed_generator(_SEED, count).permutation(count)
    rank_N = np.empty(count, np.int64)
    rank_N[order_N] = np.arange(count)
    image_O = np.repeat(np.arange(count), records.counts_N)
    counted_O = ~records.crowd_O
    # Pairs (image, class), each once; images by their place in the drawn order, so that the first
    # of several that show as many new classes is the earliest.
    pairs = np.unique(rank_N[image_O[counted_O]] * num_classes + records.labels_O[counted_O])
    places, labels = np.divmod(pairs, max(1, num_classes))
    first: list[int] = []
    while len(places):
        best = int(np.bincount(places).argmax())
        first.append(best)
        seen = np.isin(labels, labels[places == best])
        places, labels = places[~seen], labels[~seen]
    rest = np.setdiff1d(np.arange(count), np.array(first, np.int64))
    return order_N[np.concatenate([np.array(first, np.int64), rest])]
