"""Hyper-parameter search: many trainings as one study (docs/tuning.md).

trial     a cell (a setting and a seed), its training, its curve
store     the folder that several processes share
search    the loop
results   trials.jsonl, and the table of settings
"""
