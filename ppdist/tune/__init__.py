"""Hyper-parameter search and ablations: many trainings as one study (docs/tuning.md).

trial     a cell (a setting and a seed), its training, its curve
store     the folder that several processes share
search    the loop; equal time for unequal variants
results   trials.jsonl, plots, and tables for docs/dev/recipes.md
"""
