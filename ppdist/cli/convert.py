"""Converts weights.

ppdist convert [-c cfg.yml] -w IN --out OUT [--keys ours|official]

Without -c the configuration is the one in the checkpoint or its model card.
IN is whatever loads into the model of the config: .pdparams, .pdema, .pt, .pth, .ckpt,
.safetensors, .npz, or a checkpoint directory.  OUT ends in .pdparams, .pt, .pth, .safetensors or
.npz; a .pt or .pth is a state dict that torch loads with weights_only=True.  A .safetensors or .npz
takes the model card along: class names, preprocessing, licence.
"""

import argparse
from pathlib import Path

from ppdist.cli import OR_OF_WEIGHTS, add_config, load_config_of, make_parser
from ppdist.common import process


def parse() -> argparse.Namespace:
    parser = make_parser("convert", __doc__)
    add_config(parser, required=False, config=OR_OF_WEIGHTS)
    parser.add_argument("-w", "--weights", required=True, help="weight file or checkpoint")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="where to write")
    parser.add_argument("--keys", choices=["ours", "official"],
                        help="names and layout of this project, or of the model's original "
                        "implementation (default: official for .pt, .pth)")  # fmt: skip
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist.common.manifest import CARD_NOTE
    from ppdist.distributed import comm
    from ppdist.engine.build import build_model
    from ppdist.models.model_card import ModelCard, card_of, read_card_or_warn
    from ppdist.models.weights import (
        arrays_of,
        check_arrays,
        check_writable,
        load_all_weights,
        official_arrays_of,
        write_arrays,
    )

    out: Path = arguments.out
    check_writable(out)
    weights = Path(arguments.weights)
    config = load_config_of(arguments)
    comm.init("cpu", config.distributed)
    model = build_model(config)
    card = read_card_or_warn(weights, process.warn) or ModelCard()
    load_all_weights(model, weights)
    is_torch_file = out.suffix.lower() in (".pt", ".pth")
    # PyTorch programs expect the names of the original implementation.
    keys = arguments.keys or ("official" if is_torch_file else "ours")
    arrays = official_arrays_of(model) if keys == "official" else arrays_of(model)
    # Class names that do not fit the model are left out of the model card.
    names, threshold = card.class_names or config.data.class_names, card.best_f1_threshold
    card = card_of(
        config, model, names if len(names) == config.model.num_classes else (),
        card.category_ids, licence=card.licence, source=card.source or f"converted from {weights}",
    )  # fmt: skip
    card = card.model_copy(update={"best_f1_threshold": threshold})
    write_arrays(out, arrays, {CARD_NOTE: card.text()})
    check_arrays(out, arrays)
    megabytes = out.stat().st_size / 1e6
    print(f"{out}: {len(arrays)} tensors, {megabytes:.1f} MB, {keys} keys; read back and equal")
    return 0
