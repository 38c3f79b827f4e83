"""The cards of a host: which are present, visible and requested.

A card is named by its physical id, the number nvidia-smi shows; CUDA_VISIBLE_DEVICES lists physical
ids (or UUIDs) and requested cards must be in it: that is how Paddle's launcher reads both.  Cards
of another kind are used as named in the command: only Paddle's plug-in could count them.
"""

import ctypes
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppdist.common.child import output_of
from ppdist.common.errors import LaunchError

_SMI_SECONDS = 60.0  # the first call after boot wakes every card


@dataclass(frozen=True)
class Card:
    """One physical GPU."""

    index: int
    name: str = "GPU"
    uuid: str = ""


def detect_cards() -> list[Card]:
    """Returns this machine's NVIDIA cards, whether CUDA sees them or not."""
    return _read_nvidia_smi() or _query_driver()


def _read_nvidia_smi() -> list[Card]:
    nvidia_smi = shutil.which("nvidia-smi") or shutil.which("/usr/lib/wsl/lib/nvidia-smi")
    if nvidia_smi is None:
        return []
    try:
        listing = output_of([nvidia_smi, "-L"], _SMI_SECONDS)
    except OSError:
        return []
    return parse_nvidia_smi(listing[1]) if listing is not None and listing[0] == 0 else []


def parse_nvidia_smi(listing: str) -> list[Card]:
    """Reads the cards from the output of `nvidia-smi -L`; MIG slices are left out."""
    pattern = re.compile(r"^GPU (\d+): (.*?)(?: \(UUID: (\S+)\))?\s*$", re.MULTILINE)
    return [Card(int(index), name, uuid or "") for index, name, uuid in pattern.findall(listing)]


def _query_driver() -> list[Card]:
    """Asks the driver, or counts the device files: some containers lack nvidia-smi."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return []
    device_files = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [Card(index) for index in range(len(device_files))]
    # The driver counts visible cards only: with CUDA_VISIBLE_DEVICES set, there may be more device
    # files.
    if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
        return [Card(index) for index in range(max(count.value, len(device_files)))]
    return []


def visible_labels(cards: Sequence[Card], variable: str | None) -> list[str]:
    """Lists the ids of the visible cards, in CUDA's order.

    Args:
        variable: the value of CUDA_VISIBLE_DEVICES, or None when it is not set.
    Returns: ids as text; a UUID that no card has (a MIG slice) stays as it is.
    Raises: LaunchError: the variable names a card that the machine does not have.
    """
    if variable is None or variable.strip() == "all":
        return [str(card.index) for card in cards]
    if not cards:
        return []
    labels = []
    for label in (entry.strip() for entry in variable.split(",")):
        if label in ("", "-1", "NoDevFiles"):
            # CUDA reads the list up to the first entry that names no card.
            break
        if label.isdigit() and int(label) not in [card.index for card in cards]:
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={variable} names card {label}, but this machine has "
                f"{name_cards(card.index for card in cards)}",
                code="visible_devices_wrong",
                fix="correct or unset the variable",
            )
        # CUDA accepts any prefix of a UUID that belongs to one card only.
        matches = [card for card in cards if card.uuid and card.uuid.startswith(label)]
        labels.append(str(matches[0].index) if len(matches) == 1 and not label.isdigit() else label)
    return labels


def expand_ids(text: str) -> list[str]:
    """Expands a list of card ids with ranges: `0-3,6` -> 0 1 2 3 6.

    Raises: LaunchError: not a list of ids, a range that runs backwards, or an id twice.
    """
    # Spaces separate ids as commas do, so those around a range's dash go first.
    normalized = re.sub(r"(?<=\d)\s*-\s*(?=\d)", "-", text.strip(" '\""))
    ids: list[str] = []
    for part in re.split(r"[,\s]+", normalized.strip(" ,")):
        span = re.fullmatch(r"(\d+)-(\d+)", part)
        if span:
            first, last = int(span[1]), int(span[2])
            if first > last or last - first > 1023:
                raise LaunchError(
                    f"{part} is not a range from low to high",
                    code="cards_invalid",
                    where=f"cards {text!r}",
                )
            ids += [str(index) for index in range(first, last + 1)]
        elif part.isdigit():
            ids.append(str(int(part)))
        elif part.startswith(("GPU-", "MIG-")):
            ids.append(part)
        else:
            raise LaunchError(
                f"invalid card id {part!r}",
                code="cards_invalid",
                where=f"cards {text!r}",
                fix="expected a list such as 0,1 or 0-3,6",
            )
    _require_once(ids, text, "twice")
    return ids


def _require_once(cards: Sequence[str], text: str, description: str) -> None:
    repeated = sorted({card for card in cards if cards.count(card) > 1})
    if repeated:
        raise LaunchError(
            f"card {', '.join(repeated)} is listed {description}",
            code="cards_repeated",
            where=f"cards {text!r}",
        )


def split_cards(text: str) -> list[list[str]]:
    """Splits the cards among concurrent runs: `0,1|2-3` -> 0 1 and 2 3.

    Raises: LaunchError: as in `expand_ids`; the runs have different numbers of cards, or share a
        card.
    """
    runs_RC = [expand_ids(part) for part in text.strip(" '\"").split("|")]
    if len({len(cards) for cards in runs_RC}) > 1:
        raise LaunchError(
            "runs side by side need equal numbers of cards",
            code="cards_uneven",
            where=f"cards {text!r}",
        )
    _require_once([card for cards in runs_RC for card in cards], text, "for two runs")
    return runs_RC


def deal_out(visible: Sequence[str], runs: int, cards_per_run: int) -> list[list[str]]:
    """Distributes the visible cards among concurrent runs, in order.

    Raises: LaunchError: there are not enough cards.
    """
    if runs * cards_per_run > len(visible):
        raise LaunchError(
            f"{runs} at a time with {cards_per_run} card{'s' * (cards_per_run > 1)} each need "
            f"{runs * cards_per_run}, and this machine has {len(visible)} visible",
            code="cards_too_few",
            fix=(
                "ask for fewer, or hide the cards to compute on the CPU: CUDA_VISIBLE_DEVICES= "
                "before the command"
            ),
        )
    return [list(visible[run * cards_per_run : (run + 1) * cards_per_run]) for run in range(runs)]


def name_cards(labels: Iterable[object]) -> str:
    """Names cards for a message: `card 3` or `cards 0, 1`."""
    texts = [str(label) for label in labels]
    return f"card {texts[0]}" if len(texts) == 1 else f"cards {', '.join(texts)}"
