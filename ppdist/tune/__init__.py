"""Hyper-parameter search and ablations: many trainings as one study (docs/tuning.md).

Read in this order: study (the YAML file), cells (what a trial is), store (the folder that several
processes share), job (one training), curve (what it has measured so far), calibrate (equal time for
unequal variants), search (the loop), results (what is left), table (for docs/dev/recipes.md).
"""
