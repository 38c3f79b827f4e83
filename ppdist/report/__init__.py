"""One HTML page about a run, or about how several runs differ, from their files.

page.py        the HTML                           run.py           what a run's folder says
one_run.py     what is shown of one run           several_runs.py  of several
evaluation.py  evaluation.json, charts, tables    charts.py        curves as SVG
"""
