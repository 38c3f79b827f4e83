"""Configuration: its keys, reading YAML, messages with file, line and key.

    experiment.py   the tree of all Sections, and load_config
    base.py         Section; file -> Section -> text
    yaml.py         files and -o items as trees that remember their lines
    shipped.py      the configs that ship with ppdist, by name
    errors.py       what pydantic found, in words
    validate.py     what parts of a tree ask of each other
    plugins.py      detectors, formats, backbones and trackers of other packages
    schema.py       docs/config.md and configs/schema.json

The other files hold the Sections, by the key of a file that they stand under.  Nothing here needs
Paddle, and of ours only ppdist.common.errors.
"""

from ppdist.config.experiment import ExperimentConfig, changed, load_config

__all__ = ["ExperimentConfig", "changed", "load_config"]
