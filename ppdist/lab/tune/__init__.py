"""Hyper-parameter search: many training runs in one study (docs/tuning.md).

trial     a cell (a setting and a seed), its training run, its metric curve
store     the folder that several processes share
search    the loop that runs the trials
results   trials.jsonl, and the table of settings
"""
