"""Report: one HTML page about one run or several.

page.py        the HTML                           run.py           what a run's folder says
one_run.py     what is shown of one run           several_runs.py  of several
evaluation.py  evaluation.json, charts, tables    charts.py        curves as SVG
"""
