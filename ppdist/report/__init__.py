"""One HTML page about a run, or about how several runs differ, from the files they leave.

run.py         what a run's folder says, however incomplete   evaluation.py   evaluation.json
of_one.py      what is shown of one run                       of_several.py   of several
scores.py      evaluation.json as charts and tables           settings.py     changed keys
charts.py      curves as SVG                                  page.py         the HTML
"""
